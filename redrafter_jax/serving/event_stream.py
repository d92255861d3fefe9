"""Server-sent events for a client that may leave, or stop reading, at any time."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class EventStream(StreamingResponse):
    """A response of one JSON object per event.

    Args:
      events: that are sent; a text is sent as it is.
      ended: called once nothing more is sent, whatever the reason.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[dict[str, Any] | str], ended: Callable[[], None]
    ) -> None:
        super().__init__(_lines(events), headers={"Cache-Control": "no-store"})
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette cancels what sends as soon as the client has left.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _lines(events: AsyncIterator[dict[str, Any] | str]) -> AsyncIterator[str]:
    async for event in events:
        data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        yield f"data: {data}\n\n"
