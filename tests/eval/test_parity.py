"""`python -m eval parity`: identical texts, numerical ties and bugs are told apart."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pair_prompts import PROMPTS, asked_with
from tiny_folders import encode, write_yaml
from tiny_models import tiny_config

from eval import benchmark, parity
from eval.benchmark import Method, baseline, make_batches
from eval.commands import evaluate
from eval.config import CaseSettings, RowSettings
from eval.row_sampling import stack_sampling
from eval.ties import Scores, explain, score
from redrafter_jax import SamplingConfig
from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.collectives import shard_start
from redrafter_jax.parallel.mesh import place
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import KVCache, TokenTree, Verified

pytestmark = pytest.mark.usefixtures("quick_compilation")

CASE = {
    "prompt_count": 4,
    "max_new_tokens": 24,
    "batch_size": 4,
    "tree": {"beam_width": 3, "draft_rounds": 3},
    "stop": "never",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    values = {"dtypes": ["float32"], "report_dir": "unused", "cases": {"greedy": CASE}}
    path = tmp_path_factory.mktemp("parity") / "parity.yaml"
    return write_yaml(path, pair_settings | values)


def run(config: Path, folder: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    """The exit code and `parity.json`."""
    code = 0
    try:
        evaluate(["parity", "--config", str(config), f"report_dir={folder}", *overrides])
    except SystemExit as exit:
        code = int(exit.code or 0)
    return code, json.loads((folder / "parity.json").read_text())


@pytest.mark.parametrize(
    "dtypes", [["float32"], pytest.param(["bfloat16", "float32"], marks=pytest.mark.long)]
)
def test_texts_of_a_sound_pair_are_identical_in_every_dtype_and_told_so(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtypes: list[str]
) -> None:
    sampled = {**CASE, "sampling": {"temperature": 1.0, "top_p": 0.9}, "prompt_tokens": [4, 3]}
    code, report = run(config, tmp_path, f"cases.sampled={sampled}", f"dtypes={dtypes}")
    assert code == 0
    printed = capsys.readouterr()
    # On a slow machine there are lines between them.
    begun = [line for line in printed.err.splitlines() if ": 0 of " in line]
    assert begun == [f"decode in {dtype}: 0 of 2" for dtype in dtypes]
    assert "4 of 4" in printed.out
    assert report["verdict"] in printed.out
    assert "The report: " in printed.out.splitlines()[-1]
    names = [(case["dtype"], case["case"]) for case in report["cases"]]
    assert names == list(product(dtypes, ("greedy", "sampled")))
    for case in report["cases"]:
        assert (case["rows"], case["new_tokens"], case["num_nodes"]) == (4, 4 * 24, 10)
        assert 1.2 < case["acceptance_length"] <= 4
    for case in report["cases"][-2:]:  # of float32
        assert (case["identical"], case["divergences"], case["ties"]) == (1.0, [], 0)
        assert case["largest_gap"] is None
    assert {"gap", "filtered", "tie"} <= report["definitions"].keys()


class Uneven(Decoder):
    """A decoder whose logit of the last token is larger by `nudge` in passes over many nodes."""

    def __init__(self, config: TargetConfig, nudge: float) -> None:
        super().__init__(config, rngs=nnx.Rngs(0))
        self.nudge = nnx.Param(jnp.float32(nudge))

    def tree_forward(
        self,
        tree: TokenTree,
        cache: KVCache,
        context_layers: tuple[int, ...] = (),
    ) -> Verified:
        verified = super().tree_forward(tree, cache, context_layers)
        many = tree.tokens.shape[1] > 1
        # On a mesh, of this device's part of the scores.
        V, size = self.config.vocab_size, verified.logits.shape[-1]
        last = shard_start(size, V) + jnp.arange(size) == V - 1
        logits = verified.logits + jnp.where(last, self.nudge[...] if many else 0.0, 0.0)
        return verified._replace(logits=logits)


def with_twins(target: Target, token: int, nudge: float, share: float) -> Target:
    """The target with the last token's score a share of another's, but for the nudge."""
    uneven = Uneven(target.config, nudge)
    nnx.update(uneven, target.params)
    twin = share * uneven.lm_head[...][:, token]
    uneven.lm_head[...] = uneven.lm_head[...].at[:, -1].set(twin)
    return Model.split(target.config, uneven)


@pytest.fixture
def run_uneven(
    config: Path,
    tmp_path: Path,
    habitual_target: Target,
    good_drafter: LoadedHead,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """A run with twin tokens, of which the speculative pass prefers the second by a nudge."""
    prompts = [encode(text) for text in PROMPTS[:4]]
    rows = CaseSettings(max_new_tokens=24, stop="never")
    (batch,) = make_batches(asked_with(prompts), 4, SamplingConfig(), rows)
    token = benchmark.decode_batch(baseline(habitual_target), batch).tokens[0][8]

    def run_with(nudge: float, *overrides: str, share: float = 1.0) -> tuple[int, dict[str, Any]]:
        target = with_twins(habitual_target, token, nudge, share)
        monkeypatch.setattr(TargetFiles, "load", lambda files, dtype, mesh: place(target, mesh))
        return run(config, tmp_path, *overrides)

    return run_with


@pytest.mark.long
@pytest.mark.parametrize("model", [1, 2])
def test_two_equal_scores_that_rounding_orders_are_a_tie(
    run_uneven: Callable[..., tuple[int, dict[str, Any]]], model: int
) -> None:
    code, report = run_uneven(1e-5, f"mesh.model={model}")
    (case,) = report["cases"]
    assert case["divergences"], "the twins do come up"
    assert code == 0
    assert case["ties"] == len(case["divergences"])
    assert case["identical"] == pytest.approx(1 - case["ties"] / 4)
    for divergence in case["divergences"]:
        assert divergence["prompt"] == f"q{divergence['row']}"
        assert divergence["speculative_token"] == 23
        assert divergence["gap"] == pytest.approx(0.0, abs=1e-5)
        assert not divergence["filtered"]
    assert report["verdict"].endswith("divergences are numerical ties.")


@pytest.mark.long
def test_scores_that_differ_by_more_than_rounding_are_no_tie(
    run_uneven: Callable[..., tuple[int, dict[str, Any]]], capsys: Any
) -> None:
    code, report = run_uneven(5.0, share=0.8)
    (case,) = report["cases"]
    assert code == 1
    assert case["ties"] < len(case["divergences"])
    assert case["largest_gap"] > 0.1
    assert "NO numerical ties" in capsys.readouterr().out
    # The tolerance decides.
    code, report = run_uneven(5.0, "tolerance.float32=9", share=0.8)
    assert code == 0
    assert report["cases"][0]["divergences"]


def test_a_text_that_ends_early_is_no_tie(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(method: Method, batch: benchmark.Batch) -> benchmark.Run:
        whole = benchmark.decode_batch(method, batch)
        speculative = method.num_nodes > 1
        tokens = [row[:7] for row in whole.tokens] if speculative else whole.tokens
        return whole._replace(tokens=tokens)

    monkeypatch.setattr(parity, "decode_batch", cut)
    code, report = run(config, tmp_path)
    divergence = report["cases"][0]["divergences"][0]
    assert code == 1
    assert divergence["position"] == 7
    assert divergence["speculative_token"] is None
    assert divergence["gap"] is None
    assert not divergence["tie"]


def see(logits: list[float], noise: list[float], sampling: SamplingConfig) -> Scores:
    config = tiny_config(vocab_size=len(logits))
    rows = check_batch(config, Batch([[0]], 1, sampling))
    scores, own = np.asarray(logits, np.float32), np.asarray(noise, np.float32)
    return Scores(scores, own, stack_sampling(config, rows))


def test_the_target_is_asked_what_it_chose_every_token_from(
    habitual_target: Target,
) -> None:
    """At any place, under a filter, in rows of any length."""
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6], [8, 9]]
    rows = RowSettings(max_new_tokens=24, first_seed=4)
    sampling = SamplingConfig(temperature=0.9, top_k=6)
    (batch,) = make_batches(asked_with(prompts), 4, sampling, rows)
    texts = benchmark.decode_batch(baseline(habitual_target), batch).tokens
    places = [23, 0, 5, 1]
    read = [[*row, *text[:at]] for row, text, at in zip(prompts, texts, places, strict=True)]
    for one, text, at in zip(
        score(habitual_target, batch._replace(prompts=read, max_new_tokens=1)),
        texts,
        places,
        strict=True,
    ):
        kept = one.keeps()
        assert kept.sum() == 6
        assert np.where(kept, one.unfiltered, -np.inf).argmax() == text[at]
        assert one.may_choose(text[at], 1e-4)


@pytest.mark.parametrize(
    ("sampling", "edge"),
    [
        (SamplingConfig(temperature=1.0, top_k=2), [3.0, 2.0, 2.0, -9.0]),
        (SamplingConfig(temperature=1.0, min_p=float(np.exp(-1.0))), [3.0, 2.5, 2.0, -9.0]),
        # 0.5 and 0.3 reach 0.8: the third is on the edge.
        (
            SamplingConfig(temperature=1.0, top_p=0.8),
            [float(np.log(share)) for share in (0.5, 0.3, 0.15, 0.05)],
        ),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_a_token_on_the_edge_of_a_filter_is_a_tie(
    sampling: SamplingConfig, edge: list[float]
) -> None:
    # Wherever the third token is kept, its noise makes it win.
    noise = [0.0, 0.0, 4.0, 0.0]
    for by, tie in ((1e-4, True), (-1e-4, True), (0.2, False), (-0.2, False)):
        seen = see([edge[0], edge[1], edge[2] + by, edge[3]], noise, sampling)
        found = explain(seen, 0, 2, 1e-3)
        assert found["tie"] == tie, by
        assert found["filtered"] == (tie or by < 0)
        assert (found["gap"] is None) == found["filtered"]
        # A token that neither wins nor is on an edge is none.
        assert not explain(seen, 0, 3, 1e-3)["tie"]


@pytest.mark.parametrize(
    ("token", "ahead", "tie"),
    [
        (1.9995, [2.0005], True),
        (1.9995, [2.0005, 2.0004], True),
        # The edge moves by the tolerance, and so does a token.
        (1.9975, [2.0005], False),
        (1.9995, [2.0025], False),
        (1.9995, [2.0005, 2.0025], False),
        # Each could be on the other side of the edge, but not both: the order stays.
        (1.9985, [2.0015], False),
    ],
)
def test_a_token_is_chosen_if_one_movement_keeps_it_and_drops_all_ahead_of_it(
    token: float, ahead: list[float], tie: bool
) -> None:
    """The edge of min_p is at 2; by their noise the tokens ahead are 0.1 ahead."""
    sampling = SamplingConfig(temperature=1.0, min_p=float(np.exp(-1.0)))
    seen = see([3.0, token, *ahead], [0.0, 4.0, *(4.1 for _ in ahead)], sampling)
    assert seen.may_choose(1, 1e-3) == tie


def test_tokens_ahead_of_which_a_filter_drops_one_alone_leave_no_tie() -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=2)
    seen = see([3.0, 2.0, 2.0], [0.0, 4.0, 4.0], sampling)
    assert not seen.may_choose(0, 1e-3)


@pytest.mark.parametrize(
    ("logits", "temperature", "tie"),
    [
        ([2.0, 1.9996, 0.0], 0.0, True),
        ([2.0, 1.9, 0.0], 0.0, False),
        # Gaps of cold rows are measured in logits.
        ([1.0, 0.9996, 0.0], 0.01, True),
        # Equal tokens behind a third are no tie.
        ([1.0, 1.0, 2.0], 0.0, False),
    ],
)
def test_a_tie_is_of_the_two_best_tokens_in_logits(
    logits: list[float], temperature: float, tie: bool
) -> None:
    seen = see(logits, [0.0, 0.0, 0.0], SamplingConfig(temperature))
    found = explain(seen, 0, 1, 1e-3)
    assert found["tie"] == tie
    assert found["gap"] == pytest.approx((logits[0] - logits[1]) / (temperature or 1), rel=1e-2)
