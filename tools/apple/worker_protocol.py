"""A line of JSON for a line of JSON: what both sides of a comparison speak.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def take_stdout() -> IO[str]:
    """The protocol's channel; whatever else prints from here on goes to stderr instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(answers: IO[str], about: dict[str, Any], answer: Callable[[Any], dict[str, Any]]) -> None:
    """Say who is there, then answer requests until stdin closes."""
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


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
