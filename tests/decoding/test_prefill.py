"""Prompts read in chunks are prompts read at once; what is remembered is not read again."""

import inspect
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from redrafter_jax.decoding.prefill import PrefixCache, empty_prefix, prefill
from tiny_models import random_target, tiny_config

from redrafter_jax.engine.requests import Batch, pad_requests
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState, Requests

pytestmark = pytest.mark.usefixtures("quick_compilation")

C, S = 8, 64
SHAPE = (5, S)
# Layer 0 sees less than a chunk, rotated at a base of its own, and layer 1 everything.
CONFIG = tiny_config(sliding_window=5, windowed_layers=(0,), rope_local_base_freq=300.0)
random = np.random.default_rng(3)
TEXT: list[int] = random.integers(1, 24, S).tolist()
# One token, exactly a chunk, one more, whole chunks, and a tail.
LENGTHS = [1, C, C + 1, 3 * C, 29]


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(CONFIG)


def requests_of(prompts: list[list[int]]) -> Requests:
    return pad_requests(CONFIG, Batch(prompts, 4, eos_token_ids=()), 3, SHAPE)[0]


@pytest.fixture(scope="module")
def read(target: Target) -> Any:
    """`prefill` that may be traced once by all tests together, whatever the prompts' lengths."""
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(inspect.unwrap(prefill), n=1)
    run = jax.jit(counted, static_argnames="chunk")

    def read(prompts: list[list[int]], prefix: PrefixCache | None = None) -> DecodeState:
        prefix = prefix or empty_prefix(target, *SHAPE)
        return run(target, requests_of(prompts), prefix, chunk=C)

    return read


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [[(row + token) % 24 for token in TEXT[:length]] for row, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def at_once(target: Target) -> Any:
    """The last hidden state of one causal pass, its keys and values, and the scores."""

    @jax.jit
    def forward(target: Target, tokens: Any, last: Any) -> Any:
        decoder = target.merge()
        hidden, keys, values = decoder.forward(tokens)
        end = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        return end, keys, values, decoder.logits(end)

    return lambda prompts: forward(
        target, requests_of(prompts).tokens, jnp.asarray([len(row) - 1 for row in prompts])
    )


def assert_read(state: DecodeState, prompts: list[list[int]], at_once: Any) -> None:
    """The state is that of one causal pass over the prompts."""
    # On the host, for a device compiles every slice.
    state = jax.tree.map(np.asarray, state)
    context, keys, values, logits = jax.tree.map(np.asarray, at_once(prompts))
    assert state.cache.lengths.tolist() == list(map(len, prompts))
    np.testing.assert_allclose(state.drafter, context, rtol=0, atol=2e-5)
    sides = zip(state.cache.keys + state.cache.values, keys + values, strict=True)
    for slots, expected in sides:
        for row, prompt in enumerate(prompts):
            theirs = expected[row, : len(prompt)].swapaxes(0, 1)
            np.testing.assert_allclose(slots[row, :, : len(prompt)], theirs, rtol=0, atol=2e-5)
    chosen = np.asarray(logits).argmax(axis=-1)
    assert state.root.tolist() == chosen.tolist()
    for row, prompt in enumerate(prompts):
        assert state.tokens[row, : len(prompt) + 1].tolist() == [*prompt, chosen[row]]


@pytest.mark.parametrize("lengths", [LENGTHS, [5, 2, 8, 3, 1], [57, 1, 40, 17, 57]])
def test_chunks_are_one_causal_pass(read: Any, at_once: Any, lengths: list[int]) -> None:
    prompts = prompts_of(lengths)
    assert_read(read(prompts), prompts, at_once)


def remember(state: DecodeState) -> PrefixCache:
    return PrefixCache(state.tokens, state.cache)


FIRST = prompts_of([30, 30, 30, 2, 40])
# More follows; another end; another first token alone; a longer text; a beginning of the same.
NEXT = [
    [*FIRST[0], *[7] * 20],
    [*FIRST[1][:25], 1, 2, 3, 4],
    [(FIRST[2][0] + 1) % 24, *FIRST[2][1:]],
    [*FIRST[3], *range(20)],
    FIRST[4][:20],
]
# Tokens that each pair begins with in common.
SAME = [30, 25, 0, 2, 20]


def spoil(prefix: PrefixCache, places: np.ndarray, value: float) -> PrefixCache:
    """Another value in the cache at `places` [B, S]."""
    where = places[:, None, :, None]

    def over(slots: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.where(where, value, layer) for layer in slots)

    cache = prefix.cache
    return prefix._replace(cache=cache._replace(keys=over(cache.keys), values=over(cache.values)))


def test_only_the_common_beginning_is_taken(read: Any, at_once: Any) -> None:
    rest = np.arange(S) >= np.asarray(SAME)[:, None]
    spoilt = spoil(remember(read(FIRST)), rest, np.nan)
    assert_read(read(NEXT, spoilt), NEXT, at_once)


def test_the_common_beginning_is_not_read_again(read: Any) -> None:
    # What a row's own last chunk does not cover comes from the cache, spoilt as it is.
    begin = np.asarray([max(len(row) - C, 0) for row in NEXT])
    kept = np.arange(S) < np.minimum(SAME, begin)[:, None]
    state = read(NEXT, spoil(remember(read(FIRST)), kept, 7.0))
    for slots in state.cache.keys + state.cache.values:
        spoilt = np.asarray(slots == 7.0).all(axis=(1, 3))
        np.testing.assert_array_equal(spoilt, kept)


def test_tokens_that_the_cache_does_not_hold_are_read(read: Any, at_once: Any) -> None:
    # The buffer goes on as the new prompts do, but what is decided ends earlier.
    decided = np.minimum(SAME, 10)
    cache = read(FIRST).cache._replace(lengths=jnp.asarray(decided))
    prefix = PrefixCache(requests_of(NEXT).tokens, cache)
    rest = np.arange(S) >= decided[:, None]
    assert_read(read(NEXT, spoil(prefix, rest, np.nan)), NEXT, at_once)
