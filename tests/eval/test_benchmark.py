"""`python -m eval` as a whole on a tiny pair: what it reports, times and refuses."""

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny_folders import PairFolders, encode, run_module, write_pair

from eval import benchmark
from eval.abstract import abstract_drafter
from eval.benchmark import Method, Run, decode_batch, make_batches, measure, one_per_shape
from eval.speed import measure_speed
from redrafter_jax import DraftConfig, InputError, SamplingConfig, generate, generate_autoregressive
from redrafter_jax.checkpoints.huggingface import save_drafter
from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

# So short that their caches are of one size.
PROMPTS = ["abc", "d\nab", "w", "mnop", "kk"]
NEW_TOKENS = 24
DRAFT = DraftConfig(beam_width=3, draft_rounds=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def folders(folder: Path, habitual_target: Target, good_drafter: DraftModel) -> PairFolders:
    return write_pair(folder, habitual_target, good_drafter)


@pytest.fixture(scope="module")
def config(folder: Path, folders: PairFolders) -> Path:
    rows = [
        {"question_id": f"q{i}", "category": "odd" if i % 2 else "even", "prompt": text}
        for i, text in enumerate(PROMPTS)
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "target": folders.target,
        "drafter": folders.drafter,
        "prompts": str(prompts),
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "draft": {"beam_width": DRAFT.beam_width, "draft_rounds": DRAFT.draft_rounds},
        "repeats": 2,
        "warm_ups": 1,
        "report_dir": str(folder / "report"),
    }
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def finished(config: Path) -> subprocess.CompletedProcess[str]:
    """A run as users start it, its output a pipe."""
    return run_module("eval", "--config", str(config))


@pytest.fixture(scope="module")
def report(finished: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    return json.loads((folder / "report" / "report.json").read_text())


def evaluate_with(config: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    measure_speed(["--config", str(config), f"report_dir={folder}", *overrides])
    return json.loads((folder / "report.json").read_text())


def test_texts_are_plain_decodings_and_took_fewer_target_calls(report: dict[str, Any]) -> None:
    assert report["identical"] == 1.0
    assert report["autoregressive_target_calls"] == len(PROMPTS) * (NEW_TOKENS - 1)
    assert 1.5 < report["acceptance_length"] <= DRAFT.max_path
    assert report["target_calls"] < report["autoregressive_target_calls"] / 1.5


def test_the_counts_fit_together(report: dict[str, Any]) -> None:
    counts = report["accept_counts"]
    assert len(counts) == DRAFT.max_path
    assert sum(counts) == report["target_calls"]
    gained = sum(gain * count for gain, count in enumerate(counts, start=1))
    assert gained == report["new_tokens"] - len(PROMPTS), "prefill decides one token per prompt"
    assert report["acceptance_length"] == pytest.approx(gained / sum(counts))
    assert report["acceptance_rate_per_depth"][0] == pytest.approx(1 - counts[0] / sum(counts))
    assert len(report["acceptance_rate_per_depth"]) == DRAFT.draft_rounds


def test_the_counts_are_those_of_generate(
    report: dict[str, Any], habitual_target: Target, good_drafter: DraftModel
) -> None:
    for text, row in zip(PROMPTS, report["prompts"], strict=True):
        expected = generate(
            habitual_target,
            good_drafter,
            [encode(text)],
            max_new_tokens=NEW_TOKENS,
            draft=DRAFT,
        )
        assert row["target_calls"] == expected.steps[0]
        assert row["acceptance_length"] == pytest.approx(expected.acceptance_length)
        assert row["accept_counts"] == expected.accept_counts[0].tolist()


def test_speeds_are_positive_and_stand_between_their_quartiles(report: dict[str, Any]) -> None:
    for speeds in (report, report["decode_only"]):
        assert speeds["tokens_per_second"] > 0
        assert speeds["autoregressive_tokens_per_second"] > 0
        lower, upper = speeds["speedup_quartiles"]
        assert 0 < lower <= speeds["speedup"] <= upper
    assert report["decode_only"]["milliseconds_per_target_call"] > 0
    assert len(report["runs"]) == 2 * len(PROMPTS)


def test_the_speedup_is_the_median_ratio_of_the_pairs(report: dict[str, Any]) -> None:
    ratios = sorted(
        (run["autoregressive_prefill_seconds"] + run["autoregressive_decode_seconds"])
        / (run["prefill_seconds"] + run["decode_seconds"])
        for run in report["runs"]
    )
    middle = len(ratios) // 2
    assert report["speedup"] == pytest.approx((ratios[middle - 1] + ratios[middle]) / 2)


def test_the_report_says_what_was_measured_where(report: dict[str, Any]) -> None:
    assert report["device"]
    assert report["timestamp"].endswith("+00:00")
    assert {"python", "jax", "flax"} <= report["versions"].keys()
    assert report["config"]["draft"]["beam_width"] == 3
    assert report["config"]["sampling"]["temperature"] == 0.0
    assert report["num_nodes"] == 10
    assert report["drafter"]["exit_dim"] == 64
    assert "median" in report["definitions"]["speedup"]


def test_every_prompt_has_its_row(report: dict[str, Any]) -> None:
    rows = report["prompts"]
    assert [row["id"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]
    assert [row["prompt_tokens"] for row in rows] == [len(text) for text in PROMPTS]
    for row in rows:
        assert row["new_tokens"] == NEW_TOKENS
        assert row["identical"]
        assert row["first_divergence"] is None
        assert row["batch_seconds"] > 0
    assert report["categories"]["even"]["prompts"] == 3
    assert report["categories"]["odd"]["identical"] == 1.0


def test_a_pipe_gets_the_table_then_the_place_of_the_report_and_no_noise(
    finished: subprocess.CompletedProcess[str], report: dict[str, Any], folder: Path
) -> None:
    assert finished.stderr == ""
    assert "\x1b" not in finished.stdout
    assert f"{report['tokens_per_second']:.1f}" in finished.stdout
    assert "5 of 5" in finished.stdout
    assert str(folder / "report" / "report.json") in finished.stdout.splitlines()[-1]


def test_the_chart_is_a_png(report: dict[str, Any], folder: Path) -> None:
    chart = (folder / "report" / "report.png").read_bytes()
    assert chart.startswith(b"\x89PNG")
    assert len(chart) > 10_000


def test_sampled_batches_of_uneven_size_are_identical_too(config: Path, tmp_path: Path) -> None:
    report = evaluate_with(
        config, tmp_path, "batch_size=4", "sampling.temperature=0.9", "sampling.top_p=0.9"
    )
    assert report["identical"] == 1.0
    assert [row["batch"] for row in report["prompts"]] == [0, 0, 0, 0, 1]
    assert report["acceptance_length"] > 1.2


def test_copied_tokens_are_told_apart_from_drafted_ones(
    config: Path,
    tmp_path: Path,
    habitual_target: Target,
    good_drafter: DraftModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = ("draft.beam_width=1", "draft.draft_rounds=1", "draft.lookup_tokens=4")
    report = evaluate_with(config, tmp_path, "repeats=1", *tree)
    copied = generate(
        habitual_target,
        good_drafter,
        [encode(text) for text in PROMPTS],
        max_new_tokens=NEW_TOKENS,
        draft=DraftConfig(beam_width=1, draft_rounds=1, lookup_tokens=4),
    ).copied_tokens
    assert max(copied) > 0
    assert [row["copied_tokens"] for row in report["prompts"]] == copied
    assert report["copied_tokens"] == sum(copied)
    # Of what is new prefill decided one token per prompt, and each call its bonus token.
    calls = report["target_calls"]
    drafted = report["new_tokens"] - len(PROMPTS) - calls - sum(copied)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {tuple(line[1:4]): line[-3] for line in lines if line[1:3] == ["of", "it"]}
    assert table[("of", "it", "drafted")] == f"{drafted / calls:.2f}"
    assert table[("of", "it", "copied")] == f"{sum(copied) / calls:.2f}"


def test_a_prompts_text_does_not_depend_on_the_batch_it_is_in(
    habitual_target: Target, good_drafter: DraftModel
) -> None:
    rows = [encode(text) for text in PROMPTS]
    sampling = SamplingConfig(temperature=1.0)
    method = Method(habitual_target, good_drafter, DRAFT)
    texts = []
    for batch_size in (1, 4):
        batches = make_batches(rows, batch_size, 7, NEW_TOKENS, sampling, None)
        texts.append([row for batch in batches for row in decode_batch(method, batch).tokens])
    assert texts[0] == texts[1]


def test_a_mesh_changes_no_text_and_no_count(
    config: Path, tmp_path: Path, report: dict[str, Any]
) -> None:
    split = ("batch_size=2", "prompt_count=4", "mesh.data=2", "mesh.model=2", "repeats=1")
    on_mesh = evaluate_with(config, tmp_path, *split)
    assert on_mesh["identical"] == 1.0
    for row, alone in zip(on_mesh["prompts"], report["prompts"], strict=False):
        assert row["accept_counts"] == alone["accept_counts"]


def test_a_batch_that_the_mesh_does_not_divide_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"batch_size is 3, which mesh.data=2 does not divide;"):
        evaluate_with(config, tmp_path, "batch_size=3", "mesh.data=2")
    left = "5 prompts in batches of 2 leave 1 for the last one, which mesh.data=2 does not divide"
    with pytest.raises(InputError, match=left):
        evaluate_with(config, tmp_path, "batch_size=2", "mesh.data=2")
    with pytest.raises(InputError, match=r"the number of prompts is 5, which mesh\.data=2"):
        evaluate_with(config, tmp_path, "batch_size=8", "mesh.data=2")


def test_tokens_are_those_of_plain_decoding(habitual_target: Target) -> None:
    rows = [encode(text) for text in PROMPTS[:4]]
    (batch,) = make_batches(rows, 4, 0, 9, SamplingConfig(), None)
    expected = generate_autoregressive(habitual_target, batch.prompts, max_new_tokens=9)
    run = decode_batch(Method(habitual_target, None, None), batch)
    assert run.tokens == expected.tokens
    assert run.steps == expected.steps
    assert (run.new_tokens, run.decoded_tokens) == (36, 32)


def test_rows_end_at_their_stop_token(habitual_target: Target, good_drafter: DraftModel) -> None:
    prompt = encode(PROMPTS[0])
    whole = generate_autoregressive(habitual_target, [prompt], max_new_tokens=NEW_TOKENS).tokens[0]
    token = whole[NEW_TOKENS // 2]
    (batch,) = make_batches([prompt], 1, 0, NEW_TOKENS, SamplingConfig(), (token,))
    for method in (
        Method(habitual_target, good_drafter, DRAFT),
        Method(habitual_target, None, None),
    ):
        run = decode_batch(method, batch)
        assert run.tokens == [whole[: whole.index(token) + 1]]


def test_a_text_that_prefill_ends_leaves_decode_rates_unknown(config: Path, tmp_path: Path) -> None:
    report = evaluate_with(config, tmp_path, "max_new_tokens=1", "prompt_count=2")
    assert report["identical"] == 1.0
    assert report["target_calls"] == 0
    assert report["decode_only"]["speedup"] is None
    assert report["acceptance_rate_per_depth"] == [None, None, None]


def test_nothing_compiles_inside_the_timers(
    habitual_target: Target, good_drafter: DraftModel, caplog: pytest.LogCaptureFixture
) -> None:
    # Prompts of two sizes of cache; no other test has the longer one.
    batches = make_batches([encode("a" * 90), encode("b")], 1, 0, 11, SamplingConfig(), None)
    speculative = Method(habitual_target, good_drafter, DRAFT)
    plain = Method(habitual_target, None, None)
    shapes = one_per_shape([speculative, plain], [*batches, *batches])
    assert len(shapes) == 2 * 2
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        for method, batch in shapes:
            decode_batch(method, batch)
        assert sum("Compiling jit(prefill)" in message for message in caplog.messages) >= 2
        caplog.clear()
        list(measure(speculative, plain, batches, 2))
    assert [message for message in caplog.messages if "ompil" in message] == []


def test_the_two_methods_take_turns_and_change_who_goes_first(
    monkeypatch: pytest.MonkeyPatch, habitual_target: Target, good_drafter: DraftModel
) -> None:
    speculative = Method(habitual_target, good_drafter, DRAFT)
    plain = Method(habitual_target, None, None)
    batches = make_batches([[0], [1]], 1, 0, 4, SamplingConfig(), None)
    order = []

    def record(method: Method, batch: benchmark.Batch) -> Run:
        order.append(("speculative" if method.drafter else "plain", batch.prompts[0][0]))
        return decode_batch(method, batch)

    monkeypatch.setattr(benchmark, "decode_batch", record)
    pairs = list(measure(speculative, plain, batches, 2))
    assert [(pair.repeat, pair.batch) for pair in pairs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    s, p = "speculative", "plain"
    assert order == [(s, 0), (p, 0), (p, 1), (s, 1), (p, 0), (s, 0), (s, 1), (p, 1)]


def test_a_drafter_of_another_target_is_refused(config: Path, tmp_path: Path) -> None:
    other = abstract_drafter(DrafterConfig(24, 16, 16, 0), jnp.float32)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), other)
    save_drafter(zeros, tmp_path / "other")
    with pytest.raises(InputError, match="drafter's hidden_size is 16 and the target's is 32"):
        evaluate_with(config, tmp_path, f"drafter={tmp_path / 'other'}")


def test_a_prompt_too_long_for_the_target_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: the prompt has 3 tokens and max_new"):
        evaluate_with(config, tmp_path, "max_new_tokens=510")


def test_a_target_without_tokenizer_is_refused(
    config: Path, folders: PairFolders, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"tokenizer.json is missing"):
        evaluate_with(config, tmp_path, f"target={folders.drafter}")


def test_a_report_folder_that_is_a_file_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"Cannot make report_dir .*taken: File exists"):
        evaluate_with(config, tmp_path / "taken")
