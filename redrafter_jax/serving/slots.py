"""Rows of one decode state that requests take one by one: the device's side.

Nothing here knows a queue: the caller says what is read for which rows, and which rows decode.
Shapes follow from the sizes alone, so that nothing is compiled for a new request. On a mesh each
device's part of the state numbers its own rows from 0.
"""

from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.decoding.accept import log_probs_of
from redrafter_jax.decoding.prefill import choose_first, prefill, zero_stats
from redrafter_jax.decoding.step import verified_step
from redrafter_jax.drafters.one_of import OneOf
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import per_shard, shardings
from redrafter_jax.types import DecodeState, Requests, Sampling

Tree = TypeVar("Tree")


class PrefillChunk(NamedTuple):
    """What one pass of prefill reads: C tokens of the prompts of G rows.

    Attributes:
      rows: which row of the state each becomes; B for none.
      sources: the row whose cache holds the tokens before `begins`.
      begins: position of the first token that is read.
      speculates: whether trees are drafted for the row.
      requests: with the tokens from `begins` on alone; past the end of the prompt padding. C tokens
        must fit.
    """

    rows: Int[Array, " G"]
    sources: Int[Array, " G"]
    begins: Int[Array, " G"]
    speculates: Bool[Array, " G"]
    requests: Requests


class Gains(NamedTuple):
    """What G rows gained in X target calls, of up to P tokens each.

    Attributes:
      counts: how many of the P tokens each call gained; 0 of rows that were done.
      tokens: the tokens, garbage past the counts.
      origins: which of the drafter's `names` proposed a token, -1 for the target itself.
      log_probs: of the tokens under the target, before temperature and filters.
      top_tokens: at each place the M most likely tokens under the target.
      top_log_probs: of these.
      drafted: live nodes that each of the drafter's O `names` proposed.
      done: the row has ended.
    """

    counts: Int[Array, "G X"]
    tokens: Int[Array, "G X P"]
    origins: Int[Array, "G X P"]
    log_probs: Float[Array, "G X P"]
    top_tokens: Int[Array, "G X P M"]
    top_log_probs: Float[Array, "G X P M"]
    drafted: Int[Array, "G X O"]
    done: Bool[Array, " G"]


def empty_rows(
    target: Target, drafter: OneOf, rows: int, slots: int, stop_width: int
) -> DecodeState:
    """A state of B rows that are all done, with nothing in them.

    Args:
      target: the target model.
      drafter: any choice of the drafters that will decode.
      rows: B.
      slots: S, cache slots of each.
      stop_width: E, stop tokens that a row may have.
    """
    sizes = {"rows": rows, "slots": slots, "stop_width": stop_width}
    shapes = jax.eval_shape(partial(_some_rows, **sizes), target, drafter)

    def zeros() -> DecodeState:
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return state._replace(done=jnp.ones(rows, bool))

    # Each device of a mesh makes its own part: no one could hold the whole.
    return jax.jit(zeros, out_shardings=target.mesh and shardings(shapes, target.mesh))()


@partial(jax.jit, static_argnames=("rows", "slots", "stop_width"))  # it is traced once
def _some_rows(
    target: Target, drafter: OneOf, *, rows: int, slots: int, stop_width: int
) -> DecodeState:
    """What `generate` would begin with; as in `empty_rows`."""
    numbers, ones = jnp.ones(rows, jnp.int32), jnp.ones(rows)
    requests = Requests(
        jnp.zeros((rows, slots), jnp.int32),
        numbers,
        numbers,
        jnp.zeros((rows, stop_width), jnp.int32),
        Sampling(ones, numbers, ones, ones, numbers),
    )
    state = prefill(target, requests, context_layers=drafter.context_layers)
    stats = zero_stats(state.root, drafter.longest_path)
    return state._replace(drafter=drafter.init(state.drafter), stats=stats)


