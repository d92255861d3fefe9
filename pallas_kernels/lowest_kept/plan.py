"""How a row is read; arithmetic on shapes alone."""

from typing import Any

THREADS = 128  # of a program
NUMBERS = 16  # that a thread holds of a block
BLOCK = THREADS * NUMBERS
AHEAD = 4  # blocks whose numbers are asked for together


def why_unsupported(logits: Any, *_: Any) -> str | None:
    """Why the kernel cannot take these shapes and dtypes, as half a sentence; None if it can."""
    if str(logits.dtype) != "float32":
        return f"its logits must be float32, but are {logits.dtype}"
    if logits.shape[-1] < BLOCK:
        return f"it needs {BLOCK} tokens or more, but there are {logits.shape[-1]}"
    return None


def vector_size(V: int) -> int:
    """How many numbers a thread reads at once; rows of V must begin at multiples of that."""
    return 4 if V % 4 == 0 else 1
