"""Fixtures of a server that several files ask."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from servers import TOOL_LINES, serving


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving(FakeEngine(), template=TOOL_LINES) as base:
        yield base
