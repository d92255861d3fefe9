"""How the kernel reads a row, computed from shapes."""

from typing import Any

THREADS = 128  # threads of a program
NUMBERS = 16  # elements per thread of a block
BLOCK = THREADS * NUMBERS
AHEAD = 4  # blocks that are loaded together


def why_unsupported(logits: Any, *_: Any) -> str | None:
    """The reason, as a clause, why the kernel cannot take these shapes and dtypes, or None."""
    if str(logits.dtype) != "float32":
        return f"its logits must be float32, but are {logits.dtype}"
    if logits.shape[-1] < BLOCK:
        return f"it needs {BLOCK} tokens or more, but there are {logits.shape[-1]}"
    return None


def vector_size(V: int) -> int:
    """The number of elements that a thread reads at once; rows begin at multiples of this."""
    return 4 if V % 4 == 0 else 1
