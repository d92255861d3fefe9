"""Records that are left out, in words."""

from collections import Counter
from collections.abc import Sequence

from .types import Skip


def count_reasons(skips: Sequence[Skip]) -> dict[str, int]:
    """How many records each reason left out, the most frequent first."""
    return dict(Counter(skip.reason for skip in skips).most_common())


def describe_skips(skips: Sequence[Skip]) -> str:
    """One line: every reason with its count, and where it is met first."""
    first = {skip.reason: skip for skip in reversed(skips)}
    return "; ".join(
        f"{count} × {reason} (first at {_place(first[reason])})"
        for reason, count in count_reasons(skips).items()
    )


def _place(skip: Skip) -> str:
    return f"{skip.place}: {skip.detail}" if skip.detail else skip.place
