"""How much memory a server gives its cache, and the texts that it has room for."""

import jax

from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.device import page_bytes
from redrafter_jax.engine.pages import pages_for
from redrafter_jax.errors import InputError
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards

# Of what a device has free beside the weights; the rest is for what programs compute with.
_SHARE = 0.8
# Tokens of a text for which each slot gets pages on devices that do not tell what they have free.
_TYPICAL_TEXT = 4096


def default_cache_memory(target: Target, drafter: Drafter, slots: int) -> int:
    """Bytes of a cache on each device where nobody says how many.

    A share of what the device has free; where it does not tell, room for all slots with texts of
    4096 tokens, or of the target's limit if that is lower.
    """
    free = _free_memory()
    if free is not None:
        return int(_SHARE * free)
    tokens = min(_TYPICAL_TEXT, target.config.position_limit)
    rows = -(-slots // data_shards(target.mesh))
    return rows * pages_for(tokens) * page_bytes(target, drafter)


def longest_text(target: Target, drafter: Drafter, memory: int) -> int:
    """Tokens that one text may come to in so many bytes on each device, by the target's limit too.

    Its last token is never cached.

    Raises:
      InputError: there is no room for a page, or the device has not so much.
    """
    page, free = page_bytes(target, drafter), _free_memory()
    if memory < page:
        raise InputError(
            f"--cache-memory is {memory} bytes, but a page of {PAGE} tokens takes {page}; give "
            "more."
        )
    if free is not None and memory > free:
        raise InputError(
            f"--cache-memory is {memory} bytes, but the device has {free} free beside the weights; "
            "give less."
        )
    return min(memory // page * PAGE + 1, target.config.position_limit)


def _free_memory() -> int | None:
    """Bytes that a device has left; None where it does not tell."""
    told = jax.local_devices()[0].memory_stats() or {}
    return told["bytes_limit"] - told["bytes_in_use"] if "bytes_limit" in told else None
