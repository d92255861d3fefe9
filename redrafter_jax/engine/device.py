"""The compiled programs that the engine runs, over a decode state of B rows.

The programs know nothing about the queue: the caller says which rows read which tokens, and which
rows decode. The shapes of the arrays depend only on sizes such as B and C, so a new request
compiles nothing. A place is an index into the smaller batch of G rows on which a program works. On
a mesh, each device numbers the rows of its shard from 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.accept import is_stop
from redrafter_jax.decoding.read import ReadChunk, finish_chunk, read_chunk
from redrafter_jax.decoding.step import (
    as_asked,
    settle_step,
    step_noise,
    verified_step,
    verify_with_chunk,
)
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.engine.gains import Gains, gains_of, gains_of_step, score_prompt
from redrafter_jax.engine.state import put_rows_back, take_rows
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import per_shard
from redrafter_jax.sampling import adjustment_of, unpack_bits
from redrafter_jax.types import SOURCES, Controls, DecodeState, KVCache, Requests, Sampling

Tree = TypeVar("Tree")


# Gains of the rows of a program, and which of these rows have ended.
Outcome = tuple[Gains, Bool[Array, " _"]]


class Chunk(NamedTuple):
    """The input of one prefill pass: C tokens of the prompts of G rows.

    Attributes:
      rows: index in the state of the row at each place; B marks an idle place. If G is B, place i
        holds row i or is idle.
      begins: position in the prompt of the first token to read.
      is_new: whether this is the first chunk of the request.
      following: the token after the chunk; arbitrary if the prompt ends in the chunk.
      speculates: whether trees are drafted for the row.
      requests: the requests; their `tokens` are the C tokens from position `begins` on, padded past
        the end of the prompt.
    """

    rows: Int[Array, " G"]
    begins: Int[Array, " G"]
    is_new: Bool[Array, " G"]
    following: Int[Array, " G"]
    speculates: Bool[Array, " G"]
    requests: Requests


@partial(jax.jit, donate_argnames="state")
@per_shard
def write_texts(
    target: Target, state: DecodeState, rows: Int[Array, " G"], texts: Int[Array, "G S"]
) -> DecodeState:
    """Write the token buffers of some rows, for tokens that are already in shared cache pages.

    No prefill pass reads these tokens, so no other program writes them. Where `rows` is B, one past
    the last row, nothing is written.
    """
    del target  # only used by `per_shard`, for the mesh
    return state._replace(tokens=state.tokens.at[rows].set(texts, mode="drop"))


@partial(jax.jit, donate_argnames="state", static_argnames=("top", "prompt_top"))
@per_shard
def read_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    chunk: Chunk,
    controls: Controls | None = None,
    masks: Int[Array, "G words"] | None = None,
    *,
    top: int | None = None,
    prompt_top: int | None = None,
) -> tuple[DecodeState, Outcome]:
    """Run one prefill pass, and choose the first token of each row whose prompt ends in the chunk.

    A row stays marked as done until its prompt has been read to the end.

    Args:
      target: the target model.
      drafter: the drafter, which also reads the prompts.
      state: decode state of B rows, donated.
      chunk: the tokens to read.
      controls: controls of the G rows; None if no row has any.
      masks: bit masks of the tokens that grammars allow as the first new token; None allows all.
      top: M, number of most likely tokens to report per position; None reports no
        log-probabilities.
      prompt_top: number of most likely tokens to report per position of the prompt; None reports no
        log-probabilities of the prompt.

    Returns:
      The state; the gains of the G rows in this one target call, 0 or 1 token each; and which rows
      have ended.
    """
    decoder = target.merge()
    begun = _begin_chunk(decoder, drafter, state, chunk, controls, masks)
    asked = begun.own, begun.cache, begun.fresh, begun.ends, begun.sampling
    read = read_chunk(decoder, drafter, *asked)
    return _end_chunk(decoder, state, chunk, begun, read, top, prompt_top)


class _Begun(NamedTuple):
    """The inputs of a prefill pass: the rows before the pass, and the arguments of `read_chunk`.

    Attributes:
      old: the G rows before the pass.
      tokens: the texts of the rows, with the chunk.
      own: drafter state; empty for new requests.
      cache: cache of the rows; `lengths` are the positions at which the chunk starts.
      fresh: the C tokens of the chunk and the token after them.
      ends: lengths of the prompts; 0 for a row that reads nothing.
      sampling: sampling settings for the first token after a prompt.
    """

    old: DecodeState
    tokens: Int[Array, "G S"]
    own: Any
    cache: KVCache
    fresh: Int[Array, "G Cplus1"]
    ends: Int[Array, " G"]
    sampling: Sampling


def _begin_chunk(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    chunk: Chunk,
    controls: Controls | None = None,
    masks: Int[Array, "G words"] | None = None,
) -> _Begun:
    rows, begins, is_new, following, _, requests = chunk
    B, C, V = len(state.done), requests.tokens.shape[1], decoder.config.vocab_size
    live = rows < B
    old = state if len(rows) == B else take_rows(state, rows)
    # In this pass, a row that reads nothing has length 0, so that attention skips it.
    start, ends = (jnp.where(live, one, 0) for one in (begins, requests.lengths))
    fresh = jnp.concatenate([requests.tokens, following[:, None]], axis=1)
    sampling = requests.sampling
    if masks is not None:
        sampling = sampling._replace(allowed=unpack_bits(masks[:, None], V))
    # A new request starts with an empty drafter state, not with the previous request's.
    own = _choose(live & is_new, drafter.empty(decoder, len(rows)), old.own)
    places = jnp.arange(len(rows))[:, None], start[:, None] + jnp.arange(C)
    kept = old.tokens.at[places].get(mode="fill", fill_value=0)
    written = jnp.where(live[:, None], requests.tokens, kept)
    tokens = old.tokens.at[places].set(written, mode="drop", unique_indices=True)
    sampling = _adjusted(sampling, controls, tokens, ends, requests.stop_tokens, V)
    return _Begun(old, tokens, own, old.cache._replace(lengths=start), fresh, ends, sampling)


def _end_chunk(
    decoder: Decoder,
    state: DecodeState,
    chunk: Chunk,
    begun: _Begun,
    read: ReadChunk,
    top: int | None,
    prompt_top: int | None = None,
) -> tuple[DecodeState, Outcome]:
    rows, begins, _, _, speculates, requests = chunk
    B, C, V = len(state.done), requests.tokens.shape[1], decoder.config.vocab_size
    live, lengths, old = rows < B, requests.lengths, begun.old
    finished = live & (begins + C >= lengths)
    stops = is_stop(read.root[:, None], requests.stop_tokens)[:, 0]
    done = stops | (lengths + 1 >= requests.limits)

    at_end = jnp.where(finished, lengths, begun.tokens.shape[1])
    tokens = begun.tokens.at[jnp.arange(len(rows)), at_end].set(read.root, mode="drop")
    new = DecodeState(
        tokens=tokens,
        cache=read.cache._replace(lengths=jnp.where(live, read.cache.lengths, old.cache.lengths)),
        own=read.own,
        root=read.root,
        speculates=speculates,
        done=done | ~finished,
        limits=requests.limits,
        stop_tokens=requests.stop_tokens,
        sampling=requests.sampling,
    )
    nothing = jnp.zeros((len(rows), len(SOURCES)), jnp.int32)
    gains = gains_of(
        read.root[:, None],
        read.logits,
        finished.astype(jnp.int32),
        jnp.full((len(rows), 1), -1),
        nothing,
        V,
        top,
    )
    if len(rows) == B:
        small = {name: getattr(new, name) for name in _SMALL}
        kept = {name: getattr(old, name) for name in _SMALL}
        state = new._replace(**_choose(live, small, kept))
    else:
        state = put_rows_back(state, new, rows)
    gains = jax.tree.map(lambda leaf: leaf[:, None], gains)
    if prompt_top is not None:
        scores = score_prompt(decoder, read.hidden, begun.fresh[:, 1:], prompt_top)
        gains = gains._replace(prompt=scores)
    return state, (gains, finished & done)


# Fields restored for idle rows. Tokens and cache need no restoring: idle rows do not write them.
_SMALL = ("root", "speculates", "done", "limits", "stop_tokens", "sampling", "own")


@partial(jax.jit, donate_argnames="state", static_argnames=("tree", "steps", "top"))
@per_shard
def decode_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    rows: Int[Array, " G"],
    most: Int[Array, ""] | int,
    controls: Controls | None = None,
    *,
    tree: TreeConfig | None,
    steps: int,
    top: int | None = None,
) -> tuple[DecodeState, Outcome]:
    """Run decode steps of G rows, until all of them are done or `most` steps have run.

    Other rows do not change. If all places are idle, all `most` steps run; this is for timing.

    Args:
      target: the target model.
      drafter: the drafter, which reads the new tokens even if `tree` is None.
      state: decode state of B rows, donated.
      rows: index in the state of the row at each place; B marks an idle place. If G is B, place i
        holds row i or is idle.
      most: maximum number of steps of this call, at most X.
      controls: controls of the G rows, as in `read_rows`.
      tree: the shape of the trees; with None, a tree is only the root.
      steps: X, maximum number of steps of the compiled program.
      top: number of most likely tokens to report per position, as in `read_rows`.

    Returns:
      The state; the gains of the G rows in each of X target calls, which are zero for steps that
      did not run; and which rows have ended.
    """
    V, decoder = target.config.vocab_size, target.merge()
    batch = _begin_batch(state, rows)

    def step(batch: DecodeState) -> tuple[DecodeState, Gains]:
        active, sampling = ~batch.done, batch.sampling
        batch = with_controls(batch, controls, V)
        batch, trace, verified = verified_step(decoder, drafter, batch, tree)
        batch = batch._replace(sampling=sampling)
        return batch, gains_of_step(active, trace, verified, V, top)

    idle = rows >= len(state.done)
    batch, gains = _loop(step, batch, most, steps, idle.all())
    return _end_batch(state, batch, rows), (gains, batch.done)


@partial(jax.jit, donate_argnames="state", static_argnames="top")
@per_shard
def read_and_decode_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    chunk: Chunk,
    rows: Int[Array, " G"],
    *,
    top: int | None = None,
) -> tuple[DecodeState, Outcome, Outcome]:
    """Run one prefill pass and, in the same target pass, a decode step without a draft.

    The target pass reads each weight only once. The rows that decode and the rows of the prefill
    pass must be different rows, and no row may have controls or a grammar.

    Args:
      target: the target model.
      drafter: the drafter, which reads the prompts and the new tokens.
      state: decode state of B rows, donated.
      chunk: the prompt tokens to read.
      rows: rows that decode, as in `decode_rows`.
      top: as in `read_rows`.

    Returns:
      The state; gains and ended rows of the prefill pass, as from `read_rows`; gains and ended rows
      of the decode step, as from `decode_rows` with one step.
    """
    decoder = target.merge()
    begun = _begin_chunk(decoder, drafter, state, chunk)
    batch = _begin_batch(state, rows)
    drafted = root_tree(batch.root)
    verified, passed = verify_with_chunk(
        decoder,
        drafted,
        as_asked(batch).cache,
        begun.fresh[:, :-1],
        begun.cache,
        drafter.layers(decoder.config),
    )
    asked = begun.own, begun.cache, begun.fresh, begun.ends, begun.sampling
    read = finish_chunk(decoder, drafter, *asked, passed)
    state, reading = _end_chunk(decoder, state, chunk, begun, read, top)
    # The chunk's pages are written, so the step goes on with this state.
    batch = _begin_batch(state, rows)
    active = ~batch.done
    noise = step_noise(batch, 1, decoder.config.vocab_size)
    after, trace = settle_step(decoder, drafter, batch, drafted, verified, noise)
    gains = gains_of_step(active, trace, verified, decoder.config.vocab_size, top)
    gains = jax.tree.map(lambda leaf: leaf[:, None], gains)
    return _end_batch(state, after, rows), reading, (gains, after.done)


def _begin_batch(state: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """Return the rows that decode; idle places are marked as done."""
    B = len(state.done)
    batch = state if len(rows) == B else take_rows(state, rows)
    return batch._replace(done=batch.done | (rows >= B))


def _end_batch(state: DecodeState, batch: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """Return the state with the rows that have decoded."""
    B = len(state.done)
    if len(rows) < B:
        return put_rows_back(state, batch, rows)
    return batch._replace(done=jnp.where(rows >= B, state.done, batch.done))


def with_controls(batch: DecodeState, controls: Controls | None, vocab_size: int) -> DecodeState:
    """Set the rows' `Sampling.adjustment` from their controls and texts."""
    if controls is None:
        return batch
    decided, stops = batch.cache.lengths + 1, batch.stop_tokens
    sampling = _adjusted(batch.sampling, controls, batch.tokens, decided, stops, vocab_size)
    return batch._replace(sampling=sampling)