@partial(jax.jit, donate_argnames="state", static_argnames="top")
@per_shard
def read_chunk(
    target: Target, drafter: OneOf, state: DecodeState, reading: PrefillChunk, *, top: int = 0
) -> tuple[DecodeState, Gains]:
    """One pass of prefill; where it reaches the end of a prompt, the row's first token is chosen.

    Until then a row is done, and its cache holds what has been read. Its beginning may be another
    row's: the keys and values are copied.

    Args:
      target: the target model.
      drafter: any choice of the drafters that decode.
      state: of B rows, donated.
      reading: what is read.
      top: M, most likely tokens that are reported of each place.

    Returns:
      The state, and what the G rows gained: one token or none.
    """
    rows, sources, begins, speculates, requests = reading
    decoder, chunk, lengths = target.merge(), requests.tokens, requests.lengths
    C = chunk.shape[1]
    cache = _rows_of(state.cache, sources)._replace(lengths=begins)
    hidden, cache = decoder.extend(chunk, cache, drafter.context_layers)
    end = jnp.clip(lengths - 1 - begins, 0, C - 1)
    last = jnp.take_along_axis(hidden, end[:, None, None], axis=1)[:, 0]
    tokens = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        state.tokens[sources], chunk, begins
    )
    read, whole = jnp.minimum(begins + C, lengths), requests._replace(tokens=tokens)
    P = state.stats.accept_counts.shape[1]
    fresh, logits = choose_first(target, whole, last, cache._replace(lengths=read), P)
    finished = read == lengths
    own = drafter.init(last)._replace(speculates=speculates)
    fresh = fresh._replace(drafter=own, done=fresh.done | ~finished)
    gains = _gains(
        fresh.root[:, None],
        logits,
        finished.astype(jnp.int32),
        jnp.full((len(rows), 1), -1),
        jnp.zeros((len(rows), len(drafter.names)), jnp.int32),
        target.config.vocab_size,
        top,
    )
    gains = Gains(*(leaf[:, None] for leaf in gains), done=finished & fresh.done)
    return _put_rows(state, fresh, rows), gains


@partial(jax.jit, donate_argnames="state", static_argnames=("steps", "top"))
@per_shard
def decode_rows(
    target: Target,
    drafter: OneOf,
    state: DecodeState,
    rows: Int[Array, " G"],
    *,
    steps: int,
    top: int = 0,
) -> tuple[DecodeState, Gains]:
    """Decode steps of some rows, as a batch of G; the others do not change.

    Args:
      target: the target model.
      drafter: that drafts in these steps.
      state: of B rows, donated.
      rows: which rows, B for none. Where G is B, row i or none is at place i.
      steps: X.
      top: M, most likely tokens that are reported of each place.
    """
    B, V = len(state.done), target.config.vocab_size
    all_rows = len(rows) == B
    batch = state if all_rows else _rows_of(state, rows)
    batch = batch._replace(done=batch.done | (rows >= B))
    decoder = target.merge()
    sources = jnp.arange(len(drafter.names))

    def step(batch: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, ...]]:
        active = ~batch.done
        batch, trace, verified = verified_step(decoder, drafter, batch)
        path = trace.accepted.path
        places = jnp.arange(path.shape[1])
        tokens = jnp.take_along_axis(trace.chosen, path, axis=1)
        logits = jnp.take_along_axis(verified.logits, path[..., None], axis=1)
        # The choice at a node is the token of the next node on the path, which somebody proposed;
        # the last choice is the target's bonus.
        origins = jnp.take_along_axis(trace.tree.origin, jnp.roll(path, -1, axis=1), axis=1)
        origins = jnp.where(places < trace.gained[:, None] - 1, origins, -1)
        drafted = (trace.tree.origin[..., None] == sources) & active[:, None, None]
        drafted = drafted.sum(axis=1, dtype=jnp.int32)
        return batch, _gains(tokens, logits, trace.gained, origins, drafted, V, top)

    batch, gained = jax.lax.scan(step, batch, length=steps)
    gains = Gains(*(jnp.moveaxis(leaf, 0, 1) for leaf in gained), done=batch.done)
    return batch if all_rows else _put_rows(state, batch, rows), gains


def _gains(
    tokens: Int[Array, "G P"],
    logits: Float[Array, "G P part"],
    counts: Int[Array, " G"],
    origins: Int[Array, "G P"],
    drafted: Int[Array, "G O"],
    vocab_size: int,
    top: int,
) -> tuple[Array, ...]:
    """`Gains` of one call, but for `done`."""
    whole = all_gather(logits, vocab_size)
    top_logits, top_tokens = jax.lax.top_k(whole, top)
    top_log_probs = top_logits - jax.nn.logsumexp(whole, axis=-1, keepdims=True)
    log_probs = log_probs_of(whole, tokens)
    return counts, tokens, origins, log_probs, top_tokens, top_log_probs, drafted


def _rows_of(tree: Tree, rows: Int[Array, " G"]) -> Tree:
    """Copies of these rows; a number past the last row stands for the last."""
    # A barrier: XLA for CPUs would gather where they are read, and so copy all rows before a write.
    return jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[rows], tree))


def _put_rows(state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """The state with these rows in place of some of its own; B and above for none."""
    return jax.tree.map(lambda ours, new: ours.at[rows].set(new, mode="drop"), state, fresh)
