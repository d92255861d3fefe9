"""How `redrafter fit` ends: the table that obeys the report, and what it recommends."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from chat_folders import CHATML
from fit_plans import plan_of

from redrafter_jax import TreeConfig
from redrafter_jax.files.tree_table import (
    TreeTable,
    TunedTree,
    find_tree_table,
    write_tree_table,
)
from train.fit.ending import finalists, obey_report, verdict
from train.fit.plan import STAGES, FitPlan, FitRequest, write_plan
from train.fit.run import fit

TREE = TreeConfig(1, 1, 2)
OTHER = TreeConfig(2, 2, 4)


def write_ending(
    folder: Path, speedups: dict[float, float], trees: tuple[TunedTree, ...]
) -> FitPlan:
    """A tuner's table, and a report of these speed-ups of a tree of two nodes by temperature."""
    (folder / "run" / "drafter").mkdir(parents=True)
    (folder / "report").mkdir()
    write_table(folder, trees)
    cases = [
        {
            "sampling": {"temperature": heat},
            "answers": {
                "chat_template": "none",
                "turns": 1,
                "answer_tokens": [24.0, 24.0, 24.0],
                "ended_by": {"stop_token": 0, "max_new_tokens": 8},
                "short": 0,
                "repeating": 0,
            },
            "prompts": [{}] * 8,
            "ways": {"head": {"tree": asdict(TREE)}},
            "methods": {
                "head": {
                    "speedup": speedup,
                    "speedup_quartiles": [speedup - 0.05, speedup + 0.05],
                    "timed_turns": 8,
                    "timed_turns_faster": 8 if speedup > 1 else 0,
                    "acceptance_length": 1.3,
                    "accepted_by": {"recurrent": 90},
                }
            },
        }
        for heat, speedup in speedups.items()
    ]
    (folder / "report" / "compare.json").write_text(json.dumps({"samplings": cases}))
    return plan_of(minutes=10.0)


def write_table(folder: Path, trees: tuple[TunedTree, ...]) -> None:
    path = folder / "run" / "drafter" / "draft.yaml"
    write_tree_table(path, TreeTable("CPU", "float32", trees))


def read_table(folder: Path) -> tuple[TunedTree, ...]:
    table = find_tree_table(folder / "run" / "drafter")
    assert table
    return table.trees


def tuned(batch_size: int, temperature: float, draft: TreeConfig | None) -> TunedTree:
    ratios = (1.0, 1.0) if draft is None else (1.2, 1.15)
    return TunedTree(batch_size, temperature, draft, *ratios)


BOTH = (tuned(1, 0.0, TREE), tuned(1, 0.7, TREE))


@pytest.mark.parametrize(
    ("trees", "at_heat", "obeyed"),
    [
        # What the report measured takes the place of what the tuner did.
        (BOTH, 1.05, [(0.0, TREE, 1.1), (0.7, TREE, 1.05)]),
        (BOTH, 0.9, [(0.0, TREE, 1.1), (0.7, None, 1.0)]),
        # The tuner had no time for 0.7.
        (BOTH[:1], 1.05, [(0.0, TREE, 1.1), (0.7, TREE, 1.05)]),
        (BOTH[:1], 0.9, [(0.0, TREE, 1.1), (0.7, None, 1.0)]),
        # A tree that the report does not have stays, and so does the baseline.
        ((BOTH[0], tuned(1, 0.7, OTHER)), 0.9, [(0.0, TREE, 1.1), (0.7, OTHER, 1.15)]),
        ((BOTH[0], tuned(1, 0.7, None)), 1.3, [(0.0, TREE, 1.1), (0.7, None, 1.0)]),
    ],
)
def test_the_table_obeys_the_report_at_batch_size_one(
    trees: tuple[TunedTree, ...],
    at_heat: float,
    obeyed: list[tuple[float, TreeConfig | None, float]],
    tmp_path: Path,
) -> None:
    eight = tuned(8, 0.0, TREE)
    write_ending(tmp_path, {0.0: 1.1, 0.7: at_heat}, (*trees, eight))
    obey_report(tmp_path)
    *ones, last = read_table(tmp_path)
    assert sorted((one.temperature, one.tree, one.measured_speedup) for one in ones) == obeyed
    assert {one.batch_size for one in ones} == {1}
    assert last == eight


@pytest.mark.parametrize(
    ("greedy", "sampled", "at_eight", "kept", "words"),
    [
        (1.2, 1.1, None, [0.0, 0.7], "Faster: 'head' decodes 1.20 times as fast"),
        (
            1.2,
            0.9,
            None,
            [0.0],
            "; at temperature 0.7, 0.90 times as fast; the table beside the head, draft",
        ),
        (0.9, 1.1, TREE, [0.7], "Slower than no drafting: 'head' decodes 0.90 times as fast"),
        # 1.3 tokens a call at 0.9: it needs 1.05 * 1.3 / 0.9 - 1.3 more, 2.7 doublings.
        (
            0.9,
            0.9,
            None,
            [],
            "; decode without the head, or fit again: a useful head would need about 70 mi",
        ),
        (
            0.62,
            0.66,
            None,
            [],
            "without the head: on this device a useful head would need more than a day.",
        ),
        # The report measured one prompt at a time alone.
        (
            0.9,
            0.9,
            TREE,
            [],
            "; decode one prompt at a time without the head; for several at once "
            "the tuner found the head faster (batch size 8): serve with --drafter ",
        ),
    ],
)
def test_what_the_report_found_is_recommended(
    greedy: float,
    sampled: float,
    at_eight: TreeConfig | None,
    kept: list[float],
    words: str,
    tmp_path: Path,
) -> None:
    trees = (*BOTH, tuned(8, 0.0, at_eight))
    plan = write_ending(tmp_path, {0.0: greedy, 0.7: sampled}, trees)
    obey_report(tmp_path)
    pays, sentence = verdict(tmp_path, plan)
    assert pays == kept
    assert words in sentence
    # Reading changes nothing: a table of a later `eval tune` stays, and is what is used.
    write_table(tmp_path, trees)
    assert verdict(tmp_path, plan)[0] == [0.0, 0.7]
    assert read_table(tmp_path) == trees


