"""A server whose mesh is two processes of this machine: its texts, its end, and the loss of one."""

import signal
import socket
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_runs import ROOM, decoded_alone
from servers import (
    address_in,
    is_ready,
    measured,
    started,
    streamed,
    text_of,
    wait_until,
)
from tiny_folders import PairFolders, decode

from redrafter_jax import SamplingConfig
from redrafter_jax.models.target import Target

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]

SIZES = ["--slots", "4", "--queue-limit", "8", "--drain", "600"]
# Trees give way, so that process 0 has to tell its choices.
TREE = ["--beam-width", "2", "--draft-rounds", "2", "--adaptive", "on"]


class Job(NamedTuple):
    """The processes of a server, that leads and that follows, and what they write to stderr."""

    base: str
    processes: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]
    logs: tuple[Path, Path]

    def errors(self, number: int) -> list[str]:
        """Lines of one that tell of an error, as commands end with them."""
        lines = self.logs[number].read_text().splitlines()
        return [line for line in lines if line.startswith("error: ")]

    def codes(self, seconds: float = 120) -> list[int]:
        return [process.wait(timeout=seconds) for process in self.processes]


def job_of_two() -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return ["--mesh-model", "2", "--coordinator-address", address, "--num-processes", "2"]


@contextmanager
def together(folder: Path, *options: str) -> Generator[Job]:
    job = job_of_two()
    logs = folder / "0.log", folder / "1.log"
    with (
        started(logs[0], *options, *job, "--process-id", "0") as first,
        started(logs[1], *options, *job, "--process-id", "1") as second,
    ):
        base = wait_until(lambda: address_in(logs[0], first))
        wait_until(lambda: second.poll() is not None or is_ready(base))
        assert second.poll() is None, logs[1].read_text()
        yield Job(base, (first, second), logs)


def words_of(folders: PairFolders, room: int = ROOM) -> list[str]:
    return ["--target", folders.target, "--context-length", str(room), *SIZES]


def test_texts_are_those_decoded_alone_and_a_process_that_is_killed_ends_the_server(
    folders: PairFolders, habitual_target: Target, tmp_path: Path
) -> None:
    words = [*words_of(folders, 500), "--drafter", folders.drafter, *TREE]
    asked: list[dict[str, Any]] = [
        {
            "prompt": decode([(7 * number + i) % 23 for i in range(1 + 16 * number)]),
            "limit": 6 + 3 * number,
            "temperature": (0.0, 1.0)[number % 2],
            "seed": number,
        }
        for number in range(5)
    ]
    with together(tmp_path, *words) as job, ExitStack() as clients:

        def ask(options: dict[str, Any]) -> str:
            with streamed(job.base, model="target", **options) as events:
                return text_of(events)

        endless = {"model": "target", "prompt": "abc", "limit": 490}
        with ThreadPoolExecutor(len(asked)) as several:
            with streamed(job.base, **endless) as leaving:
                next(leaving)
                answering = [several.submit(ask, options) for options in asked]
                next(leaving)
            # Its client has left in the middle of its answer, and of theirs.
            texts = [answer.result() for answer in answering]
        wait_until(lambda: measured(job.base)["redrafter_active_slots"] == 0)
        for options, text in zip(asked, texts, strict=True):
            sampling = SamplingConfig(options["temperature"])
            expected, _ = decoded_alone(
                habitual_target, options["prompt"], options["limit"], options["seed"], sampling
            )
            assert text == decode(expected)
        assert measured(job.base)["redrafter_compiled_after_warm_up"] == 0
        assert "compiling in 2 processes" in job.logs[0].read_text()

        running = [clients.enter_context(streamed(job.base, **endless)) for _ in range(6)]
        for events in running[:2]:
            next(events)
        job.processes[1].send_signal(signal.SIGKILL)
        for events in running:  # that ran, and that waited
            *_, last = events
            assert last["error"]["code"] == "server_ends"
        code = job.processes[0].wait(timeout=60)
    assert code == 2, job.logs[0].read_text()
    said = job.logs[0].read_text()
    assert job.errors(0) == ["error: process 1 is gone; start all processes again."]
    assert "The server ends: process 1 is gone" in said
    assert "Traceback" not in said


def test_a_process_that_follows_ends_with_the_one_that_leads(
    folders: PairFolders, tmp_path: Path
) -> None:
    with together(tmp_path, *words_of(folders), "--no-drafter") as job:
        job.processes[0].send_signal(signal.SIGKILL)
        code = job.processes[1].wait(timeout=60)
    said = job.logs[1].read_text()
    assert code == 2, said
    assert job.errors(1) == [
        "error: process 0, which leads, is gone; start all processes again."
    ], said


@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_to_any_lets_the_answers_end_and_then_all(
    folders: PairFolders, tmp_path: Path, number: int
) -> None:
    with together(tmp_path, *words_of(folders), "--no-drafter") as job, ExitStack() as clients:
        asked = {"model": "target", "prompt": "abc", "limit": 40}
        running = [clients.enter_context(streamed(job.base, **asked)) for _ in range(6)]
        job.processes[number].send_signal(signal.SIGTERM)
        assert [len(text_of(events)) for events in running] == [40] * 6
        assert job.codes() == [0, 0], [log.read_text() for log in job.logs]
    assert job.errors(0) == job.errors(1) == []


def test_other_options_than_those_of_process_0_are_refused(
    folders: PairFolders, tmp_path: Path
) -> None:
    shared = [*words_of(folders), "--no-drafter", *job_of_two(), "--process-id"]
    logs = tmp_path / "0.log", tmp_path / "1.log"
    with (
        started(logs[0], *shared, "0") as first,
        started(logs[1], *shared, "1", "--max-logprobs", "3") as second,
    ):
        assert second.wait(timeout=60) == 2
        assert first.wait(timeout=60) == 2, logs[0].read_text()
    assert "error: process 1 is gone; start all processes again." in logs[0].read_text()
    assert "error: --max-logprobs is 3 in this process and None in process 0" in logs[1].read_text()
