"""The endpoint of all replicas, which routes requests and forwards answers."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

import asyncio
import json
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from redrafter_jax.serving.openai_errors import ApiError
from redrafter_jax.serving.replicas.conversation import conversation_key
from redrafter_jax.serving.replicas.metric_pages import joined_pages
from redrafter_jax.serving.request_counts import RequestCounts

# The value of the label `replica` for the endpoint's own counts.
_REPLICA = "front"
# The parts of an ASGI scope that a replica needs; other parts cannot be serialized.
_SENT = frozenset(
    {
        *("type", "asgi", "http_version", "scheme", "method", "path", "raw_path", "query_string"),
        *("root_path", "headers", "client", "server"),
    }
)


class Front:
    """The ASGI application of the endpoint.

    If a replica is lost, its streams end with one error event, also in `/v1/responses`. A request
    is retried once on another replica if none of its answer has been sent. The endpoint itself is
    one process: if it is lost, the streams of all replicas break off.

    Args:
      engines: Ray Serve's handle of the replicas.

    Attributes:
      counts: counts of the requests that no replica counts, because the endpoint refused them or
        their replica was lost.
    """

    def __init__(self, engines: DeploymentHandle) -> None:
        self.counts = RequestCounts()
        self._engines = engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        try:
            body = await Request(scope, receive).body()
            if scope["path"] == "/metrics":
                await (await self._metrics())(scope, receive, send)
            else:
                await self._answer(scope, body, receive, send)
        except ApiError as error:
            self.counts.count_refusal(scope["path"], error)
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _metrics(self) -> Response:
        try:
            pages = await self._engines.broadcast("metrics").results_async()
        except (RayError, RayServeException):  # Ray Serve may not have removed a lost replica yet
            raise _lost() from None
        own = {_REPLICA: self.counts.page().decode()}
        return Response(joined_pages(own | dict(pages)), media_type="text/plain; version=0.0.4")

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        told = _Told(send)
        answering = asyncio.ensure_future(self._hand_on(scope, body, told))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            leaving.cancel()
            answering.cancel()

    async def _hand_on(self, scope: Scope, body: bytes, told: "_Told") -> None:
        sent = {name: value for name, value in scope.items() if name in _SENT}
        call = self._engines.options(stream=True).answer
        for last in (False, True):
            answer: Any = call.remote(conversation_key(body), sent, body)
            try:
                async for message in answer:
                    await told.send(message)
                return
            except BackPressureError:
                raise ApiError(
                    429,
                    "All replicas are busy and their queues are full; ask again later.",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                ) from None
            except (RayError, RayServeException):
                if told.whole:  # and counted by the replica
                    return
                if told.begun:
                    self.counts.count_refusal(scope["path"], _lost())
                    await told.break_off(_lost())
                    return
                if last:
                    raise _lost() from None
            finally:
                answer.cancel()


class _Told:
    """The state of an answer that is forwarded to the client.

    Attributes:
      begun: whether a part of the answer's body has been sent to the client.
      whole: whether the answer's last message has been sent to the client.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self.begun = self.whole = False

    async def send(self, message: Message) -> None:
        """Forward an ASGI message; status and headers are held back until the body begins."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.begun and self._start is not None:
            self.begun = True
            await self._send(self._start)
        await self._send(message)
        self.whole = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def break_off(self, error: ApiError) -> None:
        """End a stream with an error event.

        Raises:
          ConnectionError: the answer is not a stream, so it cannot be ended with an error event.
        """
        assert self._start is not None
        headers = Headers(raw=list(self._start["headers"]))
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise ConnectionError(error.detail)
        event = f"data: {json.dumps(error.body())}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _lost() -> ApiError:
    return ApiError(
        503,
        "The replica that answered is gone; send the request again.",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    while (kind := (await receive())["type"]) in ("lifespan.startup", "lifespan.shutdown"):
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
