"""A replica of Ray Serve: an engine and its application."""

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

# Seconds between checks whether everything is compiled.
_LOOKS = 0.1

_log = logging.getLogger(__name__)


class EngineReplica:
    """One engine, with the same HTTP application as a server without replicas.

    Args:
      load: function that loads the models and returns the engine and the served model.
      limits: limits on requests.
      log_prompts: whether prompts are logged.
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
        # Ray Serve sends no requests before this method returns, when everything is compiled.
        while self._service.worker.status == "warming up":
            await asyncio.sleep(_LOOKS)
        self.check_health()

    async def answer(self, key: str, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        """Yield the ASGI messages that answer a request; only the router uses `key`.

        If the caller stops reading, the request is cancelled.
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
            except Exception:  # the client has already received an error
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
        """Raise a RuntimeError unless the engine is ready; Ray Serve then replaces the replica."""
        if (status := self._service.worker.status) != "ready":
            raise RuntimeError(f"the engine is {status}")

    async def __del__(self) -> None:
        service: Any = getattr(self, "_service", None)
        if service is not None:
            await service.worker.close()
