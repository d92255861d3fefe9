"""Servers on a free port of this machine, in a thread or as a process, and requests to them."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from places import ROOT
from schemas import END, end_tokenizer, pair
from tiny_folders import byte_tokenizer
from tokenizers import Tokenizer

from redrafter_jax import TreeConfig
from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.serving.server import LOOPBACK, Server, listen
from redrafter_jax.serving.service import ServedModel
from redrafter_jax.text.chat_template import ChatTemplate, PromptFormat, Turn
from redrafter_jax.text.tool_styles import tool_format


def write_lines(turns: Sequence[Turn], _: bool, tools: Sequence[Any] = ()) -> str:
    """Every turn is a line, and before them every tool."""
    names = [tool["function"]["name"] for tool in tools]
    return "".join(f"{line}\n" for line in [*names, *(turn["content"] for turn in turns)])


LINES = ChatTemplate("lines", write_lines, False)
# With calls of tools as Hermes writes them.
TOOL_LINES = LINES._replace(tools=True, call_style="hermes")
LIMITS = ServeConfig(slots=4, queue_limit=4, max_body=10_000, drain=5.0)
# For answers that end when their clients leave.
ROOMY = replace(LIMITS, context_length=100_000)
ENDLESS = 90_000
JSON = {"content-type": "application/json"}
# Making one takes longer than an answer.
HTTP = httpx.Client(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))


@contextmanager
def serving(
    engine: Any,
    *,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate = LINES,
    limits: ServeConfig = LIMITS,
    stop_tokens: tuple[int, ...] = (),
    listening: Callable[[str], object] = lambda base: None,
    **options: Any,
) -> Generator[str]:
    """The address of a server that runs in a thread until the end of the block.

    The tokenizer has a token for each byte if none is given. `listening` is called with the address
    while the engine is not warmed up yet.
    """
    form = PromptFormat(tokenizer or byte_tokenizer(), template, [], stop_tokens, [])
    style = template.call_style
    tools = None if style is None else tool_format(style, form.tokenizer)
    model = ServedModel("tiny", "fp_tiny", form, limits.context_length or 120, tools)
    server = Server(engine, model, limits, **options)
    bound = listen(LOOPBACK[0], 0)
    # Connections hold little of what a client does not read.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    base = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        listening(base)
        wait_until(lambda: is_ready(base))
        yield base
    finally:
        server.should_exit = True
        thread.join(timeout=120)
    assert not thread.is_alive(), "the server hangs"


@contextmanager
def constrained_server() -> Generator[str]:
    """The address of a server whose engine decodes, with a tokenizer for grammars and tools."""
    target, drafter = pair()
    engine = Engine(
        target,
        drafter,
        tree=TreeConfig(beam_width=3, draft_rounds=4),
        slots=2,
        context_length=120,
        stop_tokens=[END],
        row_counts=(),
        top_log_probs=0,
    )
    options: dict[str, Any] = {"stop_tokens": (END,), "limits": ROOMY, "template": TOOL_LINES}
    with serving(engine, tokenizer=end_tokenizer(), **options) as base:
        yield base


@contextmanager
def serving_process(
    *options: str, ready: bool = True
) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of `redrafter serve`, which is killed at the end.

    Unless it shall be `ready`, its engine compiles still.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with started(log, *options) as process:
            base = wait_until(lambda: address_in(log, process))
            if ready:
                wait_until(lambda: is_ready(base))
            yield base, process


@contextmanager
def started(log: Path, *options: str) -> Generator[subprocess.Popen[bytes]]:
    """A process of `redrafter serve`, whose stderr is a file; it is killed at the end."""
    # For a pipe that nobody reads would fill up and stop the server.
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "redrafter_jax", "serve", "--port", "0", *options],
            cwd=ROOT,
            env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stderr=said,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str | None:
    """The address that the process has told; None before it has."""
    told = log.read_text()
    assert process.poll() is None, told
    found = re.search(r"Serving \S+ at (http://\S+);", told)
    return found and found[1]


def is_ready(base: str) -> bool:
    return HTTP.get(f"{base}/health").status_code == 200


def wait_until(holds: Callable[[], Any], seconds: float = 600) -> Any:
    """What the condition returns once it holds."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.01)
    return found


def body(prompt: str = "hello", limit: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": limit, "seed": 0, **more}


def post(base: str, **options: Any) -> httpx.Response:
    return HTTP.post(f"{base}/v1/completions", **options)


@contextmanager
def streamed(base: str, **asked: Any) -> Generator[Iterator[Any]]:
    """The events of a stream; at the start of the block the engine has the request."""
    with HTTP.stream("POST", f"{base}/v1/completions", json=body(**asked, stream=True)) as answer:
        assert answer.status_code == 200
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        yield (line if line == "[DONE]" else json.loads(line) for line in lines)


def text_of(events: Iterator[Any]) -> str:
    """Of a stream that ends as it should."""
    *chunks, end = events
    assert end == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def measured(base: str) -> dict[str, float]:
    """What Prometheus would read, by name and labels."""
    lines = HTTP.get(f"{base}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def outcomes(base: str) -> dict[str, float]:
    """How many requests for completions ended so."""
    told = measured(base).items()
    return {name.split('"')[1]: value for name, value in told if "requests_total" in name}
