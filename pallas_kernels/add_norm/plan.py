"""Division of a row among warpgroups and threads, computed from shapes."""

from typing import Any

THREADS = 128  # threads of a warpgroup
WARPGROUPS = 4  # warpgroups that share a row


def why_unsupported(x: Any, parts: Any, weight: Any) -> str | None:
    """The reason, as a clause, why the kernel cannot take these shapes and dtypes, or None."""
    if str(parts.dtype) != "float32":
        return f"its parts must be float32, but are {parts.dtype}"
    if x.dtype != weight.dtype or str(x.dtype) not in ("bfloat16", "float16"):
        return (
            "its rows and weight must be both bfloat16 or both float16, but are "
            f"{x.dtype} and {weight.dtype}"
        )
    if x.shape[-1] % (WARPGROUPS * THREADS):
        return f"its row size must be a multiple of {WARPGROUPS * THREADS}, but is {x.shape[-1]}"
    return None


def vector_size(size: int) -> int:
    """The number of adjacent elements that a thread reads at once, from a share of `size`."""
    return next(vector for vector in (4, 2, 1) if size % (THREADS * vector) == 0)
