"""The drafter's losses against a plain loop over positions, rounds and tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads
from tiny_models import ATTENTION, random_drafter

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.kinds import init_drafter
from redrafter_jax.drafters.medusa import MedusaConfig
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.models.target import Target, init_target
from train.config import LossSettings
from train.loss import RoundSums, count_positions, join_chunks, round_sums, split_chunks

pytestmark = pytest.mark.usefixtures("quick_compilation")

UNSOFTENED = LossSettings()
ROUNDS = 3
B, T = 2, 11
GENERATOR = np.random.default_rng(0)
TOKENS = GENERATOR.integers(0, 29, (B, T)).astype(np.int32)
MASK = GENERATOR.random((B, T)) < 0.7
MASK[1, 8:] = False
SOME = (1, 2, 3, 5, 7, 8, 11, 13, 17, 19, 20, 23, 27)
SHAPE = RecurrentConfig(29, 16, 20, 1)
LENT = replace(SHAPE, head="target", draft_tokens=SOME)
ATTENDING = replace(SHAPE, **ATTENTION)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def make_pair(shape: HeadConfig = SHAPE) -> tuple[Target, LoadedHead]:
    config = TargetConfig(29, 16, 24, 2, 2, 1, 8, 1e4, 1e-5, 64, False, (0,))
    target = init_target(config, 0)
    louder = jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim == 2 else leaf, target.params)
    # A layer that was just made adds nothing.
    drafter = random_drafter(shape) if shape == ATTENDING else init_drafter(shape, 1)
    return type(target)(config, target.graphdef, louder), drafter


@partial(jax.jit, static_argnames="context_layers")
def forward(
    target: Target,
    tokens: jax.Array | np.ndarray,
    segments: jax.Array | None = None,
    context_layers: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """The target's hidden states and logits."""
    decoder = target.merge()
    hidden, _, _ = decoder.forward(jnp.asarray(tokens), segments, context_layers)
    return decoder.of_one_scale(hidden), decoder.logits(hidden)


@jax.jit
def guesses(
    target: Target, drafter: LoadedHead, context: jax.Array, tokens: jax.Array | np.ndarray
) -> list[jax.Array]:
    """The drafter's scores of every round at a position, which reads a token in each."""
    decoder, head = target.merge(), drafter.merge()
    known = jnp.asarray(drafter.config.draft_tokens or range(29))
    scorer = partial(jnp.matmul, b=decoder.head[:, known])
    if isinstance(drafter.config, MedusaConfig):
        return list(head.logits(context, ROUNDS, scorer))
    state, scores = jnp.zeros(16), []
    for token in tokens:
        state = head.step(state, decoder.embed_tokens[...][token])
        scores.append(head.logits(head.inputs(context, state), scorer))
    return scores


