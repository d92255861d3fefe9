"""A server process under load: every text is the one decoded alone, and nothing leaks."""

import logging
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from engine_runs import ROOM, decoded_alone
from servers import measured, serving_process, streamed, wait_until
from tiny_folders import PairFolders, decode

from redrafter_jax import SamplingConfig
from redrafter_jax.models.target import Target

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]

CLIENTS = 32
SIZES = ["--context-length", str(ROOM), "--slots", "8", "--queue-limit", "64", "--drain", "600"]
TREE = ["--beam-width", "2", "--draft-rounds", "2"]


class Asked(NamedTuple):
    """A request; `leaves` is after how many events its client goes away."""

    prompt: str
    limit: int
    temperature: float
    seed: int
    leaves: int | None


# Every fifth client leaves in the middle.
REQUESTS = [
    Asked(
        decode([(7 * number + i) % 23 for i in range(1 + number % 60)]),
        1 + (11 * number) % 50 if number % 5 else 50,
        (0.0, 0.7, 1.0)[number % 3],
        number,
        None if number % 5 else 2,
    )
    for number in range(200)
]


@pytest.fixture
def server(folders: PairFolders) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    models = ["--target", folders.target, "--drafter", folders.drafter]
    with serving_process(*models, *SIZES, *TREE) as started:
        yield started


@pytest.fixture(scope="module")
def alone(habitual_target: Target) -> list[str]:
    """What each request is answered with when it is decoded by itself."""

    def text(asked: Asked) -> str:
        sampling = SamplingConfig(asked.temperature)
        tokens, _ = decoded_alone(habitual_target, asked.prompt, asked.limit, asked.seed, sampling)
        return decode(tokens)

    return [text(asked) for asked in REQUESTS]


@contextmanager
def stream_of(base: str, asked: Asked) -> Generator[Iterator[str]]:
    """The pieces of an answer; at the start of the block the server has accepted the request."""
    sampling = {"temperature": asked.temperature, "seed": asked.seed}
    options = {"model": "target", "prompt": asked.prompt, "limit": asked.limit, **sampling}
    with streamed(base, **options) as events:
        yield (event["choices"][0]["text"] for event in events if event != "[DONE]")


def ask(base: str, asked: Asked) -> str | None:
    """The text of an answer, or None where the client leaves."""
    with stream_of(base, asked) as pieces:
        seen = list(islice(pieces, asked.leaves))
    return None if len(seen) == asked.leaves else "".join(seen)


def resident_megabytes(process: subprocess.Popen[bytes]) -> float:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096 / 2**20


def test_under_load_every_text_is_the_one_decoded_alone_and_nothing_leaks(
    server: tuple[str, subprocess.Popen[bytes]], alone: list[str]
) -> None:
    base, process = server

    def round_of_all(_: int) -> float:
        with ThreadPoolExecutor(CLIENTS) as clients:
            texts: list[Any] = list(clients.map(lambda one: ask(base, one), REQUESTS))
        for asked, text, expected in zip(REQUESTS, texts, alone, strict=True):
            assert text == (None if asked.leaves and text is None else expected)
        wait_until(lambda: measured(base)["redrafter_active_slots"] == 0)
        return resident_megabytes(process)

    sizes = [round_of_all(number) for number in range(10)]
    told = measured(base)
    assert told["redrafter_waiting_requests"] == told["redrafter_compiled_after_warm_up"] == 0
    counts = {name: value for name, value in told.items() if "redrafter_requests_total" in name}
    assert sum(counts.values()) == 10 * len(REQUESTS)
    left = sum(value for name, value in counts.items() if "client_gone" in name)
    assert left > 200
    logging.info("resident MiB after every 200 requests: %s", [round(size) for size in sizes])
    assert sizes[-1] < 1.05 * sizes[1]


def test_sigterm_ends_a_server_that_compiles_too(folders: PairFolders) -> None:
    words = ["--target", folders.target, "--no-drafter", *SIZES]
    with serving_process(*words, ready=False) as (_, process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 0


def test_sigterm_under_load_lets_the_answers_end(
    server: tuple[str, subprocess.Popen[bytes]], alone: list[str]
) -> None:
    base, process = server
    accepted, texts = Counter[int](), defaultdict[int, list[str]](list)

    def ask_on(number: int) -> None:
        with suppress(httpx.TransportError):  # the port is closed
            while True:
                with stream_of(base, REQUESTS[number]) as pieces:
                    accepted[number] += 1
                    texts[number].append("".join(pieces))

    # More of them than slots, and none leaves.
    chosen = [number for number, asked in enumerate(REQUESTS) if not asked.leaves][:CLIENTS]
    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(ask_on, number) for number in chosen]
        wait_until(lambda: len(accepted) == CLIENTS)
        process.send_signal(signal.SIGTERM)
        for client in asking:
            client.result()
    assert process.wait(timeout=600) == 0
    assert {number: [alone[number]] * accepted[number] for number in chosen} == texts
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base}/health")
