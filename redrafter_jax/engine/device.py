"""Rows of one decode state that requests take one by one: the device's side of the engine.

Nothing here knows a queue: the caller says what is read for which rows, and which rows decode.
Shapes follow from the sizes alone, so that nothing is compiled for a new request. On a mesh each
device's part of the state numbers its own rows from 0.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.accept import is_stop, log_probs_of
from redrafter_jax.decoding.read import read_chunk
from redrafter_jax.decoding.step import verified_step
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.cache import init_cache, put_rows, rows_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import data_shards, per_shard, shardings
from redrafter_jax.types import SOURCES, DecodeState, Requests, Sampling, StepTrace, Verified

Tree = TypeVar("Tree")


class Chunk(NamedTuple):
    """What one pass reads: C tokens of the prompts of G rows.

    Attributes:
      rows: row of the state at each place, B for none. Where G is B, row i or none is at place i.
      begins: position of the first token that is read.
      is_new: whether nothing of the request has been read before.
      following: the token after the chunk, where the prompt goes on.
      speculates: whether trees are drafted for the row.
      requests: with the tokens from `begins` on alone; past the end of the prompt padding.
    """

    rows: Int[Array, " G"]
    begins: Int[Array, " G"]
    is_new: Bool[Array, " G"]
    following: Int[Array, " G"]
    speculates: Bool[Array, " G"]
    requests: Requests


class Scores(NamedTuple):
    """Log-probabilities under the target, before temperature and filters.

    Attributes:
      chosen: of the tokens gained.
      top_tokens: at each place the M most likely tokens.
      top: of these.
    """

    chosen: Float[Array, "*places P"]
    top_tokens: Int[Array, "*places P M"]
    top: Float[Array, "*places P M"]


class Gains(NamedTuple):
    """What G rows gained in X target calls, of up to P tokens each.

    Attributes:
      counts: how many of the P tokens each call gained; 0 of rows that were done.
      tokens: the tokens, garbage past the counts.
      origins: which of `SOURCES` proposed a token, -1 for the target itself.
      drafted: live nodes that each of `SOURCES` proposed.
      scores: of the tokens; None where nobody asks.
    """

    counts: Int[Array, "*places"]
    tokens: Int[Array, "*places P"]
    origins: Int[Array, "*places P"]
    drafted: Int[Array, "*places O"]
    scores: Scores | None


def empty_rows(
    target: Target,
    drafter: Drafter,
    rows: int,
    slots: int,
    stop_width: int,
    pages: int | None = None,
) -> DecodeState:
    """A state of B rows that are all done, with nothing in them.

    Args:
      target: the target model.
      drafter: the drafter that will read and propose.
      rows: B.
      slots: S, tokens that a row may come to.
      stop_width: E, stop tokens that a row may have.
      pages: pages of the cache, over all devices along `data`; None for S slots of every row. On a
        mesh or with any other number the table says nothing yet.
    """
    if target.mesh is None:
        return _empty(target, drafter, rows=rows, slots=slots, stop_width=stop_width, pages=pages)
    shapes = row_shapes(target, drafter, rows, slots, stop_width, pages)

    def zeros(leaf: Any, sharding: Any) -> Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    # Each device makes its own part: no one could hold the whole.
    state = jax.tree.map(zeros, shapes, shardings(shapes, target.mesh))
    return state._replace(done=~state.done)


def row_shapes(
    target: Target,
    drafter: Drafter,
    rows: int,
    slots: int,
    stop_width: int,
    pages: int | None = None,
) -> DecodeState:
    """The shapes of what `empty_rows` makes; the models may be shapes too."""
    make = partial(_empty, rows=rows, slots=slots, stop_width=stop_width, pages=pages)
    return jax.eval_shape(make, target, drafter)


def page_bytes(target: Target, drafter: Drafter) -> int:
    """Bytes that a page of all layers, the drafter's too, takes on each device that holds it."""
    parts = data_shards(target.mesh)
    cache = row_shapes(target, drafter, parts, PAGE, 1, pages=parts).cache
    layers = cache.keys + cache.values
    if target.mesh is None:
        return sum(layer.size * layer.dtype.itemsize for layer in layers)
    split = shardings(cache, target.mesh)
    return sum(
        math.prod(sharding.shard_shape(layer.shape)) * layer.dtype.itemsize
        for layer, sharding in zip(layers, split.keys + split.values, strict=True)
    )


