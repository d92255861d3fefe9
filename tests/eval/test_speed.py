"""`python -m eval`: its report, its table, and what it refuses."""

import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from pair_prompts import PROMPTS
from tiny_folders import encode, run_module

from eval.abstract import abstract_drafter
from eval.commands import evaluate
from redrafter_jax import DraftConfig, Generation, InputError, generate
from redrafter_jax.checkpoints.huggingface import save_drafter
from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

NEW_TOKENS = 24
DRAFT = DraftConfig(beam_width=3, draft_rounds=3)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("speed")
    values = pair_settings | {
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "draft": {"beam_width": DRAFT.beam_width, "draft_rounds": DRAFT.draft_rounds},
        "repeats": 2,
        "warm_ups": 1,
        "report_dir": str(folder),
    }
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def finished(config: Path) -> subprocess.CompletedProcess[str]:
    """A run as users start it, its output a pipe."""
    return run_module("eval", "--config", str(config))


@pytest.fixture(scope="module")
def report(finished: subprocess.CompletedProcess[str], config: Path) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    return json.loads((config.parent / "report.json").read_text())


def evaluate_with(config: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    evaluate(["--config", str(config), f"report_dir={folder}", *overrides])
    return json.loads((folder / "report.json").read_text())


def expected_with(target: Target, drafter: DraftModel, draft: DraftConfig) -> Generation:
    prompts = [encode(text) for text in PROMPTS]
    return generate(target, drafter, prompts, max_new_tokens=NEW_TOKENS, draft=draft)


def test_texts_are_the_baselines_and_counts_those_of_generate(
    report: dict[str, Any], habitual_target: Target, good_drafter: DraftModel
) -> None:
    expected = expected_with(habitual_target, good_drafter, DRAFT)
    baseline, ours = report["methods"]["baseline"], report["methods"]["speculative"]
    assert baseline["target_calls"] == len(PROMPTS) * (NEW_TOKENS - 1)
    assert (baseline["speedup"], baseline["acceptance_length"]) == (1.0, 1.0)
    assert ours["identical"] == 1.0
    assert ours["target_calls"] == sum(expected.steps)
    assert ours["acceptance_length"] == pytest.approx(expected.acceptance_length)
    assert ours["accept_counts"] == expected.accept_counts.sum(axis=0).tolist()
    for index, row in enumerate(report["prompts"]):
        own = row["methods"]["speculative"]
        assert (row["id"], row["batch"]) == (f"q{index}", index)
        assert row["prompt_tokens"] == len(PROMPTS[index])
        assert (own["new_tokens"], own["target_calls"]) == (NEW_TOKENS, expected.steps[index])
        assert own["accept_counts"] == expected.accept_counts[index].tolist()
        assert own["identical"] == 1.0
    assert {"python", "jax", "flax"} <= report["versions"].keys()
    assert report["num_nodes"] == 10
    even = report["categories"]["even"]
    assert even["prompts"] == 3
    own = expected.accept_counts[::2].sum(axis=0).tolist()
    assert even["methods"]["speculative"]["accept_counts"] == own


def test_speeds_are_medians_over_pairs_of_runs(report: dict[str, Any]) -> None:
    seconds = {
        (run["method"], run["batch"], run["repeat"]): run["prefill_seconds"] + run["decode_seconds"]
        for run in report["runs"]
    }
    pairs = list(product(range(len(PROMPTS)), range(2)))
    assert len(seconds) == 2 * len(pairs)
    # Both methods decode as many tokens.
    ratios = [seconds["baseline", *pair] / seconds["speculative", *pair] for pair in pairs]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    ours = report["methods"]["speculative"]
    assert ours["speedup"] == pytest.approx(middle)
    assert ours["speedup_quartiles"] == pytest.approx([low, high])


def test_a_pipe_gets_progress_on_stderr_and_the_table_on_stdout(
    finished: subprocess.CompletedProcess[str], report: dict[str, Any], config: Path
) -> None:
    told = finished.stderr.splitlines()
    assert [line for line in told if ": 0 of " in line] == [
        "compile and warm up: 0 of 2",
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
    assert str(config.parent / "report.json") in finished.stdout.splitlines()[-1]


def test_sampled_batches_of_uneven_size_are_identical_too(config: Path, tmp_path: Path) -> None:
    report = evaluate_with(
        config, tmp_path, "batch_size=4", "sampling.temperature=0.9", "sampling.top_p=0.9"
    )
    assert report["methods"]["speculative"]["identical"] == 1.0
    assert [row["batch"] for row in report["prompts"]] == [0, 0, 0, 0, 1]
    rows = [row["methods"]["speculative"]["target_calls"] for row in report["prompts"]]
    assert sum(rows) == report["methods"]["speculative"]["target_calls"]


def test_what_prompt_lookup_gains_is_told_apart(
    config: Path,
    tmp_path: Path,
    habitual_target: Target,
    good_drafter: DraftModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = ("draft.beam_width=1", "draft.draft_rounds=1", "draft.lookup_tokens=4")
    report = evaluate_with(config, tmp_path, "repeats=1", *tree)
    draft = DraftConfig(beam_width=1, draft_rounds=1, lookup_tokens=4)
    looked_up = expected_with(habitual_target, good_drafter, draft).accepted_by["lookup"]
    assert max(looked_up) > 0
    rows = [row["methods"]["speculative"] for row in report["prompts"]]
    assert [row["accepted_by"]["lookup"] for row in rows] == looked_up
    # Prefill decides one of the new tokens per prompt, and each call its bonus token.
    ours = report["methods"]["speculative"]
    accepted = ours["new_tokens"] - len(PROMPTS) - ours["target_calls"]
    assert ours["accepted_by"] == {
        "recurrent": accepted - sum(looked_up),
        "lookup": sum(looked_up),
    }
    lines = [line for line in capsys.readouterr().out.splitlines() if "of it lookup" in line]
    assert f"{sum(looked_up) / ours['target_calls']:.2f}" in lines[0]


def test_a_text_that_prefill_ends_leaves_decode_rates_unknown(config: Path, tmp_path: Path) -> None:
    report = evaluate_with(config, tmp_path, "max_new_tokens=1", "prompt_count=2")
    ours = report["methods"]["speculative"]
    assert (ours["identical"], ours["target_calls"]) == (1.0, 0)
    assert ours["decode_only"]["speedup"] is None
    assert ours["acceptance_rate_per_depth"] == [None, None, None]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["batch_size=3", "mesh.data=2"], r"batch_size is 3, which mesh.data=2 does not divide;"),
        (["batch_size=2", "mesh.data=2"], r"5 prompts in batches of 2 leave 1 for the last one"),
        (["batch_size=8", "mesh.data=2"], r"the number of prompts is 5, which mesh\.data=2"),
        (["max_new_tokens=510"], r"line 1: the prompt has 3 tokens and max_new"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: Path, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        evaluate_with(config, tmp_path, *overrides)


def test_folders_that_cannot_be_used_are_refused(
    config: Path, tmp_path: Path, pair_settings: dict[str, Any]
) -> None:
    other = abstract_drafter(DrafterConfig(24, 16, 16, 0), jnp.float32)
    save_drafter(
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), other), tmp_path / "other"
    )
    with pytest.raises(InputError, match="drafter's hidden_size is 16 and the target's is 32"):
        evaluate_with(config, tmp_path, f"drafter={tmp_path / 'other'}")
    with pytest.raises(InputError, match=r"tokenizer.json is missing"):
        evaluate_with(config, tmp_path, f"target={pair_settings['drafter']}")
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"Cannot make report_dir .*taken: File exists"):
        evaluate_with(config, tmp_path / "taken")
