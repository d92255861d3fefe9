"""Models and decode states without files: abstract shapes, or random arrays.

Abstract shapes are `jax.ShapeDtypeStruct`s, for compiling programs and counting bytes. With random
arrays, programs take the same time as with real weights.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from redrafter_jax.config import TargetConfig, WeightFormat
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.drafters.kinds import init_drafter
from redrafter_jax.engine.state import row_shapes
from redrafter_jax.models.cache import own_pages
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.parallel.mesh import shardings
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import DecodeState

Tree = TypeVar("Tree")
AnyModel = TypeVar("AnyModel", bound=Model[Any, Any])


def abstract_target(
    config: TargetConfig, dtype: DTypeLike, form: WeightFormat | None = None
) -> Target:
    """Make a target with abstract parameters.

    `form` is the format of its quantized matrices; with None, they are not quantized.
    """
    return _abstract(lambda: init_target(config, 0), dtype, form)


def abstract_drafter(
    config: HeadConfig, dtype: DTypeLike, form: WeightFormat | None = None
) -> LoadedHead:
    """Make a drafter with abstract parameters.

    `form` is the format of its quantized matrices; with None, they are not quantized.
    """
    return _abstract(lambda: init_drafter(config, 0), dtype, form)


def _abstract(
    init: Callable[[], AnyModel], dtype: DTypeLike, form: WeightFormat | None
) -> AnyModel:
    model = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), jax.eval_shape(init))
    if form is None:
        return model
    return jax.eval_shape(partial(quantize_model, quantization=Quantization.of(form)), model)


def abstract_state(target: Target, drafter: Drafter, batch_size: int, slots: int) -> DecodeState:
    """Make the abstract shapes of the decode state that `decode_rows` takes.

    Args:
      target: the target, from `abstract_target`.
      drafter: the drafter, from `as_drafter`.
      batch_size: B, number of rows.
      slots: S, number of cache slots per row.
    """
    return row_shapes(target, drafter, batch_size, slots, 8)


def on_mesh(tree: Tree, mesh: Mesh) -> Tree:
    """Add to abstract shapes the shardings that decoding on a mesh uses."""

    def split(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed: Any = jax.tree.map(split, tree, shardings(tree, mesh))
    if isinstance(placed, Model):
        placed = replace(placed, mesh=mesh)
    return placed


def bytes_of(tree: object) -> int:
    """Return the bytes of all arrays of a pytree; for sharded arrays, the bytes per device.

    The arrays may be abstract.
    """

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return -(-math.prod(shape) * item_bits(leaf) // 8)

    return sum(map(size, jax.tree.leaves(tree)))


def item_bits(leaf: Any) -> int:
    """Return the number of bits of an element on a device; two int4 elements share a byte."""
    return 4 if leaf.dtype == jnp.int4 else 8 * leaf.dtype.itemsize


def random_weights(model: AnyModel) -> AnyModel:
    """Fill an abstract model with random weights."""
    return _draw_all(model, 0, lambda key, leaf: _draw(key, leaf.shape, leaf.dtype))


def random_state(target: Target, drafter: Drafter, batch_size: int, slots: int) -> DecodeState:
    """Make a greedy decode state with a random cache; its rows never end.

    The arguments are those of `abstract_state`.
    """

    def draw(key: Array, leaf: Any) -> Array:
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.random.normal(key, leaf.shape, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    state = _draw_all(abstract_state(target, drafter, batch_size, slots), 2, draw)
    return state._replace(
        cache=state.cache._replace(table=own_pages(batch_size, slots)),
        limits=jnp.full_like(state.limits, jnp.iinfo(jnp.int32).max),
        stop_tokens=jnp.full_like(state.stop_tokens, -1),
    )


def _draw_all(shapes: Tree, seed: int, draw: Callable[[Array, Any], Array]) -> Tree:
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, list(map(draw, keys, leaves)))


# Draw each weight in its own dtype, so that no float32 copy of a large model exists.
@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "..."]:
    """Draw a weight that preserves the scale of activations; a vector is all ones."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)
