"""Prompts read in chunks are prompts read at once; what is remembered is not read again."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached import layers_of
from tiny_models import imitating_drafter, random_target, tiny_config

from eval.abstract import random_state
from pallas_kernels.tree_attention import PAGE
from redrafter_jax.drafters.base import Drafter, as_drafter
from redrafter_jax.engine.chunks import idle_row, make_row, next_chunk
from redrafter_jax.engine.device import Chunk, read_rows
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.scheduler import Row
from redrafter_jax.engine.state import empty_rows
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, C, S = 5, 8, 64
# Layer 0 sees less than a chunk, rotated at a base of its own, and layer 1 everything.
CONFIG = tiny_config(sliding_window=5, windowed_layers=(0,), rope_local_base_freq=300.0)
random = np.random.default_rng(3)
TEXT: list[int] = random.integers(1, 24, S).tolist()
# One token, exactly a chunk, one more, whole chunks, and a tail.
LENGTHS = [1, C, C + 1, 3 * C, 29]


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(CONFIG)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    """One whose state is the target's hidden state at the last token."""
    return as_drafter(imitating_drafter(target))


def request_of(prompt: list[int], limit: int = 4) -> Request:
    return Request(prompt, limit, 0, stop_tokens=())


def rows_of(target: Target, prompts: list[list[int]], known: Sequence[int]) -> list[Row | None]:
    """A row for each prompt, of which so many tokens are in the cache."""
    rows: list[Row | None] = []
    for number, (prompt, cached) in enumerate(zip(prompts, known, strict=True)):
        row = make_row(target, number, request_of(prompt), ())
        row.read_until, row.cached = len(prompt), cached
        rows.append(row)
    return rows


def nothing_read(target: Target, drafter: Drafter) -> DecodeState:
    stop_width = idle_row(target, ()).arrays.stop_tokens.shape[1]
    return empty_rows(target, drafter, B, S, stop_width)


@pytest.fixture(scope="module")
def read(target: Target, drafter: Drafter) -> Any:
    """All passes over five prompts, whose program is traced once whatever their lengths."""
    chex.clear_trace_counter()
    run = jax.jit(chex.assert_max_traces(inspect.unwrap(read_rows), n=1))
    idle = idle_row(target, ())

    def read(
        prompts: list[list[int]],
        state: DecodeState | None = None,
        known: Sequence[int] = (0,) * B,
    ) -> DecodeState:
        now = nothing_read(target, drafter) if state is None else state
        rows = rows_of(target, prompts, known)
        while places := {at: at for at, row in enumerate(rows) if row and row.reading}:
            chunk = next_chunk(rows, places, B, (B, C), idle)
            now, _ = run(target, drafter, now, jax.tree.map(jnp.asarray, chunk))
        return now

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

    def at_once(prompts: list[list[int]]) -> Any:
        tokens = jnp.asarray([[*prompt, *[0] * (S - len(prompt))] for prompt in prompts])
        return forward(target, tokens, jnp.asarray([len(prompt) - 1 for prompt in prompts]))

    return at_once


def assert_read(state: DecodeState, prompts: list[list[int]], at_once: Any) -> None:
    """The state is that of one causal pass over the prompts."""
    # On the host, for a device compiles every slice.
    state = jax.tree.map(np.asarray, state)
    context, keys, values, logits = jax.tree.map(np.asarray, at_once(prompts))
    assert state.cache.lengths.tolist() == list(map(len, prompts))
    np.testing.assert_allclose(state.own, context, rtol=0, atol=2e-5)
    for slots, expected in zip(layers_of(state.cache), keys + values, strict=True):
        for row, prompt in enumerate(prompts):
            theirs = expected[row, : len(prompt)].swapaxes(0, 1)
            np.testing.assert_allclose(slots[row, :, : len(prompt)], theirs, rtol=0, atol=2e-5)
    chosen = np.asarray(logits).argmax(axis=-1)
    assert state.root.tolist() == chosen.tolist()
    assert not state.done.any()
    for row, prompt in enumerate(prompts):
        assert state.tokens[row, : len(prompt) + 1].tolist() == [*prompt, chosen[row]]


def by_row(state: DecodeState) -> Any:
    """Copies of all that a row has."""
    cache: Any = layers_of(state.cache), np.array(state.cache.lengths)
    return jax.tree.map(np.array, state._replace(cache=cache))


