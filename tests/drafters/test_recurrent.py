"""The recurrent head against its formulas, and its beams against a search over every extension."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from tiny_models import cast, random_drafter
from trees import live_paths, numpy_tree

from redrafter_jax.config import DraftConfig, DrafterConfig, SamplingConfig
from redrafter_jax.drafters.bind import init_drafter
from redrafter_jax.drafters.recurrent import beam_search
from redrafter_jax.types import Beams

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, D, B = 11, 6, 3
CONFIGS = [
    # 2 D needs no projection; the others are narrower and wider.
    DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=0),
    DrafterConfig(V, D, exit_dim=4, num_draft_layers=1),
    DrafterConfig(V, D, exit_dim=16, num_draft_layers=2),
    DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=1, cell="sum"),
    DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=1, cell="gru"),
    DrafterConfig(V, D, exit_dim=8, num_draft_layers=1, head="low_rank", head_rank=3),
    DrafterConfig(V, D, exit_dim=8, num_draft_layers=1, head="target"),
    DrafterConfig(V, D, exit_dim=D, num_draft_layers=1, head="target", draft_tokens=(1, 4, 9)),
    DrafterConfig(V, D, exit_dim=8, num_draft_layers=0, context_layers=(0, 3)),
]
VOCABULARY = np.random.default_rng(9).normal(size=(D, V)).astype(np.float32)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_head_is_the_papers_recurrence_and_one_context_serves_all_beams(
    config: DrafterConfig,
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
    logits = head.logits(read[:, None], jnp.asarray(states), scorer)
    expected = [
        [weights.logits(context, state) for state in row]
        for context, row in zip(contexts, states, strict=True)
    ]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_several_layers_begin_as_the_last_alone() -> None:
    config = DrafterConfig(V, D, exit_dim=8, num_draft_layers=0, context_layers=(0, 3))
    context = jnp.arange(3.0 * D)
    read = init_drafter(config, 0).merge().read_context(context)
    np.testing.assert_array_equal(read, context[-D:])


def test_bfloat16_states_stay_bfloat16_and_logits_are_float32() -> None:
    config = DrafterConfig(V, D, exit_dim=16, num_draft_layers=2)
    head = cast(random_drafter(config), jnp.bfloat16).merge()
    weights = oracles.DrafterWeights(head)
    context, state = np.random.default_rng(0).normal(size=(2, D)).astype(jnp.bfloat16)
    stepped = head.step(jnp.asarray(state), jnp.asarray(context))
    logits = head.logits(jnp.asarray(context), jnp.asarray(state))
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
HEAD_CONFIG = DrafterConfig(V, D, exit_dim=8, num_draft_layers=1)
DRAFTER = random_drafter(HEAD_CONFIG, seed=3)
WEIGHTS = oracles.DrafterWeights(DRAFTER.merge())


def noise_for(configs: tuple[SamplingConfig, ...], positions: int) -> np.ndarray:
    noise = np.random.default_rng(6).gumbel(size=(B, positions, V)).astype(np.float32)
    greedy = np.asarray([config.temperature == 0 for config in configs])
    return np.where(greedy[:, None, None], np.float32(0), noise)


@partial(jax.jit, static_argnames="draft")
def search(noise: jax.Array, sampling: oracles.Sampling, draft: DraftConfig) -> Beams:
    return beam_search(
        DRAFTER.merge(),
        jnp.asarray(EMBEDDING),
        jnp.asarray(CONTEXT),
        jnp.asarray(ROOT),
        noise,
        sampling,
        draft,
    )


def brute_force(
    noise: np.ndarray, configs: tuple[SamplingConfig, ...], draft: DraftConfig, traced: int
) -> list[list[list[oracles.Beam]]]:
    return [
        oracles.beam_search(
            WEIGHTS,
            EMBEDDING.astype(np.float64),
            CONTEXT[row].astype(np.float64),
            int(ROOT[row]),
            noise[row].astype(np.float64),
            configs[row],
            draft.beam_width,
            draft.draft_rounds,
            draft.sharpness,
            draft.candidates,
            traced,
        )
        for row in range(B)
    ]


def run(configs: tuple[SamplingConfig, ...], draft: DraftConfig) -> tuple[Beams, np.ndarray]:
    # One position more than rounds: the bonus token's noise is there, and is not the beam's.
    noise = noise_for(configs, draft.draft_rounds + 1)
    sampling = oracles.sampling_arrays(configs, seeds=[0] * B, vocab_size=V)
    beams = search(jnp.asarray(noise), sampling, draft)
    return jax.tree.map(np.asarray, beams), noise


DRAFTS = [
    DraftConfig(1, 3),
    DraftConfig(6, 3),
    DraftConfig(4, 3, sharpness=2.5, candidates=9),
    DraftConfig(V, 2, candidates=V),
    DraftConfig(4, 1, sharpness=2.5),
    # A beam's X best tokens are N - 1, more than there are beams; or W, which is more than N - 1.
    DraftConfig(2, 3, num_nodes=8, rerank=True),
    DraftConfig(1, 3, num_nodes=V + 1, rerank=True, candidates=V),
    DraftConfig(4, 2, num_nodes=3, rerank=True),
]
EXTENSIONS = [1, 6, 4, V, 4, 7, V, 4]


@pytest.mark.parametrize(("draft", "width"), [*zip(DRAFTS, EXTENSIONS, strict=True)], ids=str)
@pytest.mark.parametrize(
    "configs", [(GREEDY,) * 3, MIXED, NARROW], ids=["greedy", "mixed", "beams without a token"]
)
def test_equals_a_search_that_sorts_every_extension(
    configs: tuple[SamplingConfig, ...], draft: DraftConfig, width: int
) -> None:
    beams, noise = run(configs, draft)
    assert beams.tokens.shape == (B, draft.draft_rounds, width)
    for row, trace in enumerate(brute_force(noise, configs, draft, width)):
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


@pytest.mark.parametrize("configs", [(GREEDY,) * 3, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_reranked_tree_is_the_best_of_all_extensions_of_its_beams(
    width: int, configs: tuple[SamplingConfig, ...]
) -> None:
    draft = DraftConfig(width, 3, num_nodes=10, rerank=True, sharpness=1.5)
    beams, noise = run(configs, draft)
    tree = numpy_tree(ROOT, beams, draft)
    for row, trace in enumerate(brute_force(noise, configs, draft, traced=width * V)):
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


@pytest.mark.parametrize(
    "draft",
    [
        DraftConfig(beam_width=3, draft_rounds=3, sharpness=1.5),
        DraftConfig(beam_width=2, draft_rounds=3, sharpness=1.5, num_nodes=6, rerank=True),
    ],
    ids=["beams", "reranked"],
)
@pytest.mark.parametrize("configs", [(GREEDY,) * 3, (*MIXED[:2], GREEDY)], ids=["greedy", "mixed"])
def test_a_small_head_drafts_what_a_whole_one_would_draft_among_its_tokens(
    configs: tuple[SamplingConfig, ...], draft: DraftConfig
) -> None:
    draft_tokens = (0, 2, 3, 7, 10)
    noise = noise_for(configs, draft.draft_rounds)
    sampling = oracles.sampling_arrays(configs, [0] * B, V)
    # To the whole head the other tokens are forbidden by their noise.
    forbidden = np.full_like(noise, -np.inf)
    forbidden[..., draft_tokens] = noise[..., draft_tokens]
    whole = search(jnp.asarray(forbidden), sampling, draft)

    head = init_drafter(dataclasses.replace(HEAD_CONFIG, draft_tokens=draft_tokens), 0).merge()
    nnx.update(head, nnx.state(DRAFTER.merge()))
    head.lm_head.kernel = nnx.Param(DRAFTER.merge().lm_head.kernel[...][:, draft_tokens])
    search_small = jax.jit(partial(beam_search, head, draft=draft))
    small = search_small(EMBEDDING, CONTEXT, ROOT, noise, sampling=sampling)
    np.testing.assert_array_equal(small.tokens, whole.tokens)
    np.testing.assert_array_equal(small.parents, whole.parents)
    np.testing.assert_allclose(small.log_probs, whole.log_probs, rtol=1e-5)
