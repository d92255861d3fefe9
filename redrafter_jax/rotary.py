"""Frequencies of rotary embedding, and the ways in which checkpoints stretch them."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from redrafter_jax.errors import InputError


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the text once it is longer than `max_position_embeddings`.

    Up to there the frequencies are the plain ones, and no longer text is taken: past it a token's
    keys depend on how long the text was when they were computed, so that one text has as many
    answers as there are ways to cut it into calls.
    """

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between (Llama 3.1).

    Attributes:
      factor: divides the slow frequencies.
      low_freq_factor: turns within the original context below which a frequency is slow.
      high_freq_factor: turns above which it is fast.
      original_max_position_embeddings: the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                f"Llama3Scaling.high_freq_factor is {self.high_freq_factor}; it must be greater "
                f"than low_freq_factor={self.low_freq_factor}."
            )


@dataclass(frozen=True)
class YarnScaling:
    """As Llama 3.1's, but the ramp is over dimensions, and scores are sharpened (arXiv 2309.00071).

    Attributes:
      factor: divides the slow frequencies.
      original_max_position_embeddings: the original context.
      attention_factor: multiplies cosine and sine, so that scores grow by its square.
      beta_fast: turns within the original context above which a frequency is kept.
      beta_slow: turns below which it is divided by the whole factor.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        if self.beta_fast <= self.beta_slow:
            raise InputError(
                f"YarnScaling.beta_fast is {self.beta_fast}; it must be greater than "
                f"beta_slow={self.beta_slow}."
            )


RopeScaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """Radians per position of each pair of the head, float32, the fastest first.

    Worked out in float64 before anything is traced: they are constants of a checkpoint.
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    match scaling:
        case LinearScaling(factor):
            scaled = plain / factor
        case Llama3Scaling():
            scaled = _blend(plain, scaling.factor, _llama3_kept(plain, scaling))
        case YarnScaling():
            scaled = _blend(plain, scaling.factor, _yarn_kept(head_dim, theta, scaling))
        case DynamicScaling() | None:
            scaled = plain
    return scaled.astype(np.float32)


def _blend(
    plain: Float[np.ndarray, " half"], factor: float, kept: Float[np.ndarray, " half"]
) -> Float[np.ndarray, " half"]:
    """Frequencies of which the share `kept` stays as it is and the rest is divided by `factor`."""
    return plain * kept + plain / factor * (1 - kept)


def _llama3_kept(
    plain: Float[np.ndarray, " half"], scaling: Llama3Scaling
) -> Float[np.ndarray, " half"]:
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return np.clip((turns - scaling.low_freq_factor) / span, 0, 1)


def _yarn_kept(head_dim: int, theta: float, scaling: YarnScaling) -> Float[np.ndarray, " half"]:
    def pair_with(turns: float) -> float:
        """Where along the head a frequency makes so many turns in the original context."""
        positions_per_radian = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), head_dim - 1)
    # transformers' width of a ramp that would have none.
    width = last - first or 1e-3
    return 1 - np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)
