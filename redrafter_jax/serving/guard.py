"""What every request passes before it is read: the host it names, its key and its size."""

import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter_jax.serving.openai_errors import ApiError

# Open to everyone: a page that asks for the key, and whether the server is up.
_OPEN = ("/", "/health")


class Guard:
    """ASGI middleware.

    Args:
      app: that answers what passes.
      api_key: that requests must bear; None for none.
      hosts: names that requests may call the server by, without a port; None for any. They keep out
        DNS rebinding: a page of another site whose name points to this machine.
      max_body: bytes of a request's body.
      on_refusal: called with the path and the error of what does not pass.
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets: there are none
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = Headers(scope=scope)
        if refusal := self._refusal(scope["path"], headers):
            self._on_refusal(scope["path"], refusal)
            await refusal.response()(scope, receive, send)
            return
        size = 0

        async def receive_within_limit() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_large()
            return message

        await self._app(scope, receive_within_limit, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").rpartition("@")[2]
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            names = " or ".join(self._hosts)
            return ApiError(403, f"The host {name!r} is not allowed; connect as {names}.")
        if self._api_key is not None and path not in _OPEN:
            kind, _, key = headers.get("authorization", "").partition(" ")
            # In constant time, so that nobody can find the key byte by byte.
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
            f"The body is larger than {self._max_body} bytes; send fewer.",
            code="body_too_large",
        )
