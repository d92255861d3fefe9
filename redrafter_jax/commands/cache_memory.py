"""The memory of a server's cache, and the length of the texts that fit into it."""

import jax

from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.pages import pages_for
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.errors import InputError
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards

# Fraction of the memory left by the weights that the cache takes. Intermediate results of programs
# need the rest.
_SHARE = 0.8
# Tokens per slot on devices that do not report their free memory.
_TYPICAL_TEXT = 4096


def default_cache_memory(target: Target, drafter: Drafter, slots: int) -> int:
    """The default size in bytes of the cache on each device.

    It is a share of the device's free memory. If the device does not report its free memory, the
    cache has room for texts of 4096 tokens in all slots, or of the target's limit if that is lower.
    """
    free = _free_memory()
    if free is not None:
        return int(_SHARE * free)
    tokens = min(_TYPICAL_TEXT, target.config.position_limit)
    rows = -(-slots // data_shards(target.mesh))
    return rows * pages_for(tokens) * page_bytes(target, drafter)


def longest_text(target: Target, drafter: Drafter, memory: int) -> int:
    """The maximum number of tokens of a text that fits into `memory` bytes on each device.

    It is at most the target's limit. The last token of a text is never cached.

    Raises:
      InputError: the memory holds no page, or the device has less free memory.
    """
    page, free = page_bytes(target, drafter), _free_memory()
    if memory < page:
        raise InputError(
            f"--cache-memory is {memory} bytes, but a page of {PAGE} tokens takes {page} bytes; "
            "give more."
        )
    if free is not None and memory > free:
        raise InputError(
            f"--cache-memory is {memory} bytes, but the device has {free} bytes free beside the "
            "weights; give less."
        )
    return min(memory // page * PAGE + 1, target.config.position_limit)


def _free_memory() -> int | None:
    """Free bytes of a device; None if the device does not report them."""
    told = jax.local_devices()[0].memory_stats() or {}
    return told["bytes_limit"] - told["bytes_in_use"] if "bytes_limit" in told else None
