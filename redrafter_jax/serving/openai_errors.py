"""Errors in the format of OpenAI's API: an object with a message, a type, a field and a code."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from redrafter_jax.config.limits import is_not

# Error types of some statuses; others are "server_error" from 500 on, or "invalid_request_error".
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """The error for a request that is refused or fails.

    Args:
      status: the HTTP status code.
      message: sentence that states the value, the limit and the way out.
      field: the request's field that caused the error; None if no single field did.
      code: a name of the error for programs, such as "context_length_exceeded"; None for no name.
      headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.field = field
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object of the error, for a response or for an event in a stream."""
        other = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status_code, other)
        error = {"message": self.detail, "type": kind, "param": self.field, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The HTTP response with the error."""
        # json.dumps writes ASCII, because messages may quote invalid Unicode from a request.
        return Response(json.dumps(self.body()), self.status_code, self.headers, "application/json")


def server_ends() -> ApiError:
    """Return the error for requests that are not finished when the server shuts down."""
    return ApiError(
        503, "The server is shutting down; send the request to another server.", code="server_ends"
    )


def check_model(served: str, name: str | None) -> None:
    """Refuse a request that names a model other than the served one."""
    if name not in (None, served):
        raise ApiError(
            404,
            f"The model {name!r:.80} is not served here; ask for {served}.",
            field="model",
            code="model_not_found",
        )


def as_api_error(method: str, path: str, error: Exception) -> ApiError:
    """Convert an exception from FastAPI or from a route to the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _refusal(error)
    known = error if isinstance(error, HTTPException) else HTTPException(500)
    message = {
        404: f"{path} is not a route of this server; use /v1/models, /v1/completions, "
        "/v1/chat/completions or /v1/responses.",
        405: f"{path} does not take {method}; use a method that the header Allow names.",
        500: "The server failed; its log says why.",
    }.get(known.status_code, "The request cannot be read.")
    return ApiError(known.status_code, message, headers=known.headers)


def _refusal(error: RequestValidationError) -> ApiError:
    """Return the error for the first problem in a request's body; the error names the field."""
    first = error.errors()[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        at, why = first["loc"][-1], first["ctx"]["error"]
        return ApiError(
            400, f"The body is not valid JSON: {why} at character {at}.", code="invalid_json"
        )
    if not place:
        if isinstance(error.body, bytes):  # FastAPI reads no other type
            return ApiError(
                400,
                "Send the body as JSON, with the header Content-Type: application/json.",
            )
        return ApiError(400, "Send a JSON object, as application/json.")
    field = ".".join(map(str, place))
    reason = first["msg"].removeprefix("Value error, ").replace(" after validation", "").rstrip(".")
    problem = {
        "extra_forbidden": " is not supported; leave it out",
        "missing": " is missing; give it",
    }.get(kind, f": {reason}")
    if (needed := reason.removeprefix("Input should be ")) != reason:
        problem = f" {is_not(first['input'], needed)}"
    return ApiError(400, f"{field}{problem}.", field=field, code=kind)
