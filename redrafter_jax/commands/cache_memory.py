"""The memory of a server's cache, and the length of the texts that fit into it."""

from collections.abc import Sequence

import jax

from redrafter_jax.engine.memory import CacheCost, bytes_of, pages_in
from redrafter_jax.engine.pages import pages_for
from redrafter_jax.errors import InputError
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards

# Fraction of the memory left by the weights that the cache takes. Intermediate results of programs
# need the rest.
_SHARE = 0.8
# Tokens per slot on devices that do not report their free memory.
_TYPICAL_TEXT = 4096


def default_cache_memory(target: Target, costs: Sequence[CacheCost], slots: int) -> int:
    """Return the default size in bytes of the cache on each device.

    The default is a share of the device's free memory. If the device does not report its free
    memory, the cache has room for a text of 4096 tokens in every slot, or of the target's limit if
    that is lower.

    Args:
      target: the target, whose weights are already on the devices.
      costs: bytes of the cache on each group of devices, from `cache_costs`.
      slots: number of requests that decode together.
    """
    free = _free_memory()
    if free is not None:
        return int(_SHARE * free)
    tokens = min(_TYPICAL_TEXT, target.config.position_limit)
    rows = -(-slots // data_shards(target.mesh))
    return bytes_of(rows * pages_for(tokens), costs)


def longest_text(target: Target, costs: Sequence[CacheCost], memory: int) -> int:
    """Return the number of tokens of the longest text that fits into the cache.

    The number is at most the target's limit. The last token of a text needs no place in the cache.

    Args:
      target: the target, whose weights are already on the devices.
      costs: bytes of the cache on each group of devices, from `cache_costs`.
      memory: size in bytes of the cache on each device.

    Raises:
      InputError: the memory holds no page, or the device has less free memory.
    """
    pages, free = pages_in(memory, costs), _free_memory()
    if not pages:
        ahead = " with the pages for trees drafted ahead" if any(one.ahead for one in costs) else ""
        raise InputError(
            f"--cache-memory is {memory} bytes, but a page of {PAGE} tokens takes "
            f"{bytes_of(1, costs)} bytes{ahead}; give more."
        )
    if free is not None and memory > free:
        raise InputError(
            f"--cache-memory is {memory} bytes, but the device has {free} bytes free beside the "
            "weights; give less."
        )
    return min(pages * PAGE + 1, target.config.position_limit)


def _free_memory() -> int | None:
    """Return the free bytes of a device; None if the device does not report them."""
    told = jax.local_devices()[0].memory_stats() or {}
    return told["bytes_limit"] - told["bytes_in_use"] if "bytes_limit" in told else None
