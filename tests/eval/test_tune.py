"""`python -m eval tune`: the tree that is really fastest, or the baseline, and `tree: auto`."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import write_yaml

from eval import tune
from eval.commands import evaluate
from eval.tune import Candidate, choose
from redrafter_jax import InputError, TreeConfig, load_tree, save_drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.files.tree_table import (
    TreeTable,
    TunedTree,
    find_tree_table,
    write_tree_table,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = TreeConfig(1, 1)


@pytest.fixture
def config(tmp_path: Path, pair_settings: dict[str, Any], drafter: LoadedHead) -> Path:
    """Of a drafter that knows nothing of the target."""
    save_drafter(drafter, tmp_path / "drafter")
    values = pair_settings | {
        "drafter": str(tmp_path / "drafter"),
        "prompt_count": 4,
        "dtype": "float32",
        "max_new_tokens": 24,
        "report_dir": str(tmp_path / "report"),
    }
    tuned = {
        "trees": [{"beam_width": 4, "draft_rounds": 3}],
        "batch_sizes": [2],
        "pairs": 3,
    }
    head = {"drafter": values.pop("drafter"), "tree": "auto"}
    compared = {"batch_size": 2, "drafters": {"head": head}}
    write_yaml(tmp_path / "compare.yaml", values | compared)
    return write_yaml(tmp_path / "tune.yaml", values | tuned | {"drafter": head["drafter"]})


@pytest.mark.long
def test_with_a_random_drafter_the_baseline_is_chosen_and_auto_obeys_the_table(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(["tune", "--config", str(config)])
    shown, folder = capsys.readouterr().out, config.parent
    assert "The trees: " in shown
    assert "the baseline  chosen" in shown
    assert load_tree(folder / "drafter", 2, 0.0) is None
    (row,) = json.loads((folder / "report" / "tune.json").read_text())["rows"]
    assert (row["batch_size"], row["sampling"], row["num_nodes"]) == (2, "greedy", 13)
    assert row["measured"][0] < 1
    assert not row["chosen"]

    def compared(name: str) -> dict[str, Any]:
        report = folder / name
        evaluate(["--config", str(folder / "compare.yaml"), f"report_dir={report}"])
        (case,) = json.loads((report / "compare.json").read_text())["samplings"]
        return case["ways"]["head"] | case["methods"]["head"]

    head = compared("baseline")
    assert (head["tree"], head["num_nodes"], head["acceptance_length"]) == (None, 1, 1)
    tree = TunedTree(2, 0.0, TreeConfig(4, 3), 2.0, 2.0)
    write_tree_table(folder / "drafter" / "draft.yaml", TreeTable("a", "b", (tree,)))
    head = compared("tree")
    assert (head["tree"]["beam_width"], head["num_nodes"]) == (4, 13)
    # Three turns decoded the two batches of the prompts, the first one twice.
    assert row["turns"] == 3
    assert head["acceptance_length"] == pytest.approx(row["acceptance_length"], abs=0.1)
    assert row["acceptance_length"] > 1


@pytest.mark.long
def test_limited_minutes_are_shared_and_what_they_leave_out_is_said(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each reading moves by a second."""
    seconds = iter(range(10_000))
    monkeypatch.setattr("eval.tune.time.perf_counter", lambda: float(next(seconds)))
    evaluate(["tune", "--config", str(config), "batch_sizes=[1,2,4]", "minutes=1"])
    shown = capsys.readouterr().out
    table = find_tree_table(config.parent / "drafter")
    assert table
    sizes = [tree.batch_size for tree in table.trees]
    assert sizes == [1, 2, 4][: len(sizes)]
    left_out = "; ".join(f"batch size {size}, greedy" for size in [1, 2, 4][len(sizes) :])
    assert left_out
    assert f"No time was left for: {left_out}." in shown


@pytest.mark.parametrize("minutes", [0.001, 1e-9])
def test_a_time_that_is_over_when_the_models_are_loaded_still_measures_a_tree(
    config: Path, capsys: pytest.CaptureFixture[str], minutes: float
) -> None:
    """So that hours of training before are not in vain."""
    more = ["batch_sizes=[2,4]", f"minutes={minutes}", "pairs=8", "entrants=3"]
    trees = "trees=[{beam_width: [1, 2, 4], draft_rounds: 3}]"
    evaluate(["tune", "--config", str(config), trees, *more])
    assert "No time was left for: batch size 4, greedy." in capsys.readouterr().out
    (row,) = json.loads((config.parent / "report" / "tune.json").read_text())["rows"]
    assert (row["batch_size"], row["turns"]) == (2, 4)
    table = find_tree_table(config.parent / "drafter")
    assert table
    assert [tree.batch_size for tree in table.trees] == [2]


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ([(1.1, 1.2, 1.3), (1.2, 1.5, 1.6)], 1),
        # The median is larger, but a quarter of the runs lose.
        ([(1.1, 1.2, 1.3), (0.9, 1.5, 1.6)], 0),
        ([(0.9, 1.2, 1.3), (1.0, 1.0, 1.0)], None),
    ],
)
def test_what_beats_the_baseline_beyond_noise_is_chosen(
    measured: list[tuple[float, float, float]], chosen: int | None
) -> None:
    finalists = [Candidate(SMALL, 2.0, 1.0, 2.0, 8, quartiles) for quartiles in measured]
    assert choose(finalists) == (None if chosen is None else finalists[chosen])


@pytest.mark.parametrize(("prompts", "sizes"), [(3, [1, 2]), (4, [1, 2, 4])])
def test_unless_told_otherwise_every_batch_up_to_eight_has_an_entry(
    config: Path, monkeypatch: pytest.MonkeyPatch, prompts: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(tune._Pair, "find", lambda *_: [])
    monkeypatch.setattr(tune, "show", lambda *_: None)
    evaluate(["tune", "--config", str(config), f"prompt_count={prompts}", "batch_sizes=null"])
    table = find_tree_table(config.parent / "drafter")
    assert table is not None
    assert [tree.batch_size for tree in table.trees] == sizes


def test_answers_of_one_token_are_nothing_to_tune_on(config: Path) -> None:
    with pytest.raises(
        InputError, match=r"every answer ends at its first token \(batch size 2, greedy\), so"
    ):
        evaluate(["tune", "--config", str(config), "max_new_tokens=1"])


def test_more_rows_than_prompts_are_refused(config: Path) -> None:
    with pytest.raises(InputError, match=r"batch_sizes has 8, but only 4 prompts are asked"):
        evaluate(["tune", "--config", str(config), "batch_sizes=[1,8]"])
