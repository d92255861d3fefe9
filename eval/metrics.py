"""What a pair of decodings is judged by: pure functions of arrays and token lists."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from redrafter_jax.acceptance import acceptance_length, acceptance_rate_per_depth


def first_divergence(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first new token that differs or is missing; None for equal texts."""
    for index, (ours, theirs) in enumerate(zip_longest(tokens, expected)):
        if ours != theirs:
            return index
    return None


def quartiles(values: Float[np.ndarray, " n"]) -> list[float] | None:
    """25%, 50% and 75% of the values that are numbers; None if there are none."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return None
    return [float(value) for value in np.quantile(known, (0.25, 0.5, 0.75))]


def count_accepted(accept_counts: Int[np.ndarray, "*rows P"]) -> dict[str, Any]:
    """Acceptance length, rates per depth and the counts behind them, for a report.

    Args:
      accept_counts: as in `redrafter_jax.Generation`.
    """
    counts = accept_counts.reshape(-1, accept_counts.shape[-1]).sum(axis=0)
    per_depth = acceptance_rate_per_depth(counts)
    return {
        "acceptance_length": acceptance_length(counts),
        "acceptance_rate_per_depth": [None if np.isnan(r) else float(r) for r in per_depth],
        "calls_per_depth": np.cumsum(counts[::-1])[::-1].tolist(),
        "accept_counts": counts.tolist(),
    }
