"""Models of a given shape with random weights: what they say means nothing, what they cost does.

Each weight is drawn in its own dtype, so no float32 copy of a large model is ever held.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from redrafter_jax.config import DrafterConfig, TargetConfig
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target

from .abstract import abstract_drafter, abstract_target


def random_target(config: TargetConfig, dtype: DTypeLike) -> Target:
    """A target that knows nothing."""
    return _draw_all(abstract_target(config, dtype), 0)


def random_drafter(config: DrafterConfig, dtype: DTypeLike) -> DraftModel:
    """A drafter that knows nothing."""
    return _draw_all(abstract_drafter(config, dtype), 1)


def _draw_all(model: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [_draw(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "..."]:
    """Activations keep their size: a matrix divides by its inputs' number, a vector is 1."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)
