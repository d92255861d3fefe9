"""Bytes of the cache on each device."""

from collections.abc import Sequence
from typing import NamedTuple

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.models.target import Target


class CacheCost(NamedTuple):
    """Bytes of the cache on each device of a group.

    Attributes:
      page: bytes of a page.
      ahead: bytes of the pages for trees that are drafted ahead, whatever the number of pages.
    """

    page: int
    ahead: int = 0


def cache_costs(
    target: Target,
    drafter: Drafter,
    trees: tuple[TreeConfig | None, ...],
    mirror: MirrorConfig | None,
    slots: int,
) -> list[CacheCost]:
    """Return the bytes of the cache for every group of devices: the target's and the drafter's.

    Args:
      target: the target model.
      drafter: the drafter.
      trees: the trees that it may draft.
      mirror: as in `Engine`.
      slots: B, rows that decode together.

    Raises:
      InputError: mirror decoding does not support an argument.
    """
    if mirror is None:
        return [CacheCost(page_bytes(target, drafter))]
    from redrafter_jax.engine.mirror import mirror_costs  # not loaded by every command

    return mirror_costs(target, drafter, trees, mirror, slots)


def pages_in(memory: int, costs: Sequence[CacheCost]) -> int:
    """Return the number of pages that fit in `memory` bytes on each device; 0 if none does."""
    return max(min((memory - ahead) // page for page, ahead in costs if page), 0)


def bytes_of(pages: int, costs: Sequence[CacheCost]) -> int:
    """Return the bytes of that many pages on the device where they take most."""
    return max(ahead + pages * page for page, ahead in costs)
