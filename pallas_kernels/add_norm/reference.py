"""The specification in jnp, for other platforms and as the oracle of the kernel's tests."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def reference(
    x: Float[Array, "rows D"],
    parts: Float[Array, "splits rows D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float,
    zero_centered: bool = False,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Implement `pallas_kernels.add_norm.add_norm`."""
    added = x + parts.sum(axis=0).astype(x.dtype)
    wide = added.astype(jnp.float32)
    mean = jnp.mean(wide**2, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(mean + epsilon)
    if zero_centered:
        return added, (scaled * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return added, scaled.astype(x.dtype) * weight
