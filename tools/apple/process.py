"""A side of a comparison: a process of its own that is idle except while it answers."""

import json
import os
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from redrafter_jax.errors import InputError

WAIT_POLICIES = ("PASSIVE", "ACTIVE")


class Process:
    """Answers a line of JSON with a line of JSON; `about` is what it said first."""

    def __init__(self, name: str, process: subprocess.Popen[str], stderr: IO[bytes]) -> None:
        self.name, self._process, self._stderr = name, process, stderr
        self.about = self._read()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
          InputError: it answers with an error, or has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace").strip().splitlines()
            reason = said[-1] if said else "it wrote nothing"
            raise InputError(f"{self.name} ended with code {self._process.returncode}: {reason}")
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise InputError(f"{self.name} wrote {line.strip()!r}, not JSON.") from error
        if "error" in reply:
            raise InputError(f"{self.name}: {reply['error']}.")
        return reply


def apple_command(
    torch_python: str | Path, repository: Path, task: str, *arguments: object
) -> list[str]:
    """How worker.py is started for a task, `decode` or `train`."""
    worker = Path(__file__).with_name("worker.py")
    return [str(part) for part in (torch_python, worker, task, "--repository", repository)] + [
        str(argument) for argument in arguments
    ]


@contextmanager
def start(
    name: str, command: Sequence[str], wait_policy: str = WAIT_POLICIES[0]
) -> Generator[Process]:
    """The side, until the block ends.

    Args:
      name: what errors call it.
      command: what to run.
      wait_policy: OMP_WAIT_POLICY of PyTorch's threads: PASSIVE ones sleep where ACTIVE ones spin
        while they wait for each other. Spinning is faster where nothing else runs.

    Raises:
      InputError: it cannot be started, or says why it cannot work.
    """
    # Both models are folders.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "OMP_WAIT_POLICY": wait_policy,
    }
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | environment,
                text=True,
            )
        except OSError as error:
            raise InputError(f"Cannot start {command[0]}: {error.strerror}.") from None
        with process:
            try:
                yield Process(name, process, stderr)
            finally:
                # Its input ends, so it leaves; one that does not listen is ended.
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()


def share_cpus(limit: int | None) -> int:
    """Restrict this process, and with it both sides, to `limit` CPUs; return how many it has.

    An affinity mask is the one limit that XLA's and PyTorch's thread pools both follow.

    Raises:
      InputError: there are fewer, or this system has no affinity masks.
    """
    if not hasattr(os, "sched_setaffinity"):
        if limit is not None:
            raise InputError("threads needs CPU affinity, which this system does not have.")
        return os.cpu_count() or 1
    available = sorted(os.sched_getaffinity(0))
    if limit is None:
        return len(available)
    if not 1 <= limit <= len(available):
        raise InputError(f"threads is {limit}; this process may use 1 to {len(available)} cores.")
    os.sched_setaffinity(0, available[:limit])
    return limit


def require_clone(repository: Path) -> None:
    """Refuse a folder that is no clone of Apple's code."""
    if not (repository / "recurrent_drafting").is_dir():
        raise InputError(
            f"repository {repository} holds no recurrent_drafting folder; clone "
            "https://github.com/apple/ml-recurrent-drafter."
        )


def commit_of(repository: Path) -> str | None:
    """The clone's commit; None where git cannot tell."""
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
