"""The key-value cache: made once, written in place, rolled back by its lengths."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.parallel.collectives import shard_size
from redrafter_jax.types import KVCache


def init_cache(config: TargetConfig, batch: int, slots: int, dtype: DTypeLike) -> KVCache:
    """An empty cache of S slots per row; on a mesh, this device's part of it.

    A decode step writes P slots from `lengths` on, finished rows included, and the token buffer
    of the same S one further, so a row that may decide n tokens needs `n + P` slots.
    """
    shape = (batch, shard_size(config.num_key_value_heads), slots, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        lengths=jnp.zeros(batch, jnp.int32),
    )


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

    def write(slots: Float[Array, "B K S H"], fresh: Float[Array, "B T K H"]) -> Array:
        write_row = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        return jax.vmap(write_row)(slots, fresh.transpose(0, 2, 1, 3), cache.lengths)

    return KVCache(
        keys=tuple(map(write, cache.keys, keys)),
        values=tuple(map(write, cache.values, values)),
        lengths=cache.lengths + count,
    )


def commit(
    cache: KVCache,
    keys: tuple[Float[Array, "B N K H"], ...],
    values: tuple[Float[Array, "B N K H"], ...],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> KVCache:
    """Append the first `count` nodes of every row's accepted path and forget all other nodes."""

    def pick(nodes: Float[Array, "B N K H"]) -> Float[Array, "B P K H"]:
        return jnp.take_along_axis(nodes, path[:, :, None, None], axis=1)

    return append(cache, tuple(map(pick, keys)), tuple(map(pick, values)), count)
