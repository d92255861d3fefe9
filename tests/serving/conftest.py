"""Fixtures of a server that several files ask."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from servers import serving


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving(FakeEngine()) as base:
        yield base
