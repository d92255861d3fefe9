"""The processes that Ray starts for a command, and runs in which one of them is killed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

from places import ROOT
from servers import wait_until

# Where tests share two cores, Ray's own processes take their time.
SLOW = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
}


def processes_below(process: Popen[Any], name: bytes) -> set[int]:
    """The numbers of the descendants of a process that have this in their command lines."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    below, last = {process.pid}, 0
    while len(below) > last:
        last = len(below)
        below |= {number for number, parent in parents.items() if parent in below}
    return {number for number in below if name in _command(number)}


def _command(number: int) -> bytes:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return b""


def engines_of(process: Popen[Any]) -> set[int]:
    """The process numbers of the engines of `redrafter serve --replicas`."""
    return processes_below(process, b":engine")


@contextmanager
def served_by_replicas(*options: str) -> Generator[tuple[str, Popen[bytes]]]:
    """The address and the process of `redrafter serve --replicas`, once all are ready."""
    port = free_port()
    words = ["serve", "--port", str(port), *options]
    with tempfile.NamedTemporaryFile() as log:
        process = Popen(
            [sys.executable, "-m", "redrafter_jax", *words],
            cwd=ROOT,
            env=os.environ | SLOW,
            stdout=log,
            stderr=log,
        )

        def is_serving() -> bool:
            told = Path(log.name).read_text()
            assert process.poll() is None, told
            return "; ready." in told

        try:
            wait_until(is_serving)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=300)
            finally:
                process.kill()


def free_port() -> int:
    """The number of a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _is_over(process: Popen[Any], log: Path) -> bool:
    """False while the process runs; its end fails the test."""
    assert process.poll() is None, log.read_text()
    return False


def train_with_two_workers(
    *words: str, kill_when: Callable[[], bool] | None = None, program: str | None = None
) -> str:
    """Run a command of `train`; when `kill_when` holds, one of its workers is killed.

    With `program`, this Python is run in place of `train`. Returns what was written on stderr.
    """
    start = ["-m", "train"] if program is None else ["-c", program]
    command = [sys.executable, *start, *words, "workers=2", "worker_cpus=0.5"]
    with tempfile.NamedTemporaryFile() as log:
        told = Path(log.name)
        process = Popen(
            command, cwd=ROOT, env=os.environ | SLOW, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            if kill_when is not None:
                wait_until(lambda: kill_when() or _is_over(process, told))
                os.kill(max(processes_below(process, b"ray::_Worker")), signal.SIGKILL)
            process.wait(timeout=600)
        finally:
            process.kill()
        assert process.returncode == 0, told.read_text()
        return told.read_text()