@partial(jax.jit, static_argnames=("rows", "slots", "stop_width", "pages"))
def _empty(
    target: Target,
    drafter: Drafter,
    *,
    rows: int,
    slots: int,
    stop_width: int,
    pages: int | None,
) -> DecodeState:
    decoder = target.merge()

    def zeros(*shape: int) -> Int[Array, "..."]:
        return jnp.zeros((rows, *shape), jnp.int32)

    numbers = jnp.zeros(rows)
    return DecodeState(
        tokens=zeros(slots),
        cache=init_cache(target.config, rows, slots, decoder.dtype, drafter.cache, pages),
        own=drafter.empty(decoder, rows),
        root=zeros(),
        speculates=jnp.ones(rows, bool),
        done=jnp.ones(rows, bool),
        limits=zeros(),
        stop_tokens=zeros(stop_width),
        sampling=Sampling(numbers, zeros(), numbers, numbers, zeros()),
    )


@partial(jax.jit, donate_argnames="state")
@per_shard
def write_texts(
    target: Target, state: DecodeState, rows: Int[Array, " G"], texts: Int[Array, "G S"]
) -> DecodeState:
    """The state with other tokens in some rows, B for none: those whose cache is shared."""
    del target  # it tells the mesh
    return state._replace(tokens=state.tokens.at[rows].set(texts, mode="drop"))


@partial(jax.jit, donate_argnames="state", static_argnames="top")
@per_shard
def read_rows(
    target: Target, drafter: Drafter, state: DecodeState, chunk: Chunk, *, top: int | None = None
) -> tuple[DecodeState, tuple[Gains, Bool[Array, " G"]]]:
    """One pass over prompts; where it reaches the end of one, the row's first token is chosen.

    Until then a row is done, and its cache holds what has been read.

    Args:
      target: the target model.
      drafter: the drafter, which reads the prompts too.
      state: of B rows, donated.
      chunk: what is read.
      top: M, how many of the most likely tokens are reported of each place; None reports no
        log-probabilities.

    Returns:
      The state; what the G rows gained in this one call, a token or none; which of them have ended.
    """
    rows, begins, is_new, following, speculates, requests = chunk
    B, C = len(state.done), requests.tokens.shape[1]
    live, lengths = rows < B, requests.lengths
    old = state if len(rows) == B else _rows_of(state, rows)
    # A row that reads nothing has no text, as far as the pass goes.
    start, ends = (jnp.where(live, one, 0) for one in (begins, lengths))
    fresh = jnp.concatenate([requests.tokens, following[:, None]], axis=1)
    decoder = target.merge()
    # What the request before it left is another text's.
    own = _choose(live & is_new, drafter.empty(decoder, len(rows)), old.own)
    read = read_chunk(
        decoder,
        drafter,
        own,
        old.cache._replace(lengths=start),
        fresh,
        ends,
        requests.sampling,
    )
    finished = live & (begins + C >= lengths)
    stops = is_stop(read.root[:, None], requests.stop_tokens)[:, 0]
    done = stops | (lengths + 1 >= requests.limits)

    places = jnp.arange(len(rows))[:, None], start[:, None] + jnp.arange(C)
    kept = old.tokens.at[places].get(mode="fill", fill_value=0)
    written = jnp.where(live[:, None], requests.tokens, kept)
    tokens = old.tokens.at[places].set(written, mode="drop", unique_indices=True)
    at_end = jnp.where(finished, lengths, tokens.shape[1])
    tokens = tokens.at[jnp.arange(len(rows)), at_end].set(read.root, mode="drop")
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
    gains = _gains(
        read.root[:, None],
        read.logits,
        finished.astype(jnp.int32),
        jnp.full((len(rows), 1), -1),
        nothing,
        target.config.vocab_size,
        top,
    )
    if len(rows) == B:
        small = {name: getattr(new, name) for name in _SMALL}
        kept = {name: getattr(old, name) for name in _SMALL}
        state = new._replace(**_choose(live, small, kept))
    else:
        state = _put_rows(state, new, rows)
    return state, (jax.tree.map(lambda leaf: leaf[:, None], gains), finished & done)


# What a row that reads nothing keeps as it is; its tokens and its cache are not written.
_SMALL = ("root", "speculates", "done", "limits", "stop_tokens", "sampling", "own")


