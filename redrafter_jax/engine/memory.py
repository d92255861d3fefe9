"""Memory of the cache, in bytes per device."""

from collections.abc import Sequence
from typing import NamedTuple

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.models.target import Target


class CacheCost(NamedTuple):
    """Memory of the cache on each device of a group of devices.

    Attributes:
      page: bytes of a page.
      ahead: bytes of the additional pages for trees that mirror decoding drafts ahead; they do not
        depend on the number of pages.
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
    """Return the cost of the cache on every group of devices.

    Without mirror decoding there is one group. With mirror decoding, the target's and the drafter's
    devices may be two groups.

    Args:
      target: the target model.
      drafter: the drafter.
      trees: the trees that the drafter may draft.
      mirror: settings of mirror decoding, as in `Engine`.
      slots: B, number of rows that decode together.

    Raises:
      InputError: mirror decoding does not support the target, the drafter or the trees.
    """
    if mirror is None:
        return [CacheCost(page_bytes(target, drafter))]
    from redrafter_jax.engine.mirror import mirror_costs  # not loaded by every command

    return mirror_costs(target, drafter, trees, mirror, slots)


def pages_in(memory: int, costs: Sequence[CacheCost]) -> int:
    """Return the number of pages that fit in `memory` bytes on every device."""
    return max(min((memory - ahead) // page for page, ahead in costs if page), 0)


def bytes_of(pages: int, costs: Sequence[CacheCost]) -> int:
    """Return the bytes of a cache of `pages` pages, on the device where it needs the most."""
    return max(ahead + pages * page for page, ahead in costs)
