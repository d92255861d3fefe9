"""What a pair of decodings is judged by: pure functions of arrays and token lists."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Spread(NamedTuple):
    """Median and quartiles of repeated measurements."""

    lower: float
    median: float
    upper: float


def first_divergence(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first new token that differs or is missing; None for equal texts."""
    for index, (ours, theirs) in enumerate(zip_longest(tokens, expected)):
        if ours != theirs:
            return index
    return None


def identical_fraction(divergences: Sequence[int | None]) -> float:
    """Share of texts without a first divergence; there must be at least one text."""
    return sum(divergence is None for divergence in divergences) / len(divergences)


def spread(values: Float[np.ndarray, " n"]) -> Spread | None:
    """Median and quartiles of the values that are numbers; None if there are none."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return None
    return Spread(*(float(value) for value in np.quantile(known, (0.25, 0.5, 0.75))))


def rates(
    amounts: Int[np.ndarray, " n"], seconds: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Amounts per second; NaN where there was nothing to do."""
    unknown = np.full(len(amounts), np.nan)
    return np.divide(amounts, seconds, out=unknown, where=amounts > 0)
