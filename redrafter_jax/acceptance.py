"""Measures of drafting and of texts: acceptance length and rate, repetition, early ends."""

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float, Int

# A text repeats itself: minimum number of tokens, and limit on the fraction of distinct 4-grams.
_LOOP_TOKENS, _NGRAM, _DISTINCT = 16, 4, 0.5
# Maximum number of tokens of a text that ends at once, stop token included.
FEW = 4


def acceptance_length(accept_counts: Int[np.ndarray, "*rows P"]) -> float:
    """Return the mean tokens gained per target call, bonus token included; 1.0 without calls.

    Args:
      accept_counts: entry c - 1 of a row is the number of target calls that gained c tokens.
    """
    calls = accept_counts.sum()
    gains = np.arange(1, accept_counts.shape[-1] + 1)
    return float((accept_counts * gains).sum() / calls) if calls else 1.0


def acceptance_rate_per_depth(
    accept_counts: Int[np.ndarray, "*rows P"],
) -> Float[np.ndarray, " P-1"]:
    """Return the fraction of accepted drafts at depth 1 to P - 1, given acceptance above.

    A call that gained c tokens accepted nodes down to depth c - 1, so the rate at depth d is the
    share of calls that gained d + 1 tokens or more among those that gained d or more. NaN where no
    call got that far. A row's last call may be cut short by its limit, which counts as rejection.

    Args:
      accept_counts: as in `acceptance_length`.
    """
    histogram = accept_counts.reshape(-1, accept_counts.shape[-1]).sum(axis=0)
    reached = np.cumsum(histogram[::-1])[::-1].astype(float)
    rates = np.full(len(reached) - 1, np.nan)
    return np.divide(reached[1:], reached[:-1], out=rates, where=reached[:-1] > 0)


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether a text has 16 tokens or more, of whose 4-grams less than half are distinct."""
    if len(tokens) < _LOOP_TOKENS:
        return False
    ngrams = list(zip(*(tokens[start:] for start in range(_NGRAM)), strict=False))
    return len(set(ngrams)) < _DISTINCT * len(ngrams)


def ends_at_once(tokens: Sequence[int], stops: Collection[int]) -> bool:
    """Whether a text ends in a stop token within `FEW` tokens, the stop token included."""
    return 0 < len(tokens) <= FEW and tokens[-1] in stops
