"""The calls of an engine to its device, in their order."""

from typing import Any

import pytest

from redrafter_jax.serving import engine


def watch_device_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls from now on: `read_chunk` and `decode_rows`."""
    calls: list[str] = []

    def watch(name: str) -> None:
        program = getattr(engine, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return program(*arguments, **options)

        monkeypatch.setattr(engine, name, watched)

    watch("read_chunk")
    watch("decode_rows")
    return calls
