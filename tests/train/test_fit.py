"""`redrafter fit`: its sizes, and the way from a target to a head, also when it is killed."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_folders import run_module
from train_runs import start_command

from eval.config import TuneSettings
from redrafter_jax import TreeConfig, load_target
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.files.tree_table import (
    TreeTable,
    TunedTree,
    find_tree_table,
    write_tree_table,
)
from redrafter_jax.settings.files import load_settings
from train.config import TrainSettings
from train.fit import probe
from train.fit.ending import finalists, obey_report, verdict
from train.fit.plan import (
    STAGES,
    FitPlan,
    FitRequest,
    Pace,
    is_enough,
    make_plan,
    plan_measuring,
    plan_training,
    read_plan,
    write_plan,
)
from train.fit.probe import Rates, measure_rates
from train.fit.run import fit
from train.fit.settings import train_settings

MINUTES = 60.0
RATES = Rates(alone=50.0, written=150.0, read=500.0, trained=400.0, starting=30.0)
ASKED = FitRequest("model", "float32", 20.0)
STEP = 1024


def plan_of(minutes: float = 20.0, spent: float = 60.0, rates: Rates = RATES) -> FitPlan:
    asked = ASKED._replace(minutes=minutes)
    return make_plan(asked, spent, rows=48, rates=rates, new_tokens=96, row_tokens=512)


def prepare(target: Path, folder: Path) -> tuple[Path, list[str]]:
    """A folder with a small plan and much time, as a probe leaves it, and what goes on with it."""
    folder.mkdir()
    rates = Rates(50.0, 60.0, 500.0, 500.0, 5.0)
    asked = FitRequest(str(target), "float32", MINUTES)
    plan = make_plan(asked, 0.0, rows=4, rates=rates, new_tokens=8, row_tokens=64)
    changes = {"tokens": 4096, "prompts": 8, "answer_tokens": 64, "new_tokens": 8}
    write_plan(plan.model_copy(update=changes), folder)
    return folder, ["redrafter_jax", "fit", str(target), str(folder), "--minutes", str(MINUTES)]


def kill_when(command: list[str], reached: Callable[[], bool]) -> None:
    """Start the command and kill it as soon as something is there."""
    process = start_command([sys.executable, "-m", *command])
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.long
def test_a_fit_that_is_killed_three_times_ends_with_the_same_head(
    target_folder: Path, tmp_path: Path
) -> None:
    whole, command = prepare(target_folder, tmp_path / "whole")
    finished = run_module(*command)
    assert finished.returncode == 0, finished.stderr
    for stage in ("regenerate", "features", "train --config", "eval compare", "eval tune"):
        assert f"{stage}" in finished.stderr

    killed, command = prepare(target_folder, tmp_path / "killed")
    written, features = killed / "written.jsonl", killed / "features"
    kill_when(command, lambda: written.exists() and written.read_bytes().count(b"\n") >= 2)
    kill_when(command, lambda: (features / "00000.safetensors").exists())
    checkpoints = killed / "run" / "checkpoints"
    kill_when(command, lambda: any(path.name.isdigit() for path in checkpoints.glob("*")))
    assert not (killed / "run" / "drafter").exists()
    again = run_module(*command)
    assert again.returncode == 0, again.stderr
    for name in ("written.jsonl", "held_out.jsonl", "run/drafter/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()

    settings = load_settings(TuneSettings, whole / "tune.yaml")
    assert settings.drafter == str(whole / "run" / "drafter")
    report = json.loads((killed / "report" / "compare.json").read_text())
    for case in report["samplings"]:
        assert {ours["identical"] for ours in case["methods"].values()} == {1.0}
        assert len(case["prompts"]) == 8
    table = find_tree_table(killed / "run" / "drafter")
    assert table
    assert {tree.temperature for tree in table.trees} == {0.0, 0.7}
    # All is done: the same command says again what was found, and changes nothing.
    once_more = run_module(*command)
    assert once_more.returncode == 0
    assert once_more.stderr.splitlines()[-1] == again.stderr.splitlines()[-1]
    assert find_tree_table(killed / "run" / "drafter") == table


def test_a_folder_of_another_fit_is_refused(
    target_folder: Path, tmp_path: Path, run_redrafter: Any
) -> None:
    folder, (_, *words) = prepare(target_folder, tmp_path / "other")
    code, _, told = run_redrafter(*words[:-1], "30")
    assert code == 2
    assert "holds a fit with minutes 60.0 (now 30.0)" in told
    (folder / "plan.json").write_text("{}")
    assert "plan.json is not the plan of a fit" in run_redrafter(*words)[2]


def test_the_time_is_divided_among_writing_reading_training_and_an_ending() -> None:
    plan = plan_of()
    # 19 minutes, of which a quarter is for tuner and report, and 15 s to load thrice. An answer of
    # 128 tokens follows 48 of a question, and 64 are read before both; every token is read, and
    # trained on four times.
    assert plan.ending == 0.25 * 1140
    per_answer = (128 + 48) / 150 + 64 / 500 + 128 * (1 / 500 + 4 / 400)
    assert plan.tokens == int((1140 - 285 - 15) / per_answer * 128)
    assert sum(plan.expected(STEP).values()) <= 1140
    assert plan.prompts == max(8, plan.tokens // 2048)
    # Answers are no longer than a row, and few of the texts are held out.
    assert plan.answer_tokens == 128
    more = plan_of(minutes=60.0)
    assert more.answer_tokens == more.tokens // (8 * 48)
    assert plan_of(minutes=6000.0).answer_tokens == 512
    assert plan_of(minutes=6000.0).prompts == 24


def test_too_little_time_is_refused_with_the_least_that_is_enough() -> None:
    with pytest.raises(InputError, match=r"In 3 minutes .* a head needs 4096") as refusal:
        plan_of(minutes=3.0)
    found = re.search(r"--minutes (\d+) or more", str(refusal.value))
    assert found
    enough = float(found[1])
    assert plan_of(minutes=enough).tokens >= 4096
    with pytest.raises(InputError):
        plan_of(minutes=enough - 1)


@pytest.mark.parametrize("slower", [1.0, 1.5, 2.0, 4.0])
def test_a_fit_on_a_machine_that_gets_slower_keeps_its_time(slower: float) -> None:
    """After the probe every stage takes so many times as long as its rate says."""
    plan = plan_of(minutes=10.0)
    rates = plan.rates
    # Writing is cut where what is written takes the rest of the time.
    used, tokens = plan.spent, 0
    while tokens < plan.tokens and not is_enough(plan, used, tokens):
        used += slower * 4.0
        tokens += int(4.0 * rates.written * 128 / (128 + 48 + 64 * rates.written / rates.read))
    used += slower * tokens / rates.read
    plan = plan_training(plan.model_copy(update={"spent": used}), tokens, STEP)
    # Training begins again with fewer steps where it is late.
    step, legs = 0, 0
    steps = plan.steps
    assert steps
    while step < steps:
        pace, legs = Pace(plan, used), legs + 1
        used += rates.starting / 6
        while step < steps:
            step += 1
            used += slower * STEP / rates.trained
            if fewer := pace.steps(step, used):
                plan = plan.model_copy(update={"steps": fewer, "spent": used})
                steps = fewer
                break
    assert legs <= 2
    assert step == steps == plan.steps
    plan, tuning = plan_measuring(plan.model_copy(update={"spent": used}))
    assert plan.prompts >= 8
    ended = used + tuning + slower * plan.measuring
    assert 60 * 8 < ended <= 60 * (10.5 if slower <= 1.5 else 12 if slower <= 2 else 15)


def test_training_takes_what_writing_left_up_to_eight_passes() -> None:
    plan = plan_of()
    in_time = plan_training(plan.model_copy(update={"spent": 600.0}), plan.tokens, STEP)
    # What is left until the ending, but for the time to start.
    assert in_time.steps == int((600 - 285 - 5) * 400 / STEP)
    early = plan_training(plan.model_copy(update={"spent": 70.0}), 4096, STEP)
    assert early.steps == 8 * 4096 // STEP
    too_late = plan_training(plan.model_copy(update={"spent": 1300.0}), 4096, STEP)
    assert too_late.steps == 8


def test_a_late_ending_measures_fewer_tokens_of_no_less_than_eight_prompts() -> None:
    plan = plan_of(minutes=60.0)
    in_time, seconds = plan_measuring(plan.model_copy(update={"spent": 3600 - plan.ending}))
    assert in_time == plan.model_copy(update={"spent": 3600 - plan.ending})
    assert seconds == pytest.approx(plan.ending - plan.measuring)
    late, seconds = plan_measuring(plan.model_copy(update={"spent": 3590.0}))
    assert (late.prompts, late.new_tokens) == (8, 24)
    # Four trees: 30 / 6 seconds to compile each, and four turns of two runs.
    assert seconds == pytest.approx(5 + 4 * (5 + 2 * 4 * 24 / 50))


def test_a_plan_is_kept_for_the_same_model_alone(tmp_path: Path) -> None:
    assert read_plan(tmp_path, ASKED) is None
    plan = plan_of().model_copy(update={"steps": 71, "done": ("write", "read")})
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path, ASKED) == plan
    for other in (ASKED._replace(target="other"), ASKED._replace(target_dtype="bfloat16")):
        with pytest.raises(InputError, match=r"holds a fit with target\w* \w+ \(now \w+\); use"):
            read_plan(tmp_path, other)


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
            "; at temperature 0.7 0.90 times; the table beside the head, draft",
        ),
        (0.9, 1.1, TREE, [0.7], "Slower than no drafting: 'head' decodes 0.90 times as fast"),
        # 1.3 tokens a call at 0.9: it needs 1.05 * 1.3 / 0.9 - 1.3 more, 2.7 doublings.
        (
            0.9,
            0.9,
            None,
            [],
            "; decode without the head, or fit again: some 70 minutes would be ne",
        ),
        (0.62, 0.66, None, [], "without the head: on this device it would need more than a day."),
        # The report measured one prompt at a time alone.
        (
            0.9,
            0.9,
            TREE,
            [],
            "; decode one prompt at a time without the head; of several at once "
            "the tuner found it faster (batch size 8): serve with --drafter ",
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
            "8 of 8 texts repeat themselves, which any drafter guesses; at temperature 0.7 "
            "too little data; `eval compare` measures the head on prompts of your own, until then",
        ),
        ((8, 0), [0.7], "which any drafter guesses; at temperature 0.7 1.50 times; the table"),
        (
            (0, 8),
            [0.0],
            "decodes 1.50 times as fast (middle half 1.45 to 1.55, faster in 8 of 8 turns) with "
            "W=1 R=1 N=2; at temperature 0.7 too little data; the table",
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


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
def test_rates_are_tokens_by_the_clock(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which every timed call takes a quarter of a second."""
    config = open_target(target_folder).config
    asked = FitRequest(str(target_folder), "float32", 1.0)
    values = train_settings(asked, tmp_path, config, 1)
    settings = TrainSettings.model_validate(values)
    times = iter(range(1000))
    clock = SimpleNamespace(perf_counter=lambda: next(times) / 4)
    monkeypatch.setattr(probe, "time", clock)
    monkeypatch.setattr(probe, "_SECONDS", 0.5)
    rates = measure_rates(lambda: load_target(target_folder, "float32"), settings, rows=3, top_k=8)
    positions = 2 * 64 / 0.25
    assert rates == Rates(
        alone=16 / 0.25,
        written=3 * 16 / 0.25,
        read=positions,
        trained=positions,
        # The target, and the first call of each.
        starting=5 * 0.25,
    )
