"""The paged key-value cache, which is allocated once and written in place.

To drop tokens, it is enough to lower `lengths`: later tokens overwrite the dropped entries.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.models.attention import PAGE, write_rows
from redrafter_jax.parallel.collectives import shard_size
from redrafter_jax.types import CacheShape, KVCache


def init_cache(
    config: TargetConfig,
    batch: int,
    slots: int,
    dtype: DTypeLike,
    own: CacheShape | None = None,
    pages: int | None = None,
) -> KVCache:
    """Create an empty cache; on a mesh, this device's shard of it.

    Args:
      config: configuration of the target.
      batch: B, number of rows.
      slots: S, maximum number of tokens of a row.
      dtype: dtype of keys and values.
      own: shape of the drafter's own layers, which follow the target's layers; None for no layers.
      pages: number of pages. None allocates M pages for the S slots of each row, and row b has the
        pages from b M to (b + 1) M - 1.
    """
    target = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    table = own_pages(batch, slots)
    pages = table.size if pages is None else pages

    def zeros() -> tuple[Float[Array, "pages K page H"], ...]:
        return tuple(
            jnp.zeros((pages, shard_size(shape.heads), PAGE, shape.head_dim), dtype)
            for shape in (target, own or CacheShape(0, 0, 0))
            for _ in range(shape.layers)
        )

    return KVCache(zeros(), zeros(), table, jnp.zeros(batch, jnp.int32))


def own_pages(batch: int, slots: int) -> Int[Array, "B M"]:
    """Return the page table of B rows of S slots; each row has its own M pages."""
    M = -(-slots // PAGE)
    return jnp.arange(batch * M).reshape(batch, M)


def split_layers(cache: KVCache, count: int) -> tuple[KVCache, KVCache]:
    """Split the cache into the target's layers, the first `count`, and the drafter's own layers."""
    own = cache._replace(keys=cache.keys[count:], values=cache.values[count:])
    return first_layers(cache, count), own


def first_layers(cache: KVCache, count: int) -> KVCache:
    """Return the first layers of a cache."""
    return cache._replace(keys=cache.keys[:count], values=cache.values[:count])


def join_layers(target: KVCache, own: KVCache) -> KVCache:
    """Join the target's layers and the drafter's own layers, with the target's lengths."""
    return target._replace(keys=target.keys + own.keys, values=target.values + own.values)


def append(
    cache: KVCache,
    keys: tuple[Float[Array, "B T K H"], ...],
    values: tuple[Float[Array, "B T K H"], ...],
    count: Int[Array, " B"],
) -> KVCache:
    """Write the first `count` of T tokens after the cached tokens of every row.

    The remaining tokens are not written, so rows need no room for them. Entries are cast to the
    dtype of the cache, which is the target's; a drafter may have another.
    """
    (B, T), pages = keys[0].shape[:2], len(cache.keys[0])
    places = jnp.arange(T)
    at = cache.lengths[:, None] + places
    own = jnp.take_along_axis(cache.table, at // PAGE, axis=1, mode="clip")
    # Distinct page numbers past the last page are dropped.
    none = pages + jnp.arange(B * T).reshape(B, T)
    page = jnp.where(places < count[:, None], own, none)

    entries = tuple(one.astype(cache.keys[0].dtype) for one in keys + values)
    written = write_rows(cache.keys + cache.values, entries, page, at % PAGE)
    L = len(keys)
    return cache._replace(
        keys=written[:L],
        values=written[L:],
        lengths=cache.lengths + count,
    )


def commit(
    cache: KVCache,
    keys: tuple[Float[Array, "B N K H"], ...],
    values: tuple[Float[Array, "B N K H"], ...],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> KVCache:
    """Append the first `count` nodes of every row's accepted path, and drop all other nodes.

    A path begins at node 0, and `path` holds a valid node at every index, also past `count`.
    """

    def pick(nodes: Float[Array, "B N K H"]) -> Float[Array, "B P K H"]:
        if path.shape[1] == 1:
            return nodes[:, :1]
        return jnp.take_along_axis(nodes, path[:, :, None, None], axis=1, mode="promise_in_bounds")

    return append(cache, tuple(map(pick, keys)), tuple(map(pick, values)), count)


def rows_of(cache: KVCache, rows: Int[Array, " G"]) -> KVCache:
    """Return the cache of some rows; an index past the last row takes the last row.

    The pages are not copied: both caches share them.
    """
    return cache._replace(table=cache.table[rows], lengths=cache.lengths[rows])


def put_rows(cache: KVCache, fresh: KVCache, rows: Int[Array, " G"]) -> KVCache:
    """Return the cache after its rows from `rows_of` have been written, as `fresh`.

    An index of B or above, past the last row, is ignored.
    """
    lengths = cache.lengths.at[rows].set(fresh.lengths, mode="drop")
    return fresh._replace(table=cache.table, lengths=lengths)


def slots_of(
    layer: Float[Array, "pages K page H"], table: Int[Array, "B M"]
) -> Float[Array, "B K S H"]:
    """Gather all S = M * PAGE slots of every row in one layer, in the order of the text."""
    B, M = table.shape
    _, K, _, H = layer.shape
    return layer[table].transpose(0, 2, 1, 3, 4).reshape(B, K, M * PAGE, H)
