"""The decode state of B rows: creation, size in bytes, and access to some of the rows."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from redrafter_jax.drafters.base import Drafter
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.cache import init_cache, put_rows, rows_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards, shardings
from redrafter_jax.types import DecodeState, Sampling


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
        With None and without a mesh, every row has its own pages. Otherwise the caller must set the
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
    """Return the shapes and dtypes of the state that `empty_rows` creates.

    The models may hold `jax.ShapeDtypeStruct`s instead of arrays.
    """
    make = partial(_empty, rows=rows, slots=slots, stop_width=stop_width, pages=pages)
    return jax.eval_shape(make, target, drafter)


def page_bytes(target: Target, drafter: Drafter) -> int:
    """Return the bytes that one cache page takes on one device, in all layers of both models."""
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


def take_rows(state: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """Gather rows of the state; an index past the last row takes the last row.

    The pages of the cache are not copied: both states share them.
    """
    # Barrier: XLA for CPUs would fuse the gather with its readers, and copy all rows before writes.
    picked = jax.lax.optimization_barrier(jax.tree.map(lambda leaf: leaf[rows], _by_row(state)))
    return state._replace(**picked, cache=rows_of(state.cache, rows))


def put_rows_back(state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"]) -> DecodeState:
    """Write the rows `fresh` into the state at indices `rows`; indices from B on are ignored."""

    def put(ours: Shaped[Array, "B ..."], new: Shaped[Array, "G ..."]) -> Shaped[Array, "B ..."]:
        return ours.at[rows].set(new, mode="drop")

    written = jax.tree.map(put, _by_row(state), _by_row(fresh))
    return state._replace(**written, cache=put_rows(state.cache, fresh.cache, rows))


def _by_row(state: DecodeState) -> dict[str, Any]:
    """All fields but the cache."""
    return {name: part for name, part in state._asdict().items() if name != "cache"}
