"""What a drafter is judged by, from the histogram of what its target calls gained."""

import numpy as np
from jaxtyping import Float, Int


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
