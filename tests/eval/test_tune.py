"""`python -m eval tune`: the tree that is really fastest, or the baseline, and `draft: auto`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_folders import write_yaml

from eval import tune
from eval.commands import evaluate
from eval.recorded import Recording
from eval.step_costs import TimedTree
from eval.tune import Candidate, choose, leaders_first, rank_candidates
from redrafter_jax import DraftConfig, InputError, load_draft, save_drafter
from redrafter_jax.checkpoints.draft_table import (
    DraftTable,
    TunedTree,
    find_draft_table,
    write_draft_table,
)
from redrafter_jax.drafters.head_drafter import DraftModel

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL, LARGE = DraftConfig(1, 1), DraftConfig(2, 2)


@pytest.fixture
def config(tmp_path: Path, pair_settings: dict[str, Any], drafter: DraftModel) -> Path:
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
        "finalists": 1,
        "steps": 2,
        "step_repeats": 2,
        "repeats": 3,
    }
    write_yaml(tmp_path / "eval.yaml", values | {"batch_size": 2, "draft": "auto"})
    return write_yaml(tmp_path / "tune.yaml", values | tuned)


@pytest.mark.long
def test_with_a_random_drafter_the_baseline_is_chosen_and_auto_obeys_the_table(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(["tune", "--config", str(config)])
    shown, folder = capsys.readouterr().out, config.parent
    assert "The trees: " in shown
    assert "the baseline  chosen" in shown
    assert load_draft(folder / "drafter", 2, 0.0) is None
    (row,) = json.loads((folder / "report" / "tune.json").read_text())["rows"]
    assert (row["batch_size"], row["sampling"], row["num_nodes"]) == (2, "greedy", 13)
    assert row["measured"][0] < 1
    assert not row["chosen"]

    def report_of_auto() -> dict[str, Any]:
        once = ["repeats=1", "warm_ups=1"]
        evaluate(["--config", str(folder / "eval.yaml"), *once])
        return json.loads((folder / "report" / "report.json").read_text())

    report = report_of_auto()
    assert (report["draft"], report["num_nodes"]) == (None, 1)
    assert report["methods"]["speculative"]["acceptance_length"] == 1
    tree = TunedTree(2, 0.0, DraftConfig(4, 3), 2.0, 2.0)
    write_draft_table(folder / "drafter" / "draft.yaml", DraftTable("a", "b", (tree,)))
    report = report_of_auto()
    assert (report["draft"]["beam_width"], report["num_nodes"]) == (4, 13)
    # What tuning counted without a target call.
    speculative = report["methods"]["speculative"]
    assert speculative["acceptance_length"] == row["acceptance_length"] > 1


def test_trees_rank_by_the_median_batch_over_the_cost_of_a_step() -> None:
    # In batches of two the baseline needs 8, 6 and 2 calls; the last batch ends with prefill.
    recording = Recording([], [[0] * tokens for tokens in (7, 9, 7, 7, 3, 1, 1, 1)])
    counts = {
        # Rows of calls that gain one and two tokens: 6, 6 and 2 calls.
        SMALL: np.asarray([[6, 0], [0, 4], [4, 1], [6, 0], [2, 0], *[[0, 0]] * 3]),
        # Up to three tokens: 4, 3 and 2 calls.
        LARGE: np.asarray([[0, 0, 2], [2, 0, 2], [1, 1, 1], [0, 0, 2], [2, 0, 0], *[[0] * 3] * 3]),
    }
    timed = [TimedTree(SMALL, 0.1, 1.1), TimedTree(LARGE, 0.5, 1.6)]
    first, second = rank_candidates(recording, counts, timed, 2)
    assert (first.draft, second.draft) == (LARGE, SMALL)
    assert first[1:4] == pytest.approx((28 / 13, 1.6, 2 / 1.6))
    assert second[1:4] == pytest.approx((28 / 23, 1.1, 1 / 1.1))


def test_the_fastest_tree_of_each_number_of_nodes_is_measured_first() -> None:
    sizes = [(4, 8), (4, 7), (3, 8), (3, None), (2, 4), (2, 7)]
    candidates = [
        Candidate(DraftConfig(beams, 3, num_nodes=nodes), 2.0, 1.0, 2.0 - place)
        for place, (beams, nodes) in enumerate(sizes)
    ]
    # Three beams of three rounds have ten nodes in all.
    order = [8, 7, 10, 4, 8, 7]
    assert [one.draft.budget for one in leaders_first(candidates)] == order
    assert leaders_first(candidates)[4:] == [candidates[2], candidates[5]]


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
    measured: list[tuple[float, ...]], chosen: int | None
) -> None:
    finalists = [Candidate(SMALL, 2.0, 1.0, 2.0, quartiles) for quartiles in measured]
    assert choose(finalists) == (None if chosen is None else finalists[chosen])


@pytest.mark.parametrize(("prompts", "sizes"), [(3, [1, 2]), (4, [1, 2, 4])])
def test_unless_told_otherwise_every_batch_up_to_eight_has_an_entry(
    config: Path, monkeypatch: pytest.MonkeyPatch, prompts: int, sizes: list[int]
) -> None:
    timed: list[int] = []

    def time_steps(*args: Any) -> list[list[TimedTree]]:
        timed.append(args[3])
        return [[]]

    monkeypatch.setattr(tune, "time_steps", time_steps)
    monkeypatch.setattr(tune, "rank_candidates", lambda *_: [])
    monkeypatch.setattr(tune, "_measure", lambda *_: [])
    monkeypatch.setattr(tune, "show", lambda *_: None)
    evaluate(["tune", "--config", str(config), f"prompt_count={prompts}", "batch_sizes=null"])
    assert timed == sizes
    table = find_draft_table(config.parent / "drafter")
    assert table is not None
    assert [tree.batch_size for tree in table.trees] == sizes


def test_answers_of_one_token_are_nothing_to_tune_on(config: Path) -> None:
    with pytest.raises(InputError, match=r"every answer ends at its first token \(greedy\), so"):
        evaluate(["tune", "--config", str(config), "max_new_tokens=1"])