def read_alone(
    target: Target, drafter: LoadedHead, hidden: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """What the drafter drafts from at every position of one text."""
    if isinstance(drafter.config, MedusaConfig):
        return hidden
    weights = oracles.DrafterWeights(drafter.merge(), np.zeros(0))
    context = weights.through("context_proj", hidden)
    if not drafter.config.attention:
        return context
    embedding = np.asarray(target.merge().embed_tokens[...], np.float64)
    return weights.attend(context, embedding[np.append(tokens[1:], 0)], drafter.config.layer)


def brute_force(
    target: Target,
    drafter: LoadedHead,
    tokens: np.ndarray,
    mask: np.ndarray,
    softening: LossSettings = UNSOFTENED,
) -> dict[str, np.ndarray]:
    """Every (position, round) on its own, with float64 sums."""
    T = tokens.shape[1]
    hidden, logits = map(
        np.asarray, forward(target, tokens, context_layers=drafter.config.context_layers)
    )
    teacher = log_softmax(logits.astype(np.float64))
    known = list(drafter.config.draft_tokens or range(29))
    padded = np.pad(tokens, ((0, 0), (0, ROUNDS)))
    hard, soft, lk, tv, agreement = np.zeros((5, ROUNDS))
    top = np.zeros((ROUNDS, 5))
    for b in range(len(tokens)):
        contexts = read_alone(target, drafter, hidden[b], tokens[b])
        for t in range(T):
            read = padded[b, t + 1 : t + 1 + ROUNDS]
            context = jnp.asarray(contexts[t], jnp.float32)
            for i, scores in enumerate(guesses(target, drafter, context, read)):
                label = t + 2 + i
                if label >= T or not mask[b, label]:
                    continue
                guess = log_softmax(np.asarray(scores, np.float64))
                teach = teacher[b, t + 1 + i]
                agreement[i] += known[guess.argmax()] == teach.argmax()
                if teach.argmax() in known or not softening.drafted_only:
                    soft[i] += soft_loss(teach[known], guess, softening)
                    # Over all V tokens, of which those that are not drafted have no probability.
                    p, q = np.exp(teach), np.zeros(29)
                    q[known] = np.exp(guess)
                    lk[i] -= np.log(np.minimum(p, q).sum())
                    tv[i] += np.abs(p - q).sum() / 2
                if tokens[b, label] in known and (
                    teach.argmax() in known or not softening.drafted_only
                ):
                    hard[i] -= guess[known.index(tokens[b, label])]
                for k in range(5):
                    top[i, k] += tokens[b, label] in np.take(known, np.argsort(-guess)[: k + 1])
    return {
        "hard": hard,
        "soft": soft,
        "lk": lk,
        "tv": tv,
        "top": top,
        "agreement": agreement,
    }


def soft_loss(teach: np.ndarray, guess: np.ndarray, softening: LossSettings) -> float:
    """KL between two tempered distributions over the tokens that the teacher keeps."""
    temperature = softening.soft_temperature
    kept = np.argsort(-teach)[: softening.soft_top_k]
    teach = log_softmax(teach[kept] / temperature)
    guess = log_softmax(guess / temperature)[kept]
    return temperature**2 * (np.exp(teach) * (teach - guess)).sum()


@partial(jax.jit, static_argnames=("chunk_length", "softening"))
def sums_over_chunks(
    pair: tuple[Target, LoadedHead],
    hidden: jax.Array,
    tokens: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray,
    chunk_length: int,
    softening: LossSettings = UNSOFTENED,
    segments: jax.Array | None = None,
) -> RoundSums:
    target, drafter = pair[0].merge(), pair[1].merge()
    whole = jnp.ones_like(tokens) if segments is None else segments
    arrays, contexts = [jnp.asarray(one) for one in (tokens, mask, whole)], hidden
    if drafter.attends:
        following = target.stored_embeddings(jnp.roll(arrays[0], -1, axis=1))
        contexts = drafter.contexts(hidden, following, arrays[2], ROUNDS)
    chunks = split_chunks(contexts, hidden, *arrays, rounds=ROUNDS, chunk_length=chunk_length)
    per_chunk = jax.vmap(
        lambda chunk: round_sums(drafter, target, chunk, rounds=ROUNDS, settings=softening)
    )
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), per_chunk(chunks))