@pytest.mark.parametrize(
    ("repeating", "kept", "words"),
    [
        (
            (8, 8),
            [],
            "8 of 8 texts repeat themselves, which any drafter guesses; at temperature 0.7, "
            "too little data; decode without the head until `eval compare` has measured it",
        ),
        (
            (8, 0),
            [0.7],
            "which any drafter guesses; at temperature 0.7, 1.50 times as fast; the table",
        ),
        (
            (0, 8),
            [0.0],
            "decodes 1.50 times as fast (middle half 1.45 to 1.55, faster in 8 of 8 turns) with "
            "W=1 R=1 N=2; at temperature 0.7, too little data; the table",
        ),
    ],
)
def test_texts_that_repeat_themselves_give_no_gain_to_the_head(
    repeating: tuple[int, int], kept: list[float], words: str, tmp_path: Path
) -> None:
    plan = write_ending(tmp_path, {0.0: 1.5, 0.7: 1.5}, BOTH)
    path = tmp_path / "report" / "compare.json"
    report = json.loads(path.read_text())
    for case, count in zip(report["samplings"], repeating, strict=True):
        case["answers"]["repeating"] = count
    path.write_text(json.dumps(report))
    pays, sentence = verdict(tmp_path, plan)
    assert pays == kept
    assert words in sentence


@pytest.mark.parametrize(
    ("speedups", "options"),
    [
        ({0.0: 1.2, 0.7: 1.1}, "--drafter {}"),
        ({0.0: 1.2, 0.7: 0.9}, "--drafter {}"),
        # Commands are greedy by themselves.
        ({0.0: 0.9, 0.7: 1.1}, "--drafter {} --temperature 0.7"),
        ({0.0: 0.9, 0.7: 0.9}, "--no-drafter"),
    ],
)
def test_the_command_that_is_shown_uses_the_head_where_it_pays(
    speedups: dict[float, float],
    options: str,
    target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a fit whose stages are done; the table at batch size 8 says nothing of one prompt."""
    plan = write_ending(tmp_path, speedups, (*BOTH, tuned(8, 0.0, TREE)))
    obey_report(tmp_path)
    asked = FitRequest(str(target_folder), "float32", 10.0)
    write_plan(plan.model_copy(update={"asked": asked, "done": STAGES}), tmp_path)
    before = read_table(tmp_path)
    fit(str(target_folder), tmp_path, 10.0, "float32")
    shown = capsys.readouterr().err.replace("\n", "")
    words = f"--target {target_folder} {options.format(tmp_path / 'run' / 'drafter')}"
    assert re.search(f"{re.escape(words)} *(Faster|Slower)", shown)
    assert read_table(tmp_path) == before


def test_the_commands_that_are_shown_name_the_template(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the tokenizer has none, so that a head can be used in the format it learned."""
    template = tmp_path / "mine.jinja"
    template.write_text(CHATML)
    asked = FitRequest(str(target_folder), "float32", 10.0, str(template))
    plan = write_ending(tmp_path, {0.0: 1.2, 0.7: 1.1}, BOTH)
    plan = plan.model_copy(update={"asked": asked, "done": STAGES})
    write_plan(plan, tmp_path)
    fit(str(target_folder), tmp_path, 10.0, "float32", str(template))
    shown = capsys.readouterr().err.replace("\n", "")
    drafter = tmp_path / "run" / "drafter"
    words = f"chat --target {target_folder} --drafter {drafter} --chat-template {template}"
    assert re.search(f"{re.escape(words)} *Faster", shown)


def test_the_report_measures_the_trees_that_the_tuner_chose(tmp_path: Path) -> None:
    """Not one of a larger median whose lower quartile is below 1."""

    def row(draft: TreeConfig, sampling: str, median: float, chosen: bool) -> dict[str, Any]:
        measured = [median - 0.1, median, median + 0.1]
        said = {"batch_size": 1, "sampling": sampling, "finalist": True, "chosen": chosen}
        return asdict(draft) | said | {"measured": measured}

    rows = [
        row(OTHER, "greedy", 1.3, False),
        row(TREE, "greedy", 1.2, True),
        row(TREE, "T 0.7", 0.8, False),
        row(OTHER, "T 0.7", 0.9, False),
    ]
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "tune.json").write_text(json.dumps({"rows": rows}))
    assert list(finalists(tmp_path).values()) == [asdict(TREE), asdict(OTHER)]