def _adjusted(
    sampling: Sampling,
    controls: Controls | None,
    tokens: Int[Array, "G S"],
    lengths: Int[Array, " G"],
    stop_tokens: Int[Array, "G E"],
    vocab_size: int,
) -> Sampling:
    """Set `Sampling.adjustment` from controls, and from texts of `lengths` tokens."""
    if controls is None:
        return sampling
    adjustment = adjustment_of(controls, tokens, lengths, stop_tokens, vocab_size)
    return sampling._replace(adjustment=adjustment)


def _loop(
    step: Callable[[DecodeState], tuple[DecodeState, Gains]],
    state: DecodeState,
    most: Int[Array, ""] | int,
    steps: int,
    rehearsed: Bool[Array, ""],
) -> tuple[DecodeState, Gains]:
    """Run steps until all rows are done, but at most `most` and at most X = `steps` steps.

    Returns the state and the gains of X steps; gains past the last step are zero. If `rehearsed` is
    true, the steps run even if all rows are done.
    """
    _, shapes = jax.eval_shape(step, state)
    room = jax.tree.map(lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), shapes)

    def unfinished(carry: tuple[Array, DecodeState, Gains]) -> Bool[Array, ""]:
        at, state, _ = carry
        return (at < jnp.minimum(most, steps)) & (rehearsed | ~state.done.all())

    def body(carry: tuple[Array, DecodeState, Gains]) -> tuple[Array, DecodeState, Gains]:
        at, state, gains = carry
        state, new = step(state)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
        return at + 1, state, jax.tree.map(lambda all, one: write(all, one), gains, new)

    _, state, gains = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, room))
    return state, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), gains)


def _choose(on: Bool[Array, " G"], new: Tree, old: Tree) -> Tree:
    """Select rows from `new` where `on` is true, and from `old` elsewhere."""

    def choose(new: Shaped[Array, "G ..."], old: Shaped[Array, "G ..."]) -> Array:
        return jnp.where(on.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)