@partial(jax.jit, donate_argnames="state", static_argnames=("tree", "steps", "top"))
@per_shard
def decode_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    rows: Int[Array, " G"],
    most: Int[Array, ""] | int,
    *,
    tree: TreeConfig | None,
    steps: int,
    top: int | None = None,
) -> tuple[DecodeState, tuple[Gains, Bool[Array, " G"]]]:
    """Decode steps of some rows, as a batch of G, until all are done; the others do not change.

    Where no row is asked for, all steps are taken, to be timed.

    Args:
      target: the target model.
      drafter: the drafter, which reads what is decided, whatever the tree.
      state: of B rows, donated.
      rows: which rows, B for none. Where G is B, row i or none is at place i.
      most: steps at most, X or fewer.
      tree: the shape of the trees; None is the root alone.
      steps: X, steps for which there is room in what is returned.
      top: as in `read_rows`.

    Returns:
      The state; what the G rows gained in each of X calls; which of them have ended.
    """
    B, V = len(state.done), target.config.vocab_size
    all_rows = len(rows) == B
    batch = state if all_rows else _rows_of(state, rows)
    idle = rows >= B
    kept = batch.done
    batch = batch._replace(done=kept | idle)
    decoder = target.merge()

    def step(batch: DecodeState) -> tuple[DecodeState, Gains]:
        active = ~batch.done
        batch, trace, verified = verified_step(decoder, drafter, batch, tree)
        return batch, gains_of(trace, verified, active, V, top)

    batch, gains = _loop(step, batch, most, steps, idle.all())
    done = batch.done
    batch = batch._replace(done=jnp.where(idle, kept, done))
    return batch if all_rows else _put_rows(state, batch, rows), (gains, done)


def _loop(
    step: Callable[[DecodeState], tuple[DecodeState, Gains]],
    state: DecodeState,
    most: Int[Array, ""] | int,
    steps: int,
    rehearsed: Bool[Array, ""],
) -> tuple[DecodeState, Gains]:
    """Up to `most` of X steps while a row is not done, and the gains of all X, zero past the end.

    All of them if it is `rehearsed`.
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


def gains_of(
    trace: StepTrace,
    verified: Verified,
    active: Bool[Array, " G"],
    vocab_size: int,
    top: int | None,
) -> Gains:
    """`Gains` of a step, in which some rows were active."""
    path = trace.accepted.path
    places = jnp.arange(path.shape[1])
    tokens = jnp.take_along_axis(trace.chosen, path, axis=1)
    # The choice at a node is the token of the next node on the path, which somebody proposed;
    # the last choice is the target's bonus.
    origins = jnp.take_along_axis(trace.tree.origin, jnp.roll(path, -1, axis=1), axis=1)
    origins = jnp.where(places < trace.gained[:, None] - 1, origins, -1)
    by = trace.tree.origin[..., None] == jnp.arange(len(SOURCES))
    drafted = (by & active[:, None, None]).sum(axis=1, dtype=jnp.int32)
    logits = None
    if top is not None:
        logits = jnp.take_along_axis(verified.logits, path[..., None], axis=1)
    return _gains(tokens, logits, trace.gained, origins, drafted, vocab_size, top)


def _gains(
    tokens: Int[Array, "G P"],
    logits: Float[Array, "G P part"] | None,
    counts: Int[Array, " G"],
    origins: Int[Array, "G P"],
    drafted: Int[Array, "G O"],
    vocab_size: int,
    top: int | None,
) -> Gains:
    """`Gains` of one call."""
    scores = None
    if top is not None and logits is not None:
        whole = all_gather(logits, vocab_size)
        top_logits, top_tokens = jax.lax.top_k(whole, top)
        top_log_probs = top_logits - jax.nn.logsumexp(whole, axis=-1, keepdims=True)
        scores = Scores(log_probs_of(whole, tokens), top_tokens, top_log_probs)
    return Gains(counts, tokens, origins, drafted, scores)


def _choose(on: Bool[Array, " G"], new: Tree, old: Tree) -> Tree:
    """Rows of one tree of arrays or of the other."""

    def choose(new: Shaped[Array, "G ..."], old: Shaped[Array, "G ..."]) -> Array:
        return jnp.where(on.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)


def _rows_of(state: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """The state of these rows, in the pages of all; a number past the last stands for the last."""
    # A barrier: XLA for CPUs would gather where they are read, and so copy all rows before a write.
    picked = jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[rows], _by_row(state)))
    return state._replace(**picked, cache=rows_of(state.cache, rows))


def _put_rows(state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """The state with these rows in place of some of its own; B and above for none."""

    def put(ours: Shaped[Array, "B ..."], new: Shaped[Array, "G ..."]) -> Shaped[Array, "B ..."]:
        return ours.at[rows].set(new, mode="drop")

    written = jax.tree.map(put, _by_row(state), _by_row(fresh))
    return state._replace(**written, cache=put_rows(state.cache, fresh.cache, rows))


def _by_row(state: DecodeState) -> dict[str, Any]:
    """All but the cache."""
    return {name: part for name, part in state._asdict().items() if name != "cache"}
