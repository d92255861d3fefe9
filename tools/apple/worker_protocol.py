"""A line of JSON for a line of JSON: what both sides of a comparison speak.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def take_stdout() -> IO[str]:
    """The protocol's channel; whatever else prints from here on goes to stderr instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def say(answers: IO[str], reply: dict[str, Any]) -> None:
    """Write one line at once: the driver waits for it."""
    answers.write(json.dumps(reply) + "\n")
    answers.flush()


def serve(
    about: dict[str, Any],
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    requests: IO[str],
    answers: IO[str],
) -> None:
    """Say who is there, then answer requests until stdin closes; a failed one is answered too."""
    say(answers, about)
    for line in requests:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        say(answers, reply)


def answer_steps(
    take_step: Callable[[int], tuple[float, float]],
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers a request for training steps, from what takes one: its loss and seconds."""

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        started = time.process_time()
        taken = [take_step(asked["first"] + step) for step in range(asked["steps"])]
        losses, seconds = zip(*taken, strict=True)
        return {
            "losses": losses,
            "seconds": seconds,
            "processor_seconds": time.process_time() - started,
            "peak_bytes": peak_bytes(),
        }

    return answer


def peak_bytes() -> int:
    """The most memory that was resident at once.

    Not `getrusage`: on Linux its figure starts from what the parent process had.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
