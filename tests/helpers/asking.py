"""Requests to a server in a thread, whose engine is a `FakeEngine`."""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fake_engine import FakeEngine
from servers import LIMITS, serving
from tiny_folders import byte_tokenizer

JSON = {"content-type": "application/json"}
# For answers that end when their clients leave.
ROOMY = LIMITS._replace(context_length=100_000)
ENDLESS = 90_000
# Making one takes longer than an answer.
HTTP = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


def fake_serving(engine: FakeEngine, **options: Any) -> Any:
    """As `serving`, with a token for each byte."""
    return serving(engine, byte_tokenizer(), **options)


def body(prompt: str = "hello", limit: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": limit, "seed": 0, **more}


def post(base: str, **options: Any) -> httpx.Response:
    return HTTP.post(f"{base}/v1/completions", **options)


@contextmanager
def streamed(base: str, **asked: Any) -> Generator[Iterator[Any]]:
    """The events of a stream; at the start of the block the engine has the request."""
    with HTTP.stream("POST", f"{base}/v1/completions", json=body(**asked, stream=True)) as answer:
        assert answer.status_code == 200
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def text_of(events: Iterator[Any]) -> str:
    """Of a stream that ends as it should."""
    *chunks, end = events
    assert end == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def outcomes(base: str) -> dict[str, float]:
    """How many requests for completions ended so."""
    lines = HTTP.get(f"{base}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("redrafter_requests_total")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}
