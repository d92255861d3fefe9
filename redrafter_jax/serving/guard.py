"""Checks of every HTTP request: host name, API key, and the size and arrival time of the body."""

import asyncio
import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter_jax.serving.openai_errors import ApiError, server_ends

# Routes without a key: the chat page, which asks for the key itself, and the health check.
_OPEN = ("/", "/health")


class Guard:
    """ASGI middleware that refuses a wrong host name, a wrong API key or too large a body.

    Args:
      app: the application that answers accepted requests.
      api_key: the key that requests must send; None for no key.
      hosts: host names, without a port, that requests may name; None allows any. The check prevents
        DNS rebinding, in which the name of another site points to this machine.
      max_body: limit on the bytes of a request's body.
      on_refusal: function that is called with the path and the error of a request that is refused
        before its body is read.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        hosts: Sequence[str] | None,
        max_body: int,
        on_refusal: Callable[[str, ApiError], None],
    ) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._hosts = hosts
        self._max_body = max_body
        self._on_refusal = on_refusal
        self._reading: set[asyncio.Timeout] = set()
        self._read_until: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets are not supported
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = Headers(scope=scope)
        if refusal := self._refusal(scope["path"], headers):
            self._on_refusal(scope["path"], refusal)
            await refusal.response()(scope, receive, send)
            return
        size, complete = 0, False

        async def receive_within_limit() -> Message:
            nonlocal size, complete
            if complete:  # the next message says that the client has left
                return await receive()
            message = await self._receive_in_time(receive)
            if message["type"] == "http.disconnect":
                raise ApiError(499, "The client left.", code="client_gone")  # nobody reads it
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_within_limit, send)

    def end(self, seconds: float) -> None:
        """Refuse requests whose bodies are still incomplete `seconds` after this call.

        The server calls this method in its event loop when it shuts down.
        """
        self._read_until = asyncio.get_running_loop().time() + seconds
        for limit in self._reading:
            limit.reschedule(self._read_until)

    async def _receive_in_time(self, receive: Receive) -> Message:
        limit = asyncio.timeout_at(self._read_until)
        self._reading.add(limit)
        try:
            async with limit:
                return await receive()
        except TimeoutError:
            raise server_ends() from None
        finally:
            self._reading.remove(limit)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").rpartition("@")[2]
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            names = " or ".join(self._hosts)
            return ApiError(403, f"The host {name!r} is not allowed; use {names} in the URL.")
        if self._api_key is not None and path not in _OPEN:
            kind, _, key = headers.get("authorization", "").partition(" ")
            # Compare in constant time, so that the key cannot be guessed byte by byte.
            same = hmac.compare_digest(key.encode("latin-1"), self._api_key)
            if kind.lower() != "bearer" or not same:
                return ApiError(
                    401,
                    "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._max_body} bytes; send fewer bytes, or start the "
            "server with a larger --max-body.",
            code="body_too_large",
        )
