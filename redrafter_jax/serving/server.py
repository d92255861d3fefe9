"""The HTTP server: how it is built, how it listens, and how it ends."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable

import uvicorn

from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.errors import InputError
from redrafter_jax.serving.choices import token_spellings
from redrafter_jax.serving.guard import Guard
from redrafter_jax.serving.metrics import Metrics
from redrafter_jax.serving.openai_api import make_app
from redrafter_jax.serving.service import ServedModel, Service
from redrafter_jax.serving.worker import Worker
from redrafter_jax.text.grammars import GrammarCompiler

# When the server ends: seconds until incomplete requests must have arrived, and seconds for clients
# to read the end of answers that were cut off.
_GRACE = 2.0
# Seconds between two checks whether the engine has failed.
_POLL = 0.1
# Seconds that an idle connection stays open.
_KEEP_ALIVE = 75
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens for connections.

    Raises:
      InputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"The server cannot listen on --host {host} --port {port}: {str(reason).rstrip('.')}; "
            "give another host or port, or end the program that uses this port."
        ) from None


def make_service(
    engine: Engine,
    model: ServedModel,
    limits: ServeConfig,
    on_failure: Callable[[], None] = lambda: None,
) -> Service:
    """Build the parts that answer requests; `on_failure` is called when the engine has failed."""
    metrics = Metrics(engine)
    worker = Worker(engine, on_failure=on_failure, on_wait=metrics.queue.observe)
    form = model.format
    spell = token_spellings(form.tokenizer, form.stop_tokens)
    grammars = GrammarCompiler(
        form.tokenizer, engine.vocab_size, form.stop_tokens, engine.announce_grammar
    )
    return Service(worker, model, limits, spell, metrics, grammars, engine.longest_path - 1)


class Server(uvicorn.Server):
    """The HTTP server over an engine; finishes running answers before it ends.

    Args:
      engine: the engine, which warms up when the server runs.
      model: the served model.
      limits: limits on requests.
      host: the address on which the server's sockets listen. If it is a loopback address, requests
        must name a loopback host.
      api_key: the key that requests must send; None for no key.
      log_prompts: whether prompts are logged.

    Attributes:
      failed: whether the engine has failed, which ends the server.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        limits: ServeConfig,
        *,
        host: str = LOOPBACK[0],
        api_key: str | None = None,
        log_prompts: bool = False,
    ) -> None:
        self.failed = False
        self._drain_seconds = limits.drain
        service = make_service(engine, model, limits, self._fail)
        self._worker = service.worker
        self._guard = Guard(
            make_app(service, log_prompts=log_prompts),
            api_key=api_key,
            hosts=LOOPBACK if host in LOOPBACK else None,
            max_body=limits.max_body,
            on_refusal=service.metrics.count_refusal,
        )
        super().__init__(
            uvicorn.Config(
                self._guard,
                http="h11",  # it limits the size of headers, unlike httptools
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than proxies keep connections, so that a reused connection is still open.
                timeout_keep_alive=_KEEP_ALIVE,
            )
        )

    def fail(self, error: Exception) -> None:
        """End the server because the engine has failed; running answers get an error.

        Any thread may call this.
        """
        self._worker.fail(error)

    def end(self) -> None:
        """End the server as SIGTERM does; any thread may call this."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def cut_off() -> None:
            end = time.monotonic() + self._drain_seconds
            while not self.failed and time.monotonic() < end:
                await asyncio.sleep(_POLL)
            await self._worker.close()
            await asyncio.sleep(_GRACE)
            for task in self.server_state.tasks:
                task.cancel()
            # Clients that do not read their answers would keep connections open.
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        drain = 0 if self.failed else self._drain_seconds
        _log.info("Shutting down: no new requests; running answers have %g s.", drain)
        self._guard.end(min(_GRACE, self._drain_seconds))
        cutting = asyncio.ensure_future(cut_off())
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C skips the application's shutdown
            await self._worker.close()
        cutting.cancel()
        _log.info("Ended.")

    def _fail(self) -> None:
        self.failed = self.should_exit = True
