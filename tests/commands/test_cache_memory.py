"""How much memory a server gives its cache, and what it says of too little and too much."""

from typing import Any
from unittest.mock import Mock

import jax
import pytest

from redrafter_jax import InputError
from redrafter_jax.commands.cache_memory import default_cache_memory, longest_text
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.engine.memory import CacheCost, cache_costs
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target


def costs_of(target: Target) -> list[CacheCost]:
    """Without a drafter."""
    return cache_costs(target, RootOnly(), (None,), None, 8)


def devices(monkeypatch: pytest.MonkeyPatch, stats: dict[str, int] | None) -> None:
    """What the first device tells of its memory."""
    device: Any = Mock(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_a_device_that_tells_gives_a_share_of_what_is_free(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, {"bytes_limit": 10_000_000, "bytes_in_use": 4_000_000})
    assert default_cache_memory(target, costs_of(target), 8) == 4_800_000


def test_elsewhere_every_slot_has_room_for_a_text(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, None)
    limit = target.config.position_limit
    assert limit < 4096
    page = page_bytes(target, RootOnly())
    assert default_cache_memory(target, costs_of(target), 8) == 8 * -(-limit // PAGE) * page


@pytest.mark.parametrize(("pages", "tokens"), [(1, PAGE + 1), (2, 2 * PAGE + 1), (1000, None)])
def test_the_longest_text_fills_all_pages_but_for_its_last_token(
    target: Target, pages: int, tokens: int | None
) -> None:
    memory = pages * page_bytes(target, RootOnly()) + 5
    assert longest_text(target, costs_of(target), memory) == (
        tokens or target.config.position_limit
    )


def test_too_little_and_too_much_are_told_in_bytes(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"^--cache-memory is 1000 bytes, but a page of 64 tokens"):
        longest_text(target, costs_of(target), 1000)
    devices(monkeypatch, {"bytes_limit": 10_000_000, "bytes_in_use": 4_000_000})
    with pytest.raises(
        InputError, match=r"is 6000001 bytes, but the device has 6000000 bytes free"
    ):
        longest_text(target, costs_of(target), 6_000_001)


def test_too_little_for_trees_that_are_drafted_ahead_is_told(target: Target) -> None:
    costs = [CacheCost(page=100), CacheCost(page=10, ahead=500)]
    with pytest.raises(InputError, match="takes 510 bytes with the pages for trees drafted ahead"):
        longest_text(target, costs, 505)
    assert longest_text(target, costs, 510) == PAGE + 1
    assert longest_text(target, costs, 599) == 5 * PAGE + 1
