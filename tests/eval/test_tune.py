"""`python -m eval tune`: the tree that is really fastest, or the baseline, and `tree: auto`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_folders import write_lines
from tiny_folders import write_pair, write_yaml
from tiny_models import forgetful_target

from eval import tune
from eval.benchmark import Batch, Method, Run, state_shape
from eval.commands import evaluate
from eval.halving import Race, find_fastest
from eval.tuned import Candidate, choose, verdict
from redrafter_jax import InputError, TreeConfig, load_tree, save_drafter
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.files.tree_table import (
    TreeTable,
    TunedTree,
    find_tree_table,
    write_tree_table,
)
from redrafter_jax.verdict import Texts

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = TreeConfig(1, 1)


def candidate(low: float, middle: float, high: float, recurrent: int = 9) -> Candidate:
    accepted = {"recurrent": recurrent}
    return Candidate(SMALL, 2.0, 1.0, 2.0, 8, 8, (low, middle, high), accepted)


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
    assert "Prompts were asked with the chat template: none." in shown


@pytest.mark.parametrize("minutes", [1.0, 5.0, 30.0])
def test_a_program_that_takes_long_to_compile_ends_the_search_with_its_measurement(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
) -> None:
    """On a clock by which it takes four minutes, and to decode a batch takes a second."""
    clock, seen = [0.0], set[Any]()
    compiled: list[float] = []

    def decode_batch(method: Method, batch: Batch) -> Run:
        program = method.tree, state_shape(method, batch)
        if program not in seen:
            seen.add(program)
            compiled.append(clock[0])
            clock[0] += 240
        clock[0] += 1
        rows = len(batch.prompts)
        counts = np.asarray([[0, 12]] * rows)
        return Run([[*range(24)]] * rows, [12] * rows, counts, {"head": [9] * rows}, 0.0, 1.0)

    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(tune, "decode_batch", decode_batch)
    grid = "trees=[{beam_width: [1, 2, 4], draft_rounds: [1, 2, 3]}]"
    sizes = "batch_sizes=[1,2]"
    evaluate(["tune", "--config", str(config), grid, sizes, "pairs=8", f"minutes={minutes}"])
    shown = capsys.readouterr().out
    # The baseline, one tree, and four turns of both.
    assert clock[0] <= 60 * minutes + 2 * 240 + 2 + 4 * 2
    assert not [begun for begun in compiled if begun >= 60 * minutes + 240]
    assert "The time limit allowed only: batch size 1, greedy: " in shown
    assert ("No time was left for: batch size 2, greedy." in shown) == (minutes < 30)
    rows = json.loads((config.parent / "report" / "tune.json").read_text())["rows"]
    assert all(row["turns"] >= 4 for row in rows if row["finalist"])


@pytest.mark.parametrize("minutes", [0.001, 1e-9])
@pytest.mark.long
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
    finalists = [candidate(*quartiles) for quartiles in measured]
    assert choose(finalists) == (None if chosen is None else finalists[chosen])


def test_what_is_faster_and_had_nothing_accepted_is_noise() -> None:
    assert choose([candidate(1.1, 1.2, 1.3, recurrent=0)]) is None


@pytest.mark.parametrize(
    ("tree", "measured", "accepted", "texts", "sentence"),
    [
        (
            SMALL,
            (1.1, 1.2, 1.3),
            {"recurrent": 9},
            Texts(8),
            "Faster: 'head' decodes 1.20 times as fast (middle half 1.10 to 1.30, faster in 8 of 8 "
            "turns) with W=1 R=1 N=2; the table has this tree.",
        ),
        # Gemma 3 270M's: 27 tokens of the head, 207 looked up.
        (
            TreeConfig(1, 1, lookup_tokens=8),
            (2.0, 2.4, 2.5),
            {"recurrent": 27, "lookup": 207},
            Texts(8),
            "Faster by prompt lookup, not by the head: 'head and lookup' decodes 2.40 times as "
            "fast (middle half 2.00 to 2.50, faster in 8 of 8 turns) with W=1 R=1 N=10 C=8, 88% of "
            "the accepted tokens looked up; the table has this tree, but it needs no head: "
            "--no-drafter --lookup-tokens 8.",
        ),
        (
            SMALL,
            (2.0, 2.4, 2.5),
            {"recurrent": 9},
            Texts(8, repeating=4),
            "Too little data to tell: 4 of 8 texts repeat themselves, which any drafter guesses; "
            "the table has the tree that was fastest on these prompts; tune again with more "
            "prompts, other prompts or more minutes.",
        ),
        (
            SMALL,
            (0.8, 0.9, 0.95),
            {"recurrent": 9},
            Texts(8),
            "Slower than no drafting: 'head' decodes 0.90 times as fast (middle half 0.80 to 0.95, "
            "faster in 0 of 8 turns) with W=1 R=1 N=2; the table says to decode without the head.",
        ),
        (
            SMALL,
            (0.8, 0.9, 0.95),
            {"recurrent": 9},
            Texts(2),
            "Too little data to tell: 2 texts, but 8 are needed; the table has no tree; tune "
            "again with more prompts, other prompts or more minutes.",
        ),
    ],
)
def test_the_verdict_says_whose_gain_the_chosen_tree_is(
    tree: TreeConfig,
    measured: tuple[float, float, float],
    accepted: dict[str, int],
    texts: Texts,
    sentence: str,
) -> None:
    faster = 8 if measured[0] > 1 else 0
    found = [Candidate(tree, 2.0, 1.0, 2.0, 8, faster, measured, accepted)]
    assert verdict(found, choose(found), texts) == sentence


@pytest.mark.parametrize(
    ("turns", "faster", "words"),
    [
        (8, 7, r"No clear .*, faster in 7 of 8 turns\).*; the table nevertheless has this tree"),
        (
            4,
            4,
            "Too little data to tell: 4 turns with the baseline, but 8 are needed; the table",
        ),
    ],
)
def test_a_tree_that_chance_may_have_chosen_is_not_called_faster(
    turns: int, faster: int, words: str
) -> None:
    found = [Candidate(SMALL, 2.0, 1.0, 2.0, turns, faster, (1.1, 1.2, 1.3), {"recurrent": 9})]
    assert re.match(words, verdict(found, choose(found), Texts(8)))


def test_of_200_searches_among_equal_trees_ten_at_most_find_a_difference() -> None:
    """Trees are not only many, the best of their first turns go on."""
    random = np.random.default_rng(53)
    trees = [TreeConfig(1, rounds) for rounds in range(1, 25)]

    def measure(trees: Sequence[TreeConfig], _: int) -> list[float]:
        baseline, *own = random.lognormal(0.0, 0.1, 1 + len(trees))
        return [baseline / one for one in own]

    told = []
    for _ in range(200):
        race = Race(lambda *_: None, measure, 8, 3)
        found = []
        for one in find_fastest(trees, trees[::3], race)[:3]:
            ratios = np.asarray([*one.speedups.values()])
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
            won = int((ratios > 1).sum())
            counts = 8, won, (low, middle, high), {"recurrent": 9}
            found.append(Candidate(one.tree, 2.0, 1.0, 2.0, *counts))
        told.append(verdict(found, choose(found), Texts(8)))
    assert sum(not one.startswith("No clear difference") for one in told) <= 10


@pytest.mark.parametrize(
    ("memory", "last"),
    [
        (1.0, "Slower than no drafting|No clear difference|Faster by prompt lookup, not by"),
        pytest.param(
            0.0,
            "Too little data to tell: [5-8] of 8 texts repeat themselves",
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_last_line_gives_a_gain_to_a_head_of_random_weights(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    drafter: LoadedHead,
    memory: float,
    last: str,
) -> None:
    folders = write_pair(tmp_path, forgetful_target(memory), drafter)
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": one * 2} for one in "abcdefgh"))
    values = {
        "target": folders.target,
        "drafter": folders.drafter,
        "prompts": prompts,
        "dtype": "float32",
        "max_new_tokens": 24,
        "stop": "never",
        "trees": [
            # Two nodes cost so tiny a target nothing, and random drafts may be right now and then.
            {"beam_width": 2, "draft_rounds": 4},
            {"beam_width": 2, "draft_rounds": 4, "lookup_tokens": 4},
        ],
        "batch_sizes": [1],
        "report_dir": str(tmp_path),
    }
    evaluate(["tune", f"--config={write_yaml(tmp_path / 'settings.yaml', values)}"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(f"batch size 1, greedy: ({last})", line)


@pytest.mark.parametrize(("prompts", "sizes"), [(3, [1, 2]), (4, [1, 2, 4])])
def test_unless_told_otherwise_every_batch_up_to_eight_has_an_entry(
    config: Path, monkeypatch: pytest.MonkeyPatch, prompts: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(tune._Pair, "find", lambda *_: [])
    monkeypatch.setattr(tune, "show", lambda *_: None)
    monkeypatch.setattr(tune, "verdict", lambda *_: "")
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
    with pytest.raises(InputError, match=r"batch_sizes includes 8, but there are only 4 prompts"):
        evaluate(["tune", "--config", str(config), "batch_sizes=[1,8]"])
