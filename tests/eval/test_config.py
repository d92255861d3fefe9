"""The settings of `python -m eval`: grids of trees, and the repository's configurations."""

import re
from pathlib import Path

import pytest
from places import CONFIGS

from eval.commands import COMMANDS, SPEED, Command
from eval.tree_grid import TreeGrid
from redrafter_jax import TreeConfig
from redrafter_jax.settings.files import load_settings


def test_a_grid_has_every_tree_of_its_lists() -> None:
    grid = TreeGrid(
        beam_width=[2], draft_rounds=[3], num_nodes=[4, None], sharpness=[1.5], lookup_tokens=[0, 2]
    )
    assert grid.build() == [
        TreeConfig(2, 3, 4, sharpness=1.5),
        TreeConfig(2, 3, 7, sharpness=1.5),
        TreeConfig(2, 3, 4, sharpness=1.5, lookup_tokens=2),
        TreeConfig(2, 3, 9, sharpness=1.5, lookup_tokens=2),
    ]
    # None and 33 nodes are one tree.
    assert TreeGrid(num_nodes=[33, None]).build() == [TreeConfig(num_nodes=33)]


# By the command that their headers name.
CONFIGURATIONS = [
    pytest.param(path, COMMANDS[found[1]] if found[1] else SPEED, id=path.stem)
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if (found := re.search(r"python -m eval ([a-z-]+)? ?--config", path.read_text()))
]


@pytest.mark.parametrize(("path", "command"), CONFIGURATIONS)
def test_the_repositorys_configurations_are_valid(path: Path, command: Command) -> None:
    # Some leave the target, or the prompts too, to whoever starts them.
    left = {"target": "a/model", "prompts": "a.jsonl"}.items()
    fields, stated = command.settings.model_fields, path.read_text()
    words = [f"{name}={it}" for name, it in left if name in fields and f"\n{name}:" not in stated]
    load_settings(command.settings, path, words)
