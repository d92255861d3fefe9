"""The key-value cache: made once, written in place, rolled back by its lengths."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.parallel.collectives import shard_size
from redrafter_jax.types import CacheShape, KVCache


def init_cache(
    config: TargetConfig, batch: int, slots: int, dtype: DTypeLike, own: CacheShape | None = None
) -> KVCache:
    """An empty cache of S slots per row; on a mesh, this device's part of it.

    A decode step writes P slots from `lengths` on, finished rows included, and the token buffer
    of the same S one further, so a row that may decide n tokens needs `n + P` slots.

    Args:
      config: of the target.
      batch: B.
      slots: S.
      dtype: of the keys and values.
      own: the drafter's own layers, which come after the target's.
    """
    target = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def zeros() -> tuple[Float[Array, "B K S H"], ...]:
        return tuple(
            jnp.zeros((batch, shard_size(shape.heads), slots, shape.head_dim), dtype)
            for shape in (target, own or CacheShape(0, 0, 0))
            for _ in range(shape.layers)
        )

    return KVCache(zeros(), zeros(), jnp.zeros(batch, jnp.int32))


def split_layers(cache: KVCache, config: TargetConfig) -> tuple[KVCache, KVCache]:
    """The target's layers, and the drafter's own."""
    L = config.num_hidden_layers
    return (
        cache._replace(keys=cache.keys[:L], values=cache.values[:L]),
        cache._replace(keys=cache.keys[L:], values=cache.values[L:]),
    )


def first_layers(cache: KVCache, count: int) -> KVCache:
    """The first layers of a cache."""
    return cache._replace(keys=cache.keys[:count], values=cache.values[:count])


def join_layers(target: KVCache, own: KVCache) -> KVCache:
    """The cache of the target's layers and the drafter's own, with the target's lengths."""
    return target._replace(keys=target.keys + own.keys, values=target.values + own.values)


def append(
    cache: KVCache,
    keys: tuple[Float[Array, "B T K H"], ...],
    values: tuple[Float[Array, "B T K H"], ...],
    count: Int[Array, " B"],
) -> KVCache:
    """Write T tokens behind the cached ones of every row, of which `count` are decided.

    All T slots are written, `lengths` grows by `count`: what lies past it is garbage, as it was
    before. `lengths + T` may not exceed S, or the write would slide down onto decided tokens.
    """
    write = partial(_write, at=cache.lengths)

    return KVCache(
        keys=tuple(map(write, cache.keys, keys)),
        values=tuple(map(write, cache.values, values)),
        lengths=cache.lengths + count,
    )


def extend(
    cache: KVCache,
    keys: tuple[Float[Array, "B T K H"], ...],
    values: tuple[Float[Array, "B T K H"], ...],
    count: Int[Array, " B"],
) -> KVCache:
    """`append` that writes nothing in rows of count 0, which need no room for it."""

    def write(slots: Float[Array, "B K S H"], fresh: Float[Array, "B T K H"]) -> Array:
        read_row = partial(jax.lax.dynamic_slice_in_dim, slice_size=fresh.shape[1], axis=1)
        kept = jax.vmap(read_row)(slots, cache.lengths).transpose(0, 2, 1, 3)
        written = jnp.where(count[:, None, None, None] > 0, fresh, kept)
        return _write(slots, written, cache.lengths)

    return KVCache(
        keys=tuple(map(write, cache.keys, keys)),
        values=tuple(map(write, cache.values, values)),
        lengths=cache.lengths + count,
    )


def _write(
    slots: Float[Array, "B K S H"], fresh: Float[Array, "B T K H"], at: Int[Array, " B"]
) -> Float[Array, "B K S H"]:
    write_row = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    rows = fresh.transpose(0, 2, 1, 3)
    if len(slots) == 1:
        # XLA for GPUs would check the bounds of a batch's writes in a kernel before.
        return write_row(slots[0], rows[0], at[0])[None]
    return jax.vmap(write_row)(slots, rows, at)


def commit(
    cache: KVCache,
    keys: tuple[Float[Array, "B N K H"], ...],
    values: tuple[Float[Array, "B N K H"], ...],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> KVCache:
    """Append the first `count` nodes of every row's accepted path and forget all other nodes.

    A path begins at node 0, and has a node in every place.
    """

    def pick(nodes: Float[Array, "B N K H"]) -> Float[Array, "B P K H"]:
        if path.shape[1] == 1:
            return nodes[:, :1]
        return jnp.take_along_axis(nodes, path[:, :, None, None], axis=1, mode="promise_in_bounds")

    return append(cache, tuple(map(pick, keys)), tuple(map(pick, values)), count)
