"""The rotary embedding: frequencies, their scaling for long contexts, and the rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """Return the float32 frequencies of a head's pairs of dimensions, highest first.

    The unit is radians per position. The frequencies are computed in float64 and outside of
    tracing, because they are constants of a checkpoint.
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    match scaling:
        case LinearScaling(factor):
            scaled = plain / factor
        case Llama3Scaling():
            scaled = _blend(plain, scaling.factor, _llama3_kept(plain, scaling))
        case YarnScaling():
            scaled = _blend(plain, scaling.factor, _yarn_kept(head_dim, theta, scaling))
        case LongRopeScaling(factors):
            scaled = plain / np.asarray(factors)
        case DynamicScaling() | None:
            scaled = plain
    return scaled.astype(np.float32)


def positions_in(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return each token's position in its sequence, from 0.

    `segments` holds the number of each token's sequence; the tokens of a sequence are adjacent.
    """
    places = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    begins = jnp.diff(segments, axis=1, prepend=-1) != 0
    return places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def rotary_angles(
    positions: Int[Array, "B T"],
    frequencies: Float[np.ndarray, " half"],
    gain: float | None = None,
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Return the float32 cosine and sine of the angles at each position (arXiv 2104.09864, eq. 34).

    `gain` is a factor on both; None is 1.
    """
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if gain is not None:
        cosine, sine = gain * cosine, gain * sine
    # Barrier: XLA would otherwise compute the angles again in every layer.
    return jax.lax.optimization_barrier((cosine, sine))


def rotate(
    x: Float[Array, "... H"], cosine: Float[Array, "... half"], sine: Float[Array, "... half"]
) -> Float[Array, "... H"]:
    """Apply the rotary embedding to the pairs of dimensions i and i + H/2 of each head.

    Hugging Face's weights have the same order of dimensions.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _blend(
    plain: Float[np.ndarray, " half"], factor: float, kept: Float[np.ndarray, " half"]
) -> Float[np.ndarray, " half"]:
    """Divide frequencies by `factor`, except for the fraction `kept` of each frequency."""
    return plain * kept + plain / factor * (1 - kept)


def _llama3_kept(
    plain: Float[np.ndarray, " half"], scaling: Llama3Scaling
) -> Float[np.ndarray, " half"]:
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return np.clip((turns - scaling.low_freq_factor) / span, 0, 1)


def _yarn_kept(head_dim: int, theta: float, scaling: YarnScaling) -> Float[np.ndarray, " half"]:
    def pair_with(turns: float) -> float:
        """Return the fractional index of the pair with `turns` turns in the original context."""
        positions_per_radian = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # transformers uses this width if the ramp would be empty.
    width = last - first or 1e-3
    return 1 - np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)
