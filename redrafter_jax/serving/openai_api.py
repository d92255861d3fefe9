"""The routes of OpenAI's API, of the chat page, and for monitoring the server."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from redrafter_jax.serving.chat_prompts import encode_chat
from redrafter_jax.serving.choices import Piece
from redrafter_jax.serving.jobs import Job, check, start_job
from redrafter_jax.serving.openai_answers import Answer, ChatAnswer, CompletionAnswer
from redrafter_jax.serving.openai_errors import ApiError, as_api_error, check_model
from redrafter_jax.serving.openai_schema import BaseRequest, ChatRequest, CompletionRequest
from redrafter_jax.serving.page import read_page
from redrafter_jax.serving.request_counts import ROUTES
from redrafter_jax.serving.responses_answers import ResponsesAnswer
from redrafter_jax.serving.responses_schema import ResponsesRequest, in_own_names
from redrafter_jax.serving.service import Service
from redrafter_jax.serving.token_routes import token_routes
from redrafter_jax.text.chat_template import NO_TEMPLATE
from redrafter_jax.text.tokenizer import encode

_log = logging.getLogger(__name__)


def make_app(service: Service, *, log_prompts: bool = False) -> FastAPI:
    """Build the ASGI application; with `log_prompts`, the prompts of requests are logged."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncGenerator[None]:
        service.worker.start()  # it warms up while the server listens
        yield
        await service.worker.close()

    app = FastAPI(title="redrafter", openapi_url=None, lifespan=life)
    created = int(time.time())
    page = read_page()

    async def refuse(http: Request, error: Exception) -> Response:
        refusal = as_api_error(http.method, http.url.path, error)
        service.metrics.count_refusal(http.url.path, refusal)
        return refusal.response()

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, refuse)

    @app.get("/")
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page.document, headers={"Content-Security-Policy": page.policy})

    @app.get("/health")
    async def health() -> JSONResponse:
        status = service.worker.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, created)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(service.model.name, name)
        return _model(service, created)

    app.include_router(token_routes(service))

    @app.post(ROUTES[0])
    async def chat(request: ChatRequest, http: Request) -> Response:
        gap = service.model.format.template.gap
        return await respond(request, http, ChatAnswer, encode_chat, gap)

    @app.post(ROUTES[1])
    async def completions(request: CompletionRequest, http: Request) -> Response:
        return await respond(request, http, CompletionAnswer, _encode)

    @app.post(ROUTES[2])
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        gap = service.model.format.template.gap
        with in_own_names():
            kind = partial(ResponsesAnswer, request)
            return await respond(request.chat(), http, kind, encode_chat, gap)

    async def respond(
        request: BaseRequest,
        http: Request,
        kind: Callable[[Service, Any, int, list[list[int]]], Answer],
        read: Callable[[Service, Any], list[list[int]]],
        gap: str = "",
    ) -> Response:
        began = time.monotonic()
        check_model(service.model.name, request.model)
        if log_prompts:
            _log.info("%s: %r", http.url.path, getattr(request, request.prompt_field))
        check(service, request)
        prompts = await asyncio.to_thread(read, service, request)
        job = await start_job(service, request, prompts, began, gap)
        answer = kind(service, request, job.seed, prompts)
        return await _answer(job, answer, request, http)

    return app


def _model(service: Service, created: int) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": created,
        "owned_by": "redrafter-jax",
        "context_length": service.model.context_length,
        "chat": service.model.format.template is not NO_TEMPLATE,
    }


def _encode(service: Service, request: CompletionRequest) -> list[list[int]]:
    return [
        encode(service.model.format.tokenizer, prompt) if isinstance(prompt, str) else prompt
        for prompt in request.prompt
    ]


def _echoes(service: Service, request: BaseRequest) -> list[str]:
    """Return the prompt's text for each choice if the request asks for `echo`; [] otherwise."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return []
    texts = [
        prompt if isinstance(prompt, str) else service.model.format.tokenizer.decode(prompt)
        for prompt in request.prompt
    ]
    return [text for text in texts for _ in range(request.n)]


async def _answer(job: Job, answer: Answer, request: BaseRequest, http: Request) -> Response:
    """Respond to a submitted request, with a stream or with one complete answer."""
    echoes = _echoes(job.service, request)

    def ended() -> None:
        job.end()
        job.service.metrics.count(http.url.path, job.outcome)
        _log.info(
            "%s %s: %s, %d prompt and %d new tokens in %.2f s",
            http.url.path,
            answer.id,
            job.outcome,
            job.prompt_tokens,
            job.completion_tokens,
            time.monotonic() - job.began,
        )

    if request.stream:
        return _EventStream(_events(job, answer, echoes), ended)
    collected = asyncio.ensure_future(_collect(job, answer, echoes))
    left = asyncio.ensure_future(_client_leaves(http))
    try:
        await asyncio.wait({collected, left}, return_when=asyncio.FIRST_COMPLETED)
        if collected.done():
            return collected.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        collected.cancel()
        left.cancel()
        ended()


async def _client_leaves(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _collect(job: Job, answer: Answer, echoes: Sequence[str]) -> Response:
    choices = [[Piece(echo, [], None)] for echo in echoes] or [[] for _ in job.choices]
    try:
        async for index, piece in job.pieces():
            choices[index].append(piece)
    except ApiError as error:
        return error.response()
    return JSONResponse(answer.whole(choices, job.usage))


class _EventStream(StreamingResponse):
    """Server-sent events for a client that may leave, or stop reading, at any time.

    `on_end` is called once, after the last event or when the client has left.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette cancels the sending task as soon as the client has left.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _events(job: Job, answer: Answer, echoes: Sequence[str]) -> AsyncIterator[str]:
    offsets = [0] * len(job.choices)
    for index in range(len(offsets)):
        if opened := answer.opening(index):
            yield _events_of(opened)
    for index, echo in enumerate(echoes):
        yield _events_of(answer.chunks(index, Piece(echo, [], None), 0))
        offsets[index] = len(echo)
    try:
        async for index, piece in job.pieces():
            if told := answer.chunks(index, piece, offsets[index]):
                yield _events_of(told)
            offsets[index] += len(piece.text)
    except ApiError as error:
        yield _events_of([answer.failure(error)])
        return
    yield _events_of(answer.closing(job.usage)) + answer.done


def _events_of(bodies: Sequence[dict[str, Any]]) -> str:
    """Write bodies as server-sent events; an event has a name if the body has a type."""
    return "".join(
        (f"event: {body['type']}\n" if "type" in body else "")
        + f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
        for body in bodies
    )
