"""Models and decode states of random numbers, whose time is that of real ones."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from redrafter_jax.config import DrafterConfig, MedusaConfig, TargetConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState

from .abstract import abstract_drafter, abstract_state, abstract_target

Tree = TypeVar("Tree")


def random_target(config: TargetConfig, dtype: DTypeLike) -> Target:
    """A target of random weights: its text means nothing, its time is that of a real one."""
    return _draw_all(abstract_target(config, dtype), 0, _draw_weight)


def random_drafter(config: DrafterConfig | MedusaConfig, dtype: DTypeLike) -> DraftModel:
    """A drafter of random weights."""
    return _draw_all(abstract_drafter(config, dtype), 1, _draw_weight)


def random_state(target: Target, drafter: Drafter, batch_size: int, slots: int) -> DecodeState:
    """A greedy state whose cache is random, as is the drafter's own, and whose rows never end.

    Args:
      target: any of its shape, abstract or not.
      drafter: from `bind_drafter`.
      batch_size: B.
      slots: S, cache slots per row.
    """

    def draw(key: Array, leaf: Any) -> Array:
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.random.normal(key, leaf.shape, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    state = _draw_all(abstract_state(target, drafter, batch_size, slots), 2, draw)
    return state._replace(
        limits=jnp.full_like(state.limits, jnp.iinfo(jnp.int32).max),
        stop_tokens=jnp.full_like(state.stop_tokens, -1),
    )


def _draw_all(shapes: Tree, seed: int, draw: Callable[[Array, Any], Array]) -> Tree:
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, list(map(draw, keys, leaves)))


def _draw_weight(key: Array, leaf: Any) -> Array:
    return _draw(key, leaf.shape, leaf.dtype)


# Each weight is drawn in its own dtype: no float32 copy of a large model is ever held.
@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "..."]:
    """Activations keep their size: a matrix divides by the root of its inputs, a vector is 1."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)
