"""Collectives between the shards of a program in `mesh.per_shard`; no-ops without a mesh.

The functions recognise a shard by its size: an axis that is shorter than the whole axis is a shard.
A `model` group is a set of devices along the mesh axis `model`; they hold the same shard of the
batch.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int, Shaped

# The mesh axis over which heads, the feed-forward width and the vocabulary are split.
MODEL = "model"


def all_reduce(
    x: Shaped[Array, "..."], by: Callable[..., Any] = jax.lax.psum
) -> Shaped[Array, "..."]:
    """Sum x over the devices of a `model` group, or reduce x by `jax.lax.pmax` or `pmin`."""
    return by(x, MODEL) if has_others() else x


def all_gather(x: Shaped[Array, "... part"], size: int) -> Shaped[Array, "... whole"]:
    """Gather the last axis to the length `size`; an axis of this length is returned unchanged."""
    if x.shape[-1] == size:
        return x
    return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


def own_shard(x: Shaped[Array, "... whole"], size: int) -> Shaped[Array, "... part"]:
    """Return this device's shard of the last axis; `size` is the length of the shard."""
    if x.shape[-1] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, shard_start(size, x.shape[-1]), size, axis=-1)


def shard_size(whole: int) -> int:
    """Return the length of this device's shard of an axis of length `whole`.

    An axis that the devices do not divide stays whole.
    """
    parts = jax.sharding.get_abstract_mesh().shape[MODEL] if in_shard() else 1
    return whole if whole % parts else whole // parts


def shard_start(size: int, whole: int) -> Int[Array, ""] | int:
    """Return the start of this device's shard of length `size` in an axis of length `whole`."""
    return 0 if size == whole else jax.lax.axis_index(MODEL) * size


def has_others() -> bool:
    """Whether the `model` group of this device has other devices."""
    return in_shard() and jax.sharding.get_abstract_mesh().shape[MODEL] > 1


def in_shard() -> bool:
    """Whether the current trace is for one shard, within `mesh.per_shard`."""
    return MODEL in jax.sharding.get_abstract_mesh().manual_axes