# As any drafter, chunk by chunk; tempered and cut; other cells and heads; knowing some tokens only.
@pytest.mark.parametrize(
    ("shape", "chunk_length", "softening"),
    [
        (SHAPE, 1, UNSOFTENED),
        pytest.param(SHAPE, 11, UNSOFTENED, marks=pytest.mark.long),
        (SHAPE, 64, LossSettings(soft_temperature=2.0)),
        pytest.param(
            SHAPE, 4, LossSettings(soft_temperature=0.5, soft_top_k=5), marks=pytest.mark.long
        ),
        (replace(SHAPE, cell="gru", head="low_rank", head_rank=5), 4, UNSOFTENED),
        pytest.param(replace(LENT, context_layers=(0,)), 4, UNSOFTENED, marks=pytest.mark.long),
        (
            replace(SHAPE, draft_tokens=SOME),
            4,
            LossSettings(soft_temperature=2.0, soft_top_k=3),
        ),
        (replace(SHAPE, draft_tokens=SOME), 64, LossSettings(drafted_only=True)),
        (MedusaConfig(29, 16, ROUNDS, 1), 4, UNSOFTENED),
        (ATTENDING, 4, UNSOFTENED),
    ],
)
def test_sums_equal_a_loop_over_positions(
    shape: HeadConfig, chunk_length: int, softening: LossSettings
) -> None:
    target, drafter = make_pair(shape)
    hidden, _ = forward(target, TOKENS, context_layers=drafter.config.context_layers)
    sums = sums_over_chunks((target, drafter), hidden, TOKENS, MASK, chunk_length, softening)
    expected = brute_force(target, drafter, TOKENS, MASK, softening)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=2e-4, atol=1e-4, err_msg=name)


def test_gradients_through_the_targets_projection_are_true_and_near_in_bfloat16() -> None:
    target, drafter = make_pair(LENT)
    hidden, _ = forward(target, TOKENS)

    def loss(params: Any, weights: Any) -> jax.Array:
        pair = replace(target, params=weights), replace(drafter, params=params)
        return sums_over_chunks(pair, hidden, TOKENS, MASK, 4).hard.sum() / MASK.sum()

    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    check_grads(partial(loss, weights=widened), (drafter.params,), order=1, modes=["rev"])
    near, true = (
        ravel_pytree(jax.grad(loss)(drafter.params, weights))[0] for weights in (rounded, widened)
    )
    assert 0 < jnp.linalg.norm(near - true) < 0.02 * jnp.linalg.norm(true)


def test_documents_that_share_a_row_are_as_if_alone() -> None:
    check_documents(SHAPE)


def test_a_head_that_attends_sees_its_own_document_alone() -> None:
    check_documents(ATTENDING)


def check_documents(shape: HeadConfig) -> None:
    tokens, mask = TOKENS[0], MASK[0]
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]  # and two tokens of padding
    segments = np.zeros((1, T), np.int32)
    for number, part in enumerate(parts, start=1):
        segments[0, part] = number
    counted = np.where(segments > 0, mask, False)
    target, drafter = make_pair(shape)
    hidden, _ = forward(target, tokens[None], segments)
    together = sums_over_chunks(
        (target, drafter), hidden, tokens[None], counted, 3, segments=segments
    )
    count = count_positions(jnp.asarray(counted), jnp.asarray(segments), ROUNDS)
    alone = [brute_force(target, drafter, tokens[None, part], mask[None, part]) for part in parts]
    for name in alone[0]:
        expected = sum(sums[name] for sums in alone)
        np.testing.assert_allclose(getattr(together, name), expected, rtol=2e-4, atol=1e-4)
    labels = [sum(mask[part][i + 2 :].sum() for part in parts) for i in range(ROUNDS)]
    np.testing.assert_array_equal(count, labels)


def test_a_chunk_is_no_longer_than_the_rows() -> None:
    rows, hidden = jnp.ones((B, T), jnp.int32), jnp.zeros((B, T, 4))
    chunks = split_chunks(hidden, hidden, rows, rows > 0, rows, rounds=ROUNDS, chunk_length=64)
    assert chunks.contexts.shape == (1, B, T, 4)
    assert chunks.hidden is not None
    assert chunks.hidden.shape == (1, B, T + ROUNDS, 4)


def test_chunks_join_to_the_rows_that_they_were() -> None:
    rows = jnp.asarray(GENERATOR.normal(size=(B, T, 4)))
    of = jnp.ones((B, T), jnp.int32)
    chunks = split_chunks(rows, rows, of, of > 0, of, rounds=ROUNDS, chunk_length=4)
    assert chunks.contexts.shape == (3, B, 4, 4)
    np.testing.assert_array_equal(join_chunks(chunks.contexts, T), rows)