def spoil(state: DecodeState, places: np.ndarray, value: float) -> DecodeState:
    """Another value in the cache at `places` [B, S]."""
    cache = state.cache
    B, M = cache.table.shape
    where = np.zeros((B, M * PAGE), bool)
    where[:, : places.shape[1]] = places
    where = where.reshape(B, M, 1, PAGE, 1)

    def over(layers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            layer.at[cache.table].set(jnp.where(where, value, layer[cache.table]))
            for layer in layers
        )

    return state._replace(cache=cache._replace(keys=over(cache.keys), values=over(cache.values)))


@pytest.mark.parametrize("lengths", [LENGTHS, [5, 2, 8, 3, 1], [57, 1, 40, 17, 57]])
def test_chunks_are_one_causal_pass_whatever_the_cache_held(
    target: Target, drafter: Drafter, read: Any, at_once: Any, lengths: list[int]
) -> None:
    prompts = prompts_of(lengths)
    assert_read(read(prompts), prompts, at_once)
    nowhere = spoil(nothing_read(target, drafter), np.ones((B, S), bool), np.nan)
    assert_read(read(prompts, nowhere), prompts, at_once)


FIRST = prompts_of([30, 30, 30, 2, 40])
# More follows; another end; another first token alone; a longer text; a beginning of the same.
NEXT = [
    [*FIRST[0], *[7] * 20],
    [*FIRST[1][:25], 1, 2, 3, 4],
    [(FIRST[2][0] + 1) % 24, *FIRST[2][1:]],
    [*FIRST[3], *range(20)],
    FIRST[4][:20],
]
# Tokens that each pair begins with in common, but the last one of a prompt, which is read anew.
SAME = [30, 25, 0, 2, 19]


@pytest.mark.parametrize("known", [SAME, np.minimum(SAME, 10).tolist()], ids=["all", "some"])
def test_what_is_known_is_taken_and_nothing_past_it(
    read: Any, at_once: Any, known: list[int]
) -> None:
    rest = np.arange(S) >= np.asarray(known)[:, None]
    spoilt = spoil(read(FIRST), rest, np.nan)
    assert_read(read(NEXT, spoilt, known), NEXT, at_once)


def test_what_is_known_is_not_read_again(read: Any) -> None:
    kept = np.arange(S) < np.asarray(SAME)[:, None]
    state = read(NEXT, spoil(read(FIRST), kept, 7.0), SAME)
    for slots in layers_of(state.cache):
        np.testing.assert_array_equal((slots == 7.0).all(axis=(1, 3))[:, :S], kept)


@pytest.mark.parametrize("reading", [[1, 3], [3], []], ids=str)
@pytest.mark.parametrize("places", [B, 2], ids=["a place for every row", "two places"])
def test_idle_places_leave_all_rows_as_they_are(
    target: Target, drafter: Drafter, reading: list[int], places: int
) -> None:
    state = random_state(target, drafter, B, S)
    # Of rows that are full, too, which have no room for a chunk.
    lengths = jnp.asarray([S - 1, 20, S, 9, 0])
    state = state._replace(
        cache=state.cache._replace(lengths=lengths), done=jnp.asarray([True, False] * 2 + [True])
    )
    state = spoil(state, np.arange(S) >= np.asarray(lengths)[:, None], np.nan)
    before = by_row(state)
    rows = rows_of(target, prompts_of([30] * B), [0] * B)
    at = reading if places == B else range(len(reading))
    stops = [0] * (state.stop_tokens.shape[1] - 8)
    chunk: Chunk = next_chunk(
        rows, dict(zip(at, reading, strict=True)), B, (places, C), idle_row(target, stops)
    )
    after, (gains, ended) = read_rows(target, drafter, state, jax.tree.map(jnp.asarray, chunk))
    rest = [row for row in range(B) if row not in reading]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(by_row(after)), strict=True):
        np.testing.assert_array_equal(new[rest], old[rest])
    assert np.asarray(after.cache.lengths)[reading].tolist() == [C] * len(reading)
    assert not np.asarray(gains.counts).any(), "no prompt ends in this chunk"
    assert not np.asarray(ended).any()


def test_no_pass_copies_the_cache(target: Target, drafter: Drafter) -> None:
    state = random_state(target, drafter, B, S)
    rows = rows_of(target, prompts_of([30] * B), [0] * B)
    stops = [0] * (state.stop_tokens.shape[1] - 8)
    chunk: Chunk = next_chunk(rows, {0: 1}, B, (1, C), idle_row(target, stops))
    program = read_rows.lower(target, drafter, state, jax.tree.map(jnp.asarray, chunk)).compile()
    cache = ",".join(map(str, state.cache.keys[0].shape))
    assert f"f32[{cache}]" in (text := str(program.as_text()))
    assert not re.search(rf"= f32\[{cache}\]\S* copy\(", text)
