"""The recurrent head against its formulas, and its beams against a search over every extension."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import PARITY_CONFIG, cast, random_drafter, random_target
from trees import live_paths, numpy_tree

from redrafter_jax.config import SamplingConfig, TreeConfig
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.drafters import ranking, recurrent
from redrafter_jax.drafters.base import LoadedHead, as_drafter
from redrafter_jax.drafters.kinds import init_drafter
from redrafter_jax.drafters.recurrent import beam_search
from redrafter_jax.drafters.recurrent_head import RecurrentConfig, RecurrentHead
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.types import Beams

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, D, B = 11, 6, 3
CONFIGS = [
    # 2 D needs no projection; the others are narrower and wider.
    RecurrentConfig(V, D, exit_dim=2 * D, num_draft_layers=0),
    RecurrentConfig(V, D, exit_dim=4, num_draft_layers=1),
    RecurrentConfig(V, D, exit_dim=16, num_draft_layers=2),
    RecurrentConfig(V, D, exit_dim=2 * D, num_draft_layers=1, cell="sum"),
    RecurrentConfig(V, D, exit_dim=2 * D, num_draft_layers=1, cell="gru"),
    RecurrentConfig(V, D, exit_dim=8, num_draft_layers=1, head="low_rank", head_rank=3),
    RecurrentConfig(V, D, exit_dim=8, num_draft_layers=1, head="target"),
    RecurrentConfig(V, D, exit_dim=D, num_draft_layers=1, head="target", draft_tokens=(1, 4, 9)),
    RecurrentConfig(V, D, exit_dim=8, num_draft_layers=0, context_layers=(0, 3)),
]
VOCABULARY = np.random.default_rng(9).normal(size=(D, V)).astype(np.float32)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_head_is_the_papers_recurrence_and_one_context_serves_all_beams(
    config: RecurrentConfig,
) -> None:
    head = random_drafter(config).merge()
    # A target's vocabulary projection, as the drafter takes it and as the oracle does.
    lent = VOCABULARY[:, list(config.draft_tokens or range(V))] if config.head == "target" else None
    scorer = None if lent is None else (lambda features: features @ lent)
    weights = oracles.DrafterWeights(head, lent)
    random = np.random.default_rng(0)
    state, embedding = random.normal(size=(2, D)).astype(np.float32)
    stepped = head.step(jnp.asarray(state), jnp.asarray(embedding))
    np.testing.assert_allclose(stepped, weights.step(state, embedding), rtol=1e-5, atol=1e-6)
    contexts = random.normal(size=(2, config.context_size)).astype(np.float32)
    states = random.normal(size=(2, 3, D)).astype(np.float32)
    read = head.read_context(jnp.asarray(contexts))
    logits = head.logits(head.inputs(read[:, None], jnp.asarray(states)), scorer)
    expected = [
        [weights.logits(context, state) for state in row]
        for context, row in zip(contexts, states, strict=True)
    ]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_on_a_gpu_the_cells_two_weights_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    simple, _, _, _, gru, *_ = CONFIGS
    plain = random_drafter(simple)
    lender = Lender(random_target(PARITY_CONFIG))
    monkeypatch.setattr(recurrent, "on_gpu", lambda: True)

    def prepared(model: LoadedHead) -> RecurrentHead:
        drafter = as_drafter(model).prepare(lender)
        [prepared] = drafter.prepare(lender).models
        return prepared.merge()

    joined = prepared(plain)
    assert joined.rnn_joined.shape == (2 * D, D)
    random = np.random.default_rng(0)
    state, embedding = random.normal(size=(2, 4, D)).astype(np.float32)
    weights = oracles.DrafterWeights(plain.merge())
    expected = [weights.step(*pair) for pair in zip(state, embedding, strict=True)]
    stepped = joined.step(jnp.asarray(state), jnp.asarray(embedding))
    np.testing.assert_allclose(stepped, expected, rtol=1e-5, atol=1e-6)
    others = [random_drafter(gru), quantize_model(plain, Quantization("int8"))]
    assert not any(hasattr(prepared(other), "rnn_joined") for other in others)
    assert not hasattr(plain.merge(), "rnn_joined")
    # Devices of the drafter's own may split W and U.
    [apart] = as_drafter(plain).prepare(lender).apart().models
    assert not hasattr(apart.merge(), "rnn_joined")
    np.testing.assert_array_equal(apart.merge().rnn_w.kernel[...], plain.merge().rnn_w.kernel[...])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_before_the_first_token_the_state_is_zeros(config: RecurrentConfig) -> None:
    head = random_drafter(config).merge()
    embedding = jnp.asarray(np.random.default_rng(2).normal(size=(2, D)), jnp.float32)
    stepped = head.step(None, embedding)
    np.testing.assert_array_equal(stepped, head.step(jnp.zeros_like(embedding), embedding))


def test_several_layers_begin_as_the_last_alone() -> None:
    config = RecurrentConfig(V, D, exit_dim=8, num_draft_layers=0, context_layers=(0, 3))
    context = jnp.arange(3.0 * D)
    read = init_drafter(config, 0).merge().read_context(context)
    np.testing.assert_array_equal(read, context[-D:])


def test_bfloat16_states_stay_bfloat16_and_logits_are_float32() -> None:
    config = RecurrentConfig(V, D, exit_dim=16, num_draft_layers=2)
    head = cast(random_drafter(config), jnp.bfloat16).merge()
    weights = oracles.DrafterWeights(head)
    context, state = np.random.default_rng(0).normal(size=(2, D)).astype(jnp.bfloat16)
    stepped = head.step(jnp.asarray(state), jnp.asarray(context))
    logits = head.logits(head.inputs(jnp.asarray(context), jnp.asarray(state)))
    assert stepped.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    expected = weights.logits(context.astype(np.float64), state.astype(np.float64))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.1)


GREEDY = SamplingConfig()
# Rows of one batch sample differently; two kept tokens are fewer than the wider beams.
MIXED = (
    GREEDY,
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.3, top_k=7, top_p=0.9, min_p=0.02),
)
NARROW = (SamplingConfig(temperature=1.0, top_k=2),) * 3

RANDOM = np.random.default_rng(5)
EMBEDDING = RANDOM.normal(size=(V, D)).astype(np.float32)
CONTEXT = RANDOM.normal(size=(B, D)).astype(np.float32)
ROOT = np.asarray([4, 0, 10], np.int32)
DRAFTER = random_drafter(RecurrentConfig(V, D, exit_dim=8, num_draft_layers=1), seed=3)


@partial(jax.jit, static_argnames="draft")
def search(
    drafter: LoadedHead, noise: jax.Array, sampling: oracles.Sampling, draft: TreeConfig
) -> Beams:
    embedding, context, root = map(jnp.asarray, (EMBEDDING, CONTEXT, ROOT))
    return beam_search(drafter.merge(), embedding, context, root, noise, sampling, draft)


def run(
    drafter: LoadedHead, configs: tuple[SamplingConfig, ...], draft: TreeConfig, traced: int
) -> tuple[Beams, list[list[list[oracles.Beam]]]]:
    """The beams, and for every row the best `traced` extensions of each round."""
    # One position more than rounds: the bonus token's noise is there, and is not the beam's.
    noise = np.random.default_rng(6).gumbel(size=(B, draft.draft_rounds + 1, V)).astype(np.float32)
    noise[[config.temperature == 0 for config in configs]] = 0
    sampling = oracles.sampling_arrays(configs, seeds=[0] * B, vocab_size=V)
    beams = search(drafter, jnp.asarray(noise), sampling, draft)
    weights = oracles.DrafterWeights(drafter.merge())
    rows = zip(ROOT.tolist(), noise, configs, strict=True)
    expected = [
        oracles.beam_search(
            partial(weights.logits_after, EMBEDDING, context), weights.tokens, *row, draft, traced
        )
        for context, row in zip(CONTEXT, rows, strict=True)
    ]
    return jax.tree.map(np.asarray, beams), expected


def assert_best_extensions(
    drafter: LoadedHead, configs: tuple[SamplingConfig, ...], draft: TreeConfig, width: int
) -> None:
    beams, rows = run(drafter, configs, draft, width)
    assert beams.tokens.shape == (B, draft.draft_rounds, width)
    for row, trace in enumerate(rows):
        for step, expected in enumerate(trace):
            live = [beam for beam in expected if beam.log_prob > -np.inf]
            got = slice(len(live))
            assert beams.tokens[row, step, got].tolist() == [beam.token for beam in live]
            assert beams.parents[row, step, got].tolist() == [beam.parent for beam in live]
            np.testing.assert_allclose(
                beams.log_probs[row, step],
                [beam.log_prob for beam in expected],
                rtol=1e-4,
                atol=1e-4,
            )


by_sampling = pytest.mark.parametrize(
    "configs", [(GREEDY,) * 3, MIXED, NARROW], ids=["greedy", "mixed", "beams without a token"]
)


@pytest.mark.parametrize(
    ("draft", "width"),
    [
        (TreeConfig(1, 3), 1),
        (TreeConfig(6, 3), 6),
        (TreeConfig(4, 3, sharpness=2.5, candidates=9), 4),
        (TreeConfig(V, 2, candidates=V), V),
        (TreeConfig(4, 1, sharpness=2.5), 4),
        # A beam's X best tokens are N - 1, more than there are beams; or W, more than N - 1.
        (TreeConfig(2, 3, num_nodes=8, rerank=True), 7),
        (TreeConfig(1, 3, num_nodes=V + 1, rerank=True, candidates=V), V),
        (TreeConfig(4, 2, num_nodes=3, rerank=True), 4),
    ],
    ids=str,
)
@by_sampling
def test_equals_a_search_that_sorts_every_extension(
    configs: tuple[SamplingConfig, ...], draft: TreeConfig, width: int
) -> None:
    assert_best_extensions(DRAFTER, configs, draft, width)


@by_sampling
def test_rounds_one_after_the_other_as_gpus_have_them_are_the_same(
    configs: tuple[SamplingConfig, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (recurrent, ranking):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    # No program of another test has this shape.
    assert_best_extensions(DRAFTER, configs, TreeConfig(5, 3), 5)


@pytest.mark.parametrize(
    ("draft", "width"),
    [
        (TreeConfig(3, 3, sharpness=1.5), 3),
        (TreeConfig(2, 3, sharpness=1.5, num_nodes=6, rerank=True), 5),
    ],
    ids=["beams", "reranked"],
)
@by_sampling
def test_a_head_for_some_tokens_searches_among_these(
    configs: tuple[SamplingConfig, ...], draft: TreeConfig, width: int
) -> None:
    config = dataclasses.replace(DRAFTER.config, draft_tokens=(0, 2, 3, 7, 10))
    assert_best_extensions(random_drafter(config, seed=3), configs, draft, width)


@pytest.mark.parametrize("configs", [(GREEDY,) * 3, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_reranked_tree_is_the_best_of_all_extensions_of_its_beams(
    width: int, configs: tuple[SamplingConfig, ...]
) -> None:
    draft = TreeConfig(width, 3, num_nodes=10, rerank=True, sharpness=1.5)
    beams, rows = run(DRAFTER, configs, draft, traced=width * V)
    tree = numpy_tree(ROOT, beams, draft)
    for row, trace in enumerate(rows):
        # Every extension of every round, by the tokens below the root.
        expected: dict[tuple[int, ...], float] = {}
        above: list[tuple[int, ...]] = [()]
        for extensions in trace:
            paths = [(*above[one.parent], one.token) for one in extensions]
            expected |= {p: e.log_prob for p, e in zip(paths, extensions, strict=True)}
            above = paths[:width]
        best = sorted(expected, key=lambda path: -expected[path])[:9]
        drafted = [path[1:] for path in live_paths(tree, row)][1:]
        assert set(drafted) == set(best)
        scores = [expected[path] for path in drafted]
        np.testing.assert_allclose(tree.log_probs[row, 1:], scores, rtol=1e-4, atol=1e-4)
