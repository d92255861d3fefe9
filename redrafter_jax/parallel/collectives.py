"""Exchanges between the parts of a mesh within a program; without a mesh they do nothing.

`mesh.per_shard` runs a program so. A part is known by its size: an axis that is shorter than it
should be is this device's part of it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int, Shaped

# The axis of a mesh over which heads, the feed-forward width and the vocabulary are split.
MODEL = "model"


def all_reduce(
    x: Shaped[Array, "..."], by: Callable[..., Any] = jax.lax.psum
) -> Shaped[Array, "..."]:
    """The sum, or `jax.lax.pmax` or `pmin`, of what the devices of a `model` group hold."""
    return by(x, MODEL) if _has_others() else x


def all_gather(x: Shaped[Array, "... part"], size: int) -> Shaped[Array, "... whole"]:
    """The whole last axis, of the given size; the array itself if it is whole already."""
    if x.shape[-1] == size:
        return x
    return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


def own_shard(x: Shaped[Array, "... whole"], size: int) -> Shaped[Array, "... part"]:
    """This device's part, of the given size, of a last axis that is whole."""
    if x.shape[-1] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, shard_start(size, x.shape[-1]), size, axis=-1)


def shard_size(whole: int) -> int:
    """Size of what this device holds of an axis: a part, or all if the mesh does not divide it."""
    parts = jax.sharding.get_abstract_mesh().shape[MODEL] if in_shard() else 1
    return whole if whole % parts else whole // parts


def shard_start(size: int, whole: int) -> Int[Array, ""] | int:
    """Index at which this device's part, of the given size, begins in an axis."""
    return 0 if size == whole else jax.lax.axis_index(MODEL) * size


def _has_others() -> bool:
    """Whether a part shares its model with others."""
    return in_shard() and jax.sharding.get_abstract_mesh().shape[MODEL] > 1


def in_shard() -> bool:
    """Whether the program is traced for one part of the mesh, within `mesh.per_shard`."""
    return MODEL in jax.sharding.get_abstract_mesh().manual_axes
