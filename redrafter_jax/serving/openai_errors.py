"""Errors as OpenAI's API words them: one object with a sentence, a kind, a field and a code."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

# What a client does about a status: mend its request, wait, or tell whoever runs the server.
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class ApiError(HTTPException):
    """A request that is not answered.

    Args:
      status: of HTTP.
      message: one sentence: the value, the limit, the way out.
      field: of the request, where one is to blame.
      code: for programs, such as "context_length_exceeded".
      headers: of the response.
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
        """The object that says it, of a response or of an event in a stream."""
        return _error_object(self.status_code, self.detail, self.field, self.code)

    def response(self) -> Response:
        """The response that says it."""
        return _response(self.body(), self.status_code, self.headers)


def error_response(method: str, path: str, error: Exception) -> Response:
    """The response to a request that FastAPI or a route refuses."""
    if isinstance(error, RequestValidationError):
        error = _refusal(error)
    if isinstance(error, ApiError):
        return error.response()
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {
        404: f"{path} is no route of this server; /v1/models, /v1/completions and "
        "/v1/chat/completions are.",
        405: f"{path} does not take {method}.",
        500: "The server failed; its log says why.",
    }.get(status, "The request cannot be read.")
    return _response(_error_object(status, message, None, None), status)


def _response(
    body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> Response:
    # All in ASCII: what a message quotes of a request need not be valid Unicode.
    return Response(json.dumps(body), status, headers, "application/json")


def _error_object(status: int, message: str, field: str | None, code: str | None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _refusal(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, told by the name of its field."""
    first = error.errors()[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        at, why = first["loc"][-1], first["ctx"]["error"]
        return ApiError(400, f"The body is no JSON: {why} at character {at}.", code="invalid_json")
    told = first["msg"].removeprefix("Value error, ").rstrip(".") + "."
    if not place:
        if isinstance(error.body, bytes):  # FastAPI reads no other type
            return ApiError(
                400,
                "Send the body with the header Content-Type: application/json, which is missing.",
            )
        return ApiError(400, "Send a JSON object, as application/json.")
    field = ".".join(map(str, place))
    problem = {
        "extra_forbidden": " is not supported; leave it out.",
        "missing": " is missing; give it.",
    }.get(kind, f": {told}")
    return ApiError(400, field + problem, field=field, code=kind)
