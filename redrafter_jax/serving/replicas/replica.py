"""A replica: an engine and the application over it, called by Ray Serve."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray import serve
from starlette.types import Message, Scope

from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.serving.openai_api import make_app
from redrafter_jax.serving.server import make_service
from redrafter_jax.serving.service import ServedModel

# Seconds between looks at whether everything is compiled.
_LOOKS = 0.1

_log = logging.getLogger(__name__)


class EngineReplica:
    """One engine and the same application over it that a single server has.

    Args:
      load: loads the target and its drafter, and makes an engine of them.
      limits: limits on requests.
      log_prompts: whether the log tells what was asked.
    """

    async def __init__(
        self,
        load: Callable[[], tuple[Engine, ServedModel]],
        limits: ServeConfig,
        log_prompts: bool,
    ) -> None:
        logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
        logging.getLogger("redrafter_jax").setLevel(logging.INFO)
        engine, model = await asyncio.to_thread(load)
        self._service = make_service(engine, model, limits)
        self._app = make_app(self._service, log_prompts=log_prompts)
        self._service.worker.start()
        # No request comes before everything is compiled.
        while self._service.worker.status == "warming up":
            await asyncio.sleep(_LOOKS)
        self.check_health()

    async def answer(self, key: str, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        """The messages of ASGI that answer a request; its router has read the key.

        Where nobody reads them any more, the request is cancelled.
        """
        del key
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # a client that leaves is a cancellation here
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await self._app(scope, receive, messages.put)
            except Exception:  # of which the client has been told
                _log.exception("A request failed.")
            finally:
                messages.put_nowait(None)

        answering = asyncio.ensure_future(answer())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await answering
        finally:
            answering.cancel()

    def metrics(self) -> tuple[str, str]:
        """The replica's name and its metrics, in Prometheus's text format."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, self._service.metrics.page().decode()

    def check_health(self) -> None:
        """Raise where the engine is gone, upon which Ray Serve replaces the replica."""
        if (status := self._service.worker.status) != "ready":
            raise RuntimeError(f"the engine is {status}")

    async def __del__(self) -> None:
        service: Any = getattr(self, "_service", None)
        if service is not None:
            await service.worker.close()
