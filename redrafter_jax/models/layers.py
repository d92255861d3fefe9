"""The small functions that a decoder layer is made of."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"],
    epsilon: float,
    *,
    zero_centered: bool = False,
) -> Float[Array, "... D"]:
    """Root-mean-square normalisation in float32, returned in x's dtype (arXiv 1910.07467).

    Args:
      x: what is normalised along its last axis.
      weight: factor of each feature, in x's dtype.
      epsilon: added to the mean of the squares.
      zero_centered: multiply by one plus the weight, before the result is cast to x's dtype.
    """
    wide = x.astype(jnp.float32)
    normalised = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    if zero_centered:
        return (normalised * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return normalised.astype(x.dtype) * weight


def rotary_angles(
    positions: Int[Array, "B T"],
    frequencies: Float[np.ndarray, " half"],
    gain: float | None = None,
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Cosine and sine, float32, of the rotation of each position (arXiv 2104.09864, eq. 34).

    Args:
      positions: of the tokens.
      frequencies: from `redrafter_jax.models.rotary.rotary_frequencies`.
      gain: factor on both; None for 1.
    """
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if gain is not None:
        cosine, sine = gain * cosine, gain * sine
    # The barrier keeps XLA from computing them again inside every layer.
    return jax.lax.optimization_barrier((cosine, sine))


def rotate(
    x: Float[Array, "B T heads H"],
    cosine: Float[Array, "B T 1 half"],
    sine: Float[Array, "B T 1 half"],
) -> Float[Array, "B T heads H"]:
    """Rotary embedding with the halves of the head paired, as Hugging Face stores its weights."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
