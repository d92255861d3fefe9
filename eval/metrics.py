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


def acceptance_length(accept_counts: Int[np.ndarray, "*rows P"]) -> float:
    """Mean tokens gained per target call, bonus token included; 1.0 where there was no call.

    Args:
      accept_counts: entry c - 1 of a row counts the target calls that gained c tokens.
    """
    calls = accept_counts.sum()
    gains = np.arange(1, accept_counts.shape[-1] + 1)
    return float((accept_counts * gains).sum() / calls) if calls else 1.0


def acceptance_rate_per_depth(
    accept_counts: Int[np.ndarray, "*rows P"],
) -> Float[np.ndarray, " R"]:
    """How often the drafter is right at depth 1 to R, given that it was right above.

    A call that gained c tokens accepted nodes down to depth c - 1, so the rate at depth d is the
    share of calls that gained d + 1 tokens or more among those that gained d or more. NaN where no
    call got that far. A row's last call may be cut short by its limit, which counts as rejection.

    Args:
      accept_counts: as in `acceptance_length`; P = R + 1.
    """
    histogram = accept_counts.reshape(-1, accept_counts.shape[-1]).sum(axis=0)
    reached = np.cumsum(histogram[::-1])[::-1].astype(float)
    rates = np.full(len(reached) - 1, np.nan)
    return np.divide(reached[1:], reached[:-1], out=rates, where=reached[:-1] > 0)


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
