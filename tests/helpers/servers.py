"""Servers on a free port of this machine: in a thread, or as a process of their own."""

import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from places import ROOT
from tokenizers import Tokenizer

from redrafter_jax.serving.server import LOOPBACK, Server, listen
from redrafter_jax.serving.service import Limits, Model
from redrafter_jax.text.chat_template import ChatTemplate

# Every turn is a line.
LINES = ChatTemplate("lines", lambda turns, _: "".join(f"{t['content']}\n" for t in turns), False)
LIMITS = Limits(
    context_length=120, choices=8, log_probs=5, body=10_000, deadline=math.inf, drain=5.0
)


@contextmanager
def serving(
    engine: Any,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate = LINES,
    stop_tokens: tuple[int, ...] = (),
    limits: Limits = LIMITS,
    listening: Callable[[str], object] = lambda base: None,
    **options: Any,
) -> Generator[str]:
    """The address of a server that runs in a thread until the end of the block.

    `listening` is called with the address while the engine is not warmed up yet.
    """
    model = Model("tiny", "fp_tiny", tokenizer, template, [], stop_tokens)
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
def serving_process(
    *options: str, ready: bool = True
) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of `redrafter serve`, which is killed at the end.

    Unless it shall be `ready`, its engine compiles still.
    """
    # A file, for a pipe that nobody reads would fill up and stop the server.
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "redrafter_jax", "serve", "--port", "0", *options],
            cwd=ROOT,
            env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stderr=log,
        )

        def address() -> str | None:
            told = Path(log.name).read_text()
            assert process.poll() is None, told
            found = re.search(r"Serving \S+ at (http://\S+);", told)
            return found and found[1]

        try:
            wait_until(address)
            base = address()
            assert base is not None
            if ready:
                wait_until(lambda: is_ready(base))
            yield base, process
        finally:
            process.kill()
            process.wait()


def is_ready(base: str) -> bool:
    """Whether the server answers."""
    host, port = base.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status == 200


def wait_until(holds: Any, seconds: float = 600) -> None:
    """Until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.01)
