"""The settings of `python -m eval`: what is accepted, and how everything else is refused."""

import re
from pathlib import Path

import pydantic
import pytest
from places import CONFIGS

from eval.commands import COMMANDS, SPEED, Command
from eval.config import EvalSettings
from eval.tree_grid import TreeGrid
from redrafter_jax import DraftConfig
from redrafter_jax.settings.files import dump_settings, load_settings


def test_a_grid_has_every_tree_of_its_lists() -> None:
    grid = TreeGrid(
        beam_width=[2], draft_rounds=[3], num_nodes=[4, None], sharpness=[1.5], lookup_tokens=[0, 2]
    )
    assert grid.build() == [
        DraftConfig(2, 3, 4, sharpness=1.5),
        DraftConfig(2, 3, 7, sharpness=1.5),
        DraftConfig(2, 3, 4, sharpness=1.5, lookup_tokens=2),
        DraftConfig(2, 3, 9, sharpness=1.5, lookup_tokens=2),
    ]
    # None and 33 nodes are one tree.
    assert TreeGrid(num_nodes=[33, None]).build() == [DraftConfig(num_nodes=33)]
    with pytest.raises(pydantic.ValidationError, match=r"num_nodes is 2; .* give 3 to 9 nodes"):
        TreeGrid(beam_width=[2], draft_rounds=[3], num_nodes=[2], lookup_tokens=[2])


# By the command that their headers name.
CONFIGURATIONS = [
    pytest.param(path, COMMANDS[found[1]] if found[1] else SPEED, id=path.stem)
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if (found := re.search(r"python -m eval ([a-z-]+)? ?--config", path.read_text()))
]


@pytest.mark.parametrize(("path", "command"), CONFIGURATIONS)
def test_the_repositorys_configurations_are_valid(path: Path, command: Command) -> None:
    # Some leave the target to whoever starts them.
    left = "target" in command.settings.model_fields and "\ntarget:" not in path.read_text()
    load_settings(command.settings, path, ["target=a/model"] if left else [])


def test_the_tree_may_be_left_to_the_drafters_table() -> None:
    names = dict.fromkeys(("target", "drafter", "prompts", "report_dir"), "a/path")
    settings = EvalSettings.model_validate({**names, "max_new_tokens": 32, "draft": "auto"})
    assert settings.draft == "auto"
    assert "\ndraft: auto\n" in dump_settings(settings)
