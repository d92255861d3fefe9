"""The programs that the engine runs on the device, over a decode state of B rows.

The programs know nothing about the queue: the caller says which rows read which tokens, and which
rows decode. The shapes of the arrays depend only on sizes such as B and C, so a new request
compiles nothing. On a mesh, each device numbers the rows of its shard from 0.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.accept import is_stop
from redrafter_jax.decoding.read import read_chunk
from redrafter_jax.decoding.step import verified_step
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.gains import Gains, gains_of, gains_of_step, score_prompt
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.cache import init_cache, put_rows, rows_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards, per_shard, shardings
from redrafter_jax.sampling import adjustment_of, unpack_bits
from redrafter_jax.types import SOURCES, Controls, DecodeState, Requests, Sampling

Tree = TypeVar("Tree")


class Chunk(NamedTuple):
    """The input of one prefill pass: C tokens of the prompts of G rows.

    Attributes:
      rows: row of the state at each place of the pass; B marks an idle place. If G is B, place i is
        row i or idle.
      begins: position of the first token that is read.
      is_new: whether this is the first chunk of the request.
      following: the token after the chunk, if the prompt goes on after it.
      speculates: whether trees are drafted for the row.
      requests: the requests; their `tokens` begin at position `begins`, padded past the end of the
        prompt.
    """

    rows: Int[Array, " G"]
    begins: Int[Array, " G"]
    is_new: Bool[Array, " G"]
    following: Int[Array, " G"]
    speculates: Bool[Array, " G"]
    requests: Requests


def empty_rows(
    target: Target,
    drafter: Drafter,
    rows: int,
    slots: int,
    stop_width: int,
    pages: int | None = None,
) -> DecodeState:
    """Create an empty state of B rows that are all done.

    Args:
      target: the target model.
      drafter: the drafter that will read and propose.
      rows: B, number of rows.
      slots: S, maximum number of tokens of a row.
      stop_width: E, maximum number of stop tokens of a row.
      pages: number of cache pages over all devices along `data`; None allocates S slots per row.
        With None and without a mesh, every row has its own pages; otherwise the caller must set the
        page table.
    """
    if target.mesh is None:
        return _empty(target, drafter, rows=rows, slots=slots, stop_width=stop_width, pages=pages)
    shapes = row_shapes(target, drafter, rows, slots, stop_width, pages)

    def zeros(leaf: Any, sharding: Any) -> Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    # Each device creates its own shard: the whole state may not fit one device.
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
    """Return the shapes of the state that `empty_rows` creates; the models may be shapes too."""
    make = partial(_empty, rows=rows, slots=slots, stop_width=stop_width, pages=pages)
    return jax.eval_shape(make, target, drafter)


def page_bytes(target: Target, drafter: Drafter) -> int:
    """Return the bytes of one cache page on one device, over all layers of target and drafter."""
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
    """Write to some rows the tokens whose keys and values are already in shared cache pages.

    These tokens are not read by a prefill pass, so they must be written here. Where `rows` is B,
    one past the last row, nothing is written.
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
) -> tuple[DecodeState, tuple[Gains, Bool[Array, " G"]]]:
    """Run one prefill pass, and choose the first token of each row whose prompt ends in the chunk.

    A row stays marked as done until its prompt has been read to the end.

    Args:
      target: the target model.
      drafter: the drafter, which also reads the prompts.
      state: decode state of B rows, donated.
      chunk: the tokens to read.
      controls: controls of the G rows; None if no row has any.
      masks: bit masks of the tokens that grammars allow as the first token; None allows all tokens.
      top: M, number of most likely tokens to report per position; None reports no
        log-probabilities.
      prompt_top: number of most likely tokens to report per position of the prompt; None reports no
        log-probabilities of the prompt.

    Returns:
      The state; the gains of the G rows in this one target call, 0 or 1 token each; and which rows
      have ended.
    """
    rows, begins, is_new, following, speculates, requests = chunk
    B, C, V = len(state.done), requests.tokens.shape[1], target.config.vocab_size
    live, lengths = rows < B, requests.lengths
    old = state if len(rows) == B else take_rows(state, rows)
    # In this pass, a row that reads nothing has length 0, so that attention skips it.
    start, ends = (jnp.where(live, one, 0) for one in (begins, lengths))
    fresh = jnp.concatenate([requests.tokens, following[:, None]], axis=1)
    decoder = target.merge()
    # A new request starts with an empty drafter state, not with the previous request's.
    sampling = requests.sampling
    if masks is not None:
        sampling = sampling._replace(allowed=unpack_bits(masks[:, None], V))
    own = _choose(live & is_new, drafter.empty(decoder, len(rows)), old.own)
    places = jnp.arange(len(rows))[:, None], start[:, None] + jnp.arange(C)
    kept = old.tokens.at[places].get(mode="fill", fill_value=0)
    written = jnp.where(live[:, None], requests.tokens, kept)
    tokens = old.tokens.at[places].set(written, mode="drop", unique_indices=True)
    read = read_chunk(
        decoder,
        drafter,
        own,
        old.cache._replace(lengths=start),
        fresh,
        ends,
        _adjusted(sampling, controls, tokens, ends, requests.stop_tokens, V),
    )
    finished = live & (begins + C >= lengths)
    stops = is_stop(read.root[:, None], requests.stop_tokens)[:, 0]
    done = stops | (lengths + 1 >= requests.limits)

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
        scores = score_prompt(decoder, read.hidden, fresh[:, 1:], prompt_top)
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
) -> tuple[DecodeState, tuple[Gains, Bool[Array, " G"]]]:
    """Run decode steps of G rows, until all of them are done or `most` steps have run.

    Other rows do not change. If all places are idle, all `most` steps run; this is for timing.

    Args:
      target: the target model.
      drafter: the drafter; it reads the decided tokens even if `tree` is None.
      state: decode state of B rows, donated.
      rows: row of the state at each place of the batch; B marks an idle place. If G is B, place i
        is row i or idle.
      most: maximum number of steps of this call, at most X.
      controls: controls of the G rows, as in `read_rows`.
      tree: the shape of the trees; with None, a tree is only the root.
      steps: X, number of steps for which the returned arrays have room.
      top: number of most likely tokens to report per position, as in `read_rows`.

    Returns:
      The state; the gains of the G rows in each of X target calls; and which rows have ended.
    """
    B, V = len(state.done), target.config.vocab_size
    all_rows = len(rows) == B
    batch = state if all_rows else take_rows(state, rows)
    idle = rows >= B
    kept = batch.done
    batch = batch._replace(done=kept | idle)
    decoder = target.merge()

    def step(batch: DecodeState) -> tuple[DecodeState, Gains]:
        active, sampling = ~batch.done, batch.sampling
        batch = with_controls(batch, controls, V)
        batch, trace, verified = verified_step(decoder, drafter, batch, tree)
        batch = batch._replace(sampling=sampling)
        return batch, gains_of_step(active, trace, verified, V, top)

    batch, gains = _loop(step, batch, most, steps, idle.all())
    done = batch.done
    batch = batch._replace(done=jnp.where(idle, kept, done))
    return batch if all_rows else put_rows_back(state, batch, rows), (gains, done)


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
    """Set `Sampling.adjustment` from controls and texts of the given lengths."""
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
    """Run up to `most` of X steps until all rows are done; returns the gains of X steps.

    Gains past the last step are zero. If `rehearsed`, the steps run even if all rows are done.
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
    """Select rows from one pytree or the other."""

    def choose(new: Shaped[Array, "G ..."], old: Shaped[Array, "G ..."]) -> Array:
        return jnp.where(on.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)


def take_rows(state: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """Gather rows of the state; an index past the last row takes the last row.

    The pages of the cache are not copied: both states share them.
    """
    # Barrier: XLA for CPUs would fuse the gather with its readers, and copy all rows before writes.
    picked = jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[rows], _by_row(state)))
    return state._replace(**picked, cache=rows_of(state.cache, rows))


def put_rows_back(state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """Scatter rows back into the state; rows of B and above are dropped."""

    def put(ours: Shaped[Array, "B ..."], new: Shaped[Array, "G ..."]) -> Shaped[Array, "B ..."]:
        return ours.at[rows].set(new, mode="drop")

    written = jax.tree.map(put, _by_row(state), _by_row(fresh))
    return state._replace(**written, cache=put_rows(state.cache, fresh.cache, rows))


def _by_row(state: DecodeState) -> dict[str, Any]:
    """All fields but the cache."""
    return {name: part for name, part in state._asdict().items() if name != "cache"}
