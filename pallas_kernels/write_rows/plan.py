"""The shapes and dtypes that the kernel takes."""

from typing import Any

THREADS = 128  # threads of a program, and numbers in a row of a head
MOST_TOKENS = 256  # with more tokens, moving the bytes takes longer than launching


def why_unsupported(page: Any, slot: Any, layers: Any, fresh: Any) -> str | None:
    """The reason, as a clause, why the kernel cannot take these shapes and dtypes, or None."""
    del slot
    H, dtype = layers[0].shape[-1], layers[0].dtype
    if H != THREADS:
        return f"its heads must have {THREADS} numbers, but have {H}"
    if page.size > MOST_TOKENS:
        return f"it writes up to {MOST_TOKENS} tokens, but there are {page.size}"
    others = {str(one.dtype) for one in (*layers, *fresh)} - {str(dtype)}
    if others:
        return f"its arrays must be all of one dtype, but are {dtype} and {', '.join(others)}"
    return None
