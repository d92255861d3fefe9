"""The two sides, each in a process of its own that is idle except while it answers."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from redrafter_jax.errors import InputError
from tools.apple_training.settings import AppleSettings

NAMES = ("ours", "apple")


class Taken(NamedTuple):
    """What a side says about steps that it took.

    Attributes:
      losses: of each step.
      seconds: of each step.
      processor_seconds: of all cores, for all of them.
      peak_bytes: the most memory that its process has had until now.
    """

    losses: list[float]
    seconds: list[float]
    processor_seconds: float
    peak_bytes: int


class Side:
    """A process that takes the steps of a case."""

    def __init__(self, name: str, process: subprocess.Popen[str], stderr: IO[bytes]) -> None:
        self.name, self._process, self._stderr = name, process, stderr
        self.about = self._read()

    def take(self, first: int, steps: int) -> Taken:
        """Take steps of the case, from number `first` on."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"first": first, "steps": steps}) + "\n")
            self._process.stdin.flush()
        return Taken(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace").strip().splitlines()
            reason = said[-1] if said else "it wrote nothing"
            raise InputError(f"{self.name} ended with code {self._process.returncode}: {reason}")
        reply = json.loads(line)
        if "error" in reply:
            raise InputError(f"{self.name}: {reply['error']}.")
        return reply


def commands(settings: AppleSettings, case: Path) -> dict[str, list[str]]:
    """How each side is started."""
    worker = Path(__file__).with_name("worker.py")
    theirs = [settings.torch_python, worker, case, settings.repository]
    return {
        "ours": [sys.executable, "-m", "tools.apple_training.ours", str(case)],
        "apple": [str(part) for part in theirs],
    }


@contextmanager
def start(name: str, command: list[str]) -> Generator[Side]:
    """The side, until the block ends.

    Raises:
      InputError: it cannot be started, or says why it cannot work.
    """
    quiet = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}  # both models are folders
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | quiet,
                text=True,
            )
        except OSError as error:
            raise InputError(f"Cannot start {command[0]}: {error.strerror}.") from None
        with process:
            try:
                yield Side(name, process, stderr)
            finally:
                # Its input ends, so it leaves; one that does not listen is ended.
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
