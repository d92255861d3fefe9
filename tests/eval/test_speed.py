"""`python -m eval`: its report, its table, and what it refuses."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_prompts import PROMPTS, generate_each
from tiny_folders import run_module, write_yaml

from eval.benchmark import Run, TimedTurn
from eval.commands import evaluate
from eval.speed import summarize
from redrafter_jax import TreeConfig
from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.text.prompts import EncodedPrompts, Prompt

pytestmark = pytest.mark.usefixtures("quick_compilation")

NEW_TOKENS = 24
DRAFT = TreeConfig(beam_width=3, draft_rounds=3)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("speed")
    values = pair_settings | {
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "tree": {"beam_width": DRAFT.beam_width, "draft_rounds": DRAFT.draft_rounds},
        "repeats": 2,
        "warm_ups": 1,
        "report_dir": str(folder),
    }
    return write_yaml(folder / "eval.yaml", values)


@pytest.fixture(scope="module")
def finished(config: Path) -> subprocess.CompletedProcess[str]:
    """A run as users start it, its output a pipe."""
    return run_module("eval", "--config", str(config))


@pytest.fixture(scope="module")
def report(finished: subprocess.CompletedProcess[str], config: Path) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    return json.loads((config.parent / "report.json").read_text())


def test_texts_are_the_baselines_and_counts_those_of_generate(
    report: dict[str, Any], habitual_target: Target, good_drafter: LoadedHead
) -> None:
    how = {"max_new_tokens": NEW_TOKENS, "tree": DRAFT}
    expected = generate_each(habitual_target, good_drafter, **how)
    steps = [one.steps[0] for one in expected]
    counts = np.concatenate([one.accept_counts for one in expected])
    baseline, ours = report["methods"]["baseline"], report["methods"]["speculative"]
    assert baseline["target_calls"] == len(PROMPTS) * (NEW_TOKENS - 1)
    assert (baseline["speedup"], baseline["acceptance_length"]) == (1.0, 1.0)
    assert ours["identical"] == 1.0
    assert ours["target_calls"] == sum(steps)
    assert ours["acceptance_length"] == pytest.approx(acceptance_length(counts))
    assert ours["accept_counts"] == counts.sum(axis=0).tolist()
    for index, row in enumerate(report["prompts"]):
        own = row["methods"]["speculative"]
        assert (row["id"], row["batch"]) == (f"q{index}", index)
        assert row["prompt_tokens"] == len(PROMPTS[index])
        assert (own["new_tokens"], own["target_calls"]) == (NEW_TOKENS, steps[index])
        assert own["accept_counts"] == counts[index].tolist()
        assert own["identical"] == 1.0
    assert {"python", "jax", "flax"} <= report["versions"].keys()
    assert report["num_nodes"] == 10
    even = report["categories"]["even"]
    assert even["prompts"] == 3
    own = counts[::2].sum(axis=0).tolist()
    assert even["methods"]["speculative"]["accept_counts"] == own


def run_of(seconds: float, *texts: list[int], accepted: list[int] | None = None) -> Run:
    """Texts without a stop token; a text of n tokens took n - 1 less what was accepted calls."""
    accepted = accepted or [0] * len(texts)
    steps = [len(text) - 1 - more for text, more in zip(texts, accepted, strict=True)]
    counts = [[calls - more, more] for calls, more in zip(steps, accepted, strict=True)]
    by = {"recurrent": accepted, "lookup": [0] * len(texts)}
    return Run(list(texts), steps, np.asarray(counts), by, 0.0, seconds)


def test_measures_are_medians_of_pairs_and_counts_over_any_prompts() -> None:
    a, b, c = [1] * 9, [2] * 5, [3] * 3
    prompts = [
        Prompt(name, ("x",), kind, "", index)
        for index, (name, kind) in enumerate((("a", "p"), ("b", "q"), ("c", "p")))
    ]
    asked = EncodedPrompts(prompts, [1, 1, 1], [[0], [0, 0], [0]], "none", ())
    # Two batches, the last one smaller; in the second repeat a text of the second differs.
    speculative = [
        run_of(2.0, a, b, accepted=[4, 1]),
        run_of(1.0, c, accepted=[1]),
        run_of(3.5, a, b, accepted=[4, 1]),
        run_of(1.0, [3, 3, 4], accepted=[1]),
    ]
    baseline = [run_of(7.0, a, b), run_of(1.5, c), run_of(7.0, a, b), run_of(3.0, c)]
    turns = [
        TimedTurn(index % 2, index // 2, {"speculative": ours, "baseline": theirs})
        for index, (ours, theirs) in enumerate(zip(speculative, baseline, strict=True))
    ]
    report = summarize(asked, 2, turns)

    ours = report["methods"]["speculative"]
    # Ratios 3.5, 1.5, 2 and 3; rates 7, 3, 4 and 3 tokens/s.
    assert (ours["speedup"], ours["speedup_quartiles"]) == (2.5, [1.875, 3.125])
    assert ours["tokens_per_second"] == 3.5
    assert ours["identical"] == pytest.approx(5 / 6)
    assert (ours["new_tokens"], ours["target_calls"]) == (17, 4 + 3 + 1)
    assert ours["acceptance_length"] == pytest.approx(14 / 8)
    assert (ours["acceptance_rate_per_depth"], ours["calls_per_depth"]) == ([6 / 8], [8, 6])
    assert ours["accept_counts"] == [2, 6]
    assert ours["accepted_by"] == {"recurrent": 6, "lookup": 0}
    # Of the longest text of each batch: 4, 1, 4 and 1 calls in 2, 1, 3.5 and 1 seconds.
    assert ours["decode_only"]["milliseconds_per_target_call"] == pytest.approx(937.5)
    assert report["methods"]["baseline"]["speedup"] == 1.0
    assert report["answers"]["answer_tokens"] == [4.0, 5.0, 7.0]

    # The shorter text of a batch waits for the longer one's calls.
    of_q = report["categories"]["q"]["methods"]["speculative"]["decode_only"]
    assert of_q["milliseconds_per_target_call"] == pytest.approx((500 + 875) / 2)

    second = report["prompts"][1]
    assert (second["id"], second["batch"], second["prompt_tokens"]) == ("b", 0, 2)
    assert second["methods"]["speculative"]["accept_counts"] == [2, 1]
    assert second["methods"]["speculative"]["speedup"] == 2.75
    category = report["categories"]["p"]
    assert category["prompts"] == 2
    assert category["methods"]["speculative"]["accept_counts"] == [0, 5]
    assert report["categories"]["q"]["methods"]["speculative"]["identical"] == 1.0
    assert len(report["runs"]) == 8


def test_a_pipe_gets_progress_on_stderr_and_the_table_on_stdout(
    finished: subprocess.CompletedProcess[str], report: dict[str, Any], config: Path
) -> None:
    told = finished.stderr.splitlines()
    assert [line for line in told if ": 0 of " in line] == [
        "measure: compile and warm up: 0 of 2",
        "measure: 0 of 10",
    ]
    # On a slow machine there are lines between them.
    assert all(line.endswith(" s left") for line in told if ": 0 of " not in line)
    assert "\x1b" not in finished.stdout
    ours = report["methods"]["speculative"]
    assert f"{ours['tokens_per_second']:.1f}" in finished.stdout
    assert "5 of 5" in finished.stdout
    reached = ours["calls_per_depth"]
    assert f"({reached[1]} of {reached[0]})" in finished.stdout
    assert "chat template: none; answers of 24 tokens (24 to 24), 0 ended by" in finished.stdout
    *_, place, verdict = finished.stdout.splitlines()
    assert str(config.parent / "report.json") in place
    assert verdict == report["verdict"]["sentence"]
    assert verdict.startswith("Too little data to tell: 5 texts, and 8 are the fewest; give more")


def test_texts_that_prefill_ends_leave_rates_unknown_and_lookup_needs_no_drafter(
    config: Path, tmp_path: Path
) -> None:
    lookup = ["drafter=null", "draft={lookup_tokens: 3}"]
    overrides = [f"report_dir={tmp_path}", "max_new_tokens=1", "prompt_count=2", *lookup]
    evaluate(["--config", str(config), *overrides])
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["drafter"], report["num_nodes"]) == (None, 4)
    ours = report["methods"]["speculative"]
    assert (ours["identical"], ours["target_calls"]) == (1.0, 0)
    assert ours["decode_only"]["speedup"] is None
    assert ours["acceptance_rate_per_depth"] == [None, None, None]
