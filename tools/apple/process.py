"""Two sides that take turns, each a process that is idle except while it answers."""

import json
import os
import subprocess
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from redrafter_jax.errors import InputError

# OMP_WAIT_POLICY of PyTorch's threads: PASSIVE ones sleep where ACTIVE ones spin while they wait
# for each other. Spinning is faster where nothing else runs.
type WaitPolicy = Literal["PASSIVE", "ACTIVE"]

SIDES = ("ours", "apple")


def in_turns(count: int) -> Iterator[tuple[int, str]]:
    """Both sides so many times; which goes first changes, so that neither always runs second."""
    for turn in range(count):
        yield from ((turn, name) for name in (SIDES if turn % 2 == 0 else reversed(SIDES)))


class Process:
    """Answers a line of JSON with a line of JSON; `about` is its first line."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name, self._process = name, process
        self.about = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        raise InputError(f"{self._name} ended with code {code}; its own message is above.")


@contextmanager
def start(command: Sequence[str], wait_policy: WaitPolicy = "PASSIVE") -> Generator[Process]:
    """Run a side until the block ends; the command must exit when its input ends."""
    # Both models are folders.
    environment = {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": wait_policy}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=os.environ | environment, text=True
        )
    except OSError as error:
        raise InputError(f"Cannot start {command[0]}: {error.strerror}.") from None
    with process:
        yield Process(command[0], process)


def apple_command(
    torch_python: str | Path, repository: Path, task: str, *folders: Path
) -> list[str]:
    """The command line of worker.py for `decode TARGET DRAFTER` or `train CASE`."""
    worker = Path(__file__).with_name("worker.py")
    return [str(part) for part in (torch_python, worker, repository, task, *folders)]


def versions_of(apple: Process, repository: Path) -> dict[str, dict[str, str]]:
    """The versions on each side."""
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "ours": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
        "apple": apple.about["versions"] | {"commit": commit},
    }
