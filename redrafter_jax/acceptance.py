"""What a drafter is judged by: what its target calls gained, and whether a text says anything."""

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float, Int

# Of a text that repeats itself: tokens at least, and the share of its 4-grams that are distinct.
_LOOP_TOKENS, _NGRAM, _DISTINCT = 16, 4, 0.5
# Tokens of a text that ends at once, the stop token included.
FEW = 4


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
) -> Float[np.ndarray, " P-1"]:
    """How often a draft is right at depth 1 to P - 1, given that it was right above.

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
    """Whether these are 16 tokens or more, and less than half of their 4-grams are distinct."""
    if len(tokens) < _LOOP_TOKENS:
        return False
    ngrams = list(zip(*(tokens[start:] for start in range(_NGRAM)), strict=False))
    return len(set(ngrams)) < _DISTINCT * len(ngrams)


def ends_at_once(tokens: Sequence[int], stops: Collection[int]) -> bool:
    """Whether a stop token ends these within `FEW` tokens, itself included."""
    return 0 < len(tokens) <= FEW and tokens[-1] in stops
