"""How a row is divided, computed from shapes."""

from typing import Any

THREADS = 128  # threads of a warpgroup
WARPGROUPS = 4  # warpgroups that share a row


def why_unsupported(x: Any, parts: Any, weight: Any) -> str | None:
    """Reason why the kernel cannot take these shapes and dtypes, a clause; None if it can."""
    if str(parts.dtype) != "float32":
        return f"its parts must be float32, but are {parts.dtype}"
    if x.dtype != weight.dtype or str(x.dtype) not in ("bfloat16", "float16"):
        return (
            "its rows and weight must be both bfloat16 or both float16, but are "
            f"{x.dtype} and {weight.dtype}"
        )
    if x.shape[-1] % (WARPGROUPS * THREADS):
        return f"its rows must be multiples of {WARPGROUPS * THREADS}, but are {x.shape[-1]}"
    return None


def vector_size(size: int) -> int:
    """Number of neighbouring elements of a thread, for a warpgroup's share of a row."""
    return next(vector for vector in (4, 2, 1) if size % (THREADS * vector) == 0)
