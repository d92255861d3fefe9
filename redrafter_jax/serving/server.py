"""The HTTP server around the application: its socket, its start and its end."""

import asyncio
import logging
import socket

import uvicorn
from starlette.types import ASGIApp

from redrafter_jax.errors import InputError
from redrafter_jax.serving.worker import Worker

# After the last answers are cut off, for their clients to read that.
_GRACE = 2
# Seconds that an idle connection stays open.
_KEEP_ALIVE = 75
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to.

    Raises:
      InputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--host {host} --port {port} cannot be listened on: {reason}; give others, or end "
            "what listens there."
        ) from None


class Server(uvicorn.Server):
    """uvicorn, which ends by letting running answers end first.

    Args:
      app: the application.
      worker: that decodes for it.
      drain_seconds: how long running answers may take once the server shall end.

    Attributes:
      failed: whether it ends because the engine has failed.
    """

    def __init__(self, app: ASGIApp, worker: Worker, drain_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # which bounds the size of headers; httptools does not
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than proxies keep their connections: one that they use again is open.
                timeout_keep_alive=_KEEP_ALIVE,
            )
        )
        self.failed = False
        self._worker = worker
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def cut_off() -> None:
            await asyncio.sleep(self._drain_seconds)
            await self._worker.close()
            await asyncio.sleep(_GRACE)
            for task in self.server_state.tasks:
                task.cancel()
            for connection in list(self.server_state.connections):  # of those who do not read
                connection.transport.abort()

        _log.info(
            "Ending: nothing more is accepted, answers that run have %g s.", self._drain_seconds
        )
        cutting = asyncio.ensure_future(cut_off())
        await super().shutdown(sockets)
        cutting.cancel()
        _log.info("Ended.")

    def fail(self) -> None:
        """Shut down, because the engine is gone; from any thread."""
        self.failed = self.should_exit = True
