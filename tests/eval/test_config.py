"""The settings of `python -m eval`: ways of drafting, and the repository's configurations."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from places import CONFIGS, ROOT

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
    # Some leave the target, its head and the prompts to whoever starts them.
    left = {"target": "a/model", "drafter": "a/head", "prompts": "a.jsonl"}
    fields, stated = command.settings.model_fields, path.read_text()
    if "prompts" not in fields:  # a drafter is a shape there
        del left["drafter"]
    named = left.items()
    words = [f"{name}={it}" for name, it in named if name in fields and f"\n{name}:" not in stated]
    load_settings(command.settings, path, words)


# Of pages and headers, the comparisons with their words; other commands resume nothing.
COMPARISON = re.compile(r"python -m eval(?: compare)? (--config configs/(?:[^`\n]|\n    )*)")
PAGES = [*(ROOT / "docs").rglob("*.md"), *CONFIGS.rglob("*.yaml"), *CONFIGS.rglob("*.md")]


def test_comparisons_that_are_documented_have_folders_of_their_own() -> None:
    """What is in a folder is resumed by the same command, and refuses another."""
    by_folder: dict[str, set[tuple[str, ...]]] = {}
    for page in PAGES:
        text = (
            page.read_text().replace("\n#   ", "\n    ").replace("$config", "configs/smollm2_135m")
        )
        for found in COMPARISON.finditer(text):
            command = re.sub(r"\\?\n", " ", found[1])
            path, *words = shlex.split(command, comments=True)[1:]
            stated = yaml.safe_load((ROOT / path).read_text())["report_dir"]
            named = [word for word in words if word.startswith("report_dir=")]
            folder = [f"report_dir={stated}", *named][-1]
            by_folder.setdefault(folder, set()).add((path, *sorted(words)))
    assert len(by_folder) > 8
    assert {folder: words for folder, words in by_folder.items() if len(words) > 1} == {}
