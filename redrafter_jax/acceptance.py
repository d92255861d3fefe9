"""Measures of drafting and of texts: acceptance length and rate, repetition, early ends."""

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float, Int

# For texts that repeat themselves: minimum number of tokens, and limit on the fraction of distinct
# 4-grams.
_LOOP_TOKENS, _NGRAM, _DISTINCT = 16, 4, 0.5
# Maximum number of tokens of a text that ends at once, stop token included.
FEW = 4


def acceptance_length(accept_counts: Int[np.ndarray, "*rows P"]) -> float:
    """Return the mean number of tokens gained per target call; 1.0 if there are no calls.

    The target's bonus token, which ends every call, is included.

    Args:
      accept_counts: entry c - 1 of a row is the number of target calls that gained c tokens.
    """
    calls = accept_counts.sum()
    gains = np.arange(1, accept_counts.shape[-1] + 1)
    return float((accept_counts * gains).sum() / calls) if calls else 1.0


def acceptance_rate_per_depth(
    accept_counts: Int[np.ndarray, "*rows P"],
) -> Float[np.ndarray, " P-1"]:
    """Return the acceptance rate at each tree depth d from 1 to P - 1, given acceptance above d.

    A call that gained c tokens accepted nodes down to depth c - 1. So the rate at depth d is the
    number of calls that gained d + 1 or more tokens, divided by the number of calls that gained d
    or more. It is NaN if no call gained d tokens. The token limit of a row may cut its last call
    short, which counts as a rejection.

    Args:
      accept_counts: entry c - 1 of a row is the number of target calls that gained c tokens.
    """
    histogram = accept_counts.reshape(-1, accept_counts.shape[-1]).sum(axis=0)
    reached = np.cumsum(histogram[::-1])[::-1].astype(float)
    rates = np.full(len(reached) - 1, np.nan)
    return np.divide(reached[1:], reached[:-1], out=rates, where=reached[:-1] > 0)


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether a text has 16 or more tokens, with less than half of its 4-grams distinct."""
    if len(tokens) < _LOOP_TOKENS:
        return False
    ngrams = list(zip(*(tokens[start:] for start in range(_NGRAM)), strict=False))
    return len(set(ngrams)) < _DISTINCT * len(ngrams)


def ends_at_once(tokens: Sequence[int], stops: Collection[int]) -> bool:
    """Whether a text ends in a stop token and has at most 4 tokens, stop token included."""
    return 0 < len(tokens) <= FEW and tokens[-1] in stops
