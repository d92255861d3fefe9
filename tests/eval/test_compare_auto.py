"""`eval compare` with the tree of the drafter's own table."""

import json
import shutil
from pathlib import Path

import pytest

from eval.commands import evaluate
from eval.config import CompareSettings
from redrafter_jax import TreeConfig
from redrafter_jax.files.tree_table import TreeTable, TunedTree, write_tree_table
from redrafter_jax.settings.files import load_settings

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEAD = TreeConfig(beam_width=2, draft_rounds=2)


def test_auto_takes_the_tree_of_the_drafters_table_at_each_temperature(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = load_settings(CompareSettings, compared).drafters["head"].drafter
    assert drafter is not None
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    trees = (TunedTree(1, 0.0, None, 1.0, 1.0), TunedTree(1, 0.8, HEAD, 1.2, 1.1))
    write_tree_table(folder / "draft.yaml", TreeTable("any", "float32", trees))
    ways = f"drafters={{head: {{drafter: {folder}, tree: auto}}}}"
    evaluate(["--config", str(compared), f"report_dir={tmp_path}", ways, "prompt_count=2"])
    cases = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    greedy, sampled = (case["ways"]["head"] for case in cases)
    assert (greedy["tree"], greedy["num_nodes"]) == (None, 1)
    assert (TreeConfig(**sampled["tree"]), sampled["num_nodes"]) == (HEAD, 5)
    *_, line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("greedy: By the drafter's table, decoding without drafting is fastest;")


@pytest.mark.long
def test_without_the_clock_auto_takes_the_tree_of_one_prompt_unless_a_batch_size_is_given(
    compared: Path, tmp_path: Path
) -> None:
    drafter = load_settings(CompareSettings, compared).drafters["head"].drafter
    assert drafter is not None
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    trees = (TunedTree(1, 0.0, HEAD, 1.2, 1.1), TunedTree(5, 0.0, TreeConfig(1, 1), 1.2, 1.1))
    write_tree_table(folder / "draft.yaml", TreeTable("any", "float32", trees))
    ways = f"drafters={{head: {{drafter: {folder}, tree: auto}}}}"
    few = ("clock=false", "samplings=[{temperature: 0}]", "max_new_tokens=2")
    for index, (words, tree) in enumerate((([], HEAD), (["batch_size=5"], TreeConfig(1, 1)))):
        report = tmp_path / str(index)
        evaluate(["--config", str(compared), f"report_dir={report}", ways, *few, *words])
        (case,) = json.loads((report / "compare.json").read_text())["samplings"]
        assert TreeConfig(**case["ways"]["head"]["tree"]) == tree


def test_a_head_without_a_tree_is_not_read(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = (TunedTree(1, 0.0, None, 1.0, 1.0),)
    write_tree_table(tmp_path / "draft.yaml", TreeTable("any", "float32", trees))
    for name in ("find_drafter", "load_drafter"):
        monkeypatch.setattr(f"eval.compare.{name}", lambda *_, **__: pytest.fail("it is read"))
    ways = f"drafters={{head: {{drafter: {tmp_path}, tree: auto}}}}"
    few = ("clock=false", "samplings=[{temperature: 0}]", "max_new_tokens=2")
    evaluate(["--config", str(compared), f"report_dir={tmp_path}", ways, *few])
    (case,) = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    assert case["verdict"]["kind"] == "no tree"
