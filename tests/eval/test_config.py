"""The settings of `python -m eval`: ways of drafting, and the repository's configurations."""

import re
from pathlib import Path

import pytest
from places import CONFIGS

from eval.commands import COMMANDS, DEFAULT, Command
from eval.config import DraftingSettings
from eval.trees import TreeGrid
from redrafter_jax import TreeConfig
from redrafter_jax.settings.files import dump_settings, load_settings


def test_a_way_of_drafting_has_a_tree_lists_of_them_or_the_tables() -> None:
    drafting = DraftingSettings.model_validate(
        {"drafter": "a", "tree": {"beam_width": 3, "num_nodes": [4, 6]}}
    )
    assert isinstance(drafting.tree, TreeGrid)
    assert [tree.num_nodes for tree in drafting.tree.build()] == [4, 6]
    paths = DraftingSettings.model_validate(
        {"drafter": "a", "tree": {"static_tree": [[0], [1], [0, 0]]}}
    )
    assert isinstance(paths.tree, TreeGrid)
    assert paths.tree.build() == [TreeConfig(static_tree=((0,), (1,), (0, 0)))]
    auto = DraftingSettings.model_validate({"drafter": "a", "tree": "auto"})
    assert dump_settings(auto) == "drafter: a\ntree: auto\n"


# By the command that their headers name.
CONFIGURATIONS = [
    pytest.param(path, COMMANDS[found[1] or DEFAULT], id=path.stem)
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
