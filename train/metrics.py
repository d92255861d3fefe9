"""Logging of a training run: a JSONL file, TensorBoard, and a status line."""

import json
import math
import re
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import write_atomically

from .config import LOSSES
from .data.report import print_line
from .step import StepMetrics

# Generated code that type checkers cannot resolve.
_PROTO: Any = event_pb2
# Seconds between two status lines without a terminal.
_LINE_SECONDS = 30


def to_scalars(metrics: StepMetrics) -> dict[str, float]:
    """Return a step's scalars by name: loss, gradient norm, losses and accuracies per round."""
    metrics = jax.device_get(metrics)
    scalars = {"loss": float(metrics.loss), "gradient_norm": float(metrics.gradient_norm)}
    for i in range(len(metrics.rounds.hard)):
        for name in LOSSES:
            scalars[f"round_{i}/{name}_loss"] = float(getattr(metrics.rounds, name)[i])
        scalars[f"round_{i}/agreement"] = float(metrics.rounds.agreement[i])
        for k, value in enumerate(metrics.rounds.top[i], start=1):
            scalars[f"round_{i}/top_{k}"] = float(value)
    return scalars


def check_finite(step: int, learning_rate: float, **scalars: float) -> None:
    """Check that scalars are finite, because later steps do not recover from NaN.

    Raises:
      InputError: a scalar is not finite.
    """
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise InputError(
                f"{name} is {value} at step {step}: the run has diverged; start again in another "
                f"output_dir with optimizer.learning_rate below {learning_rate:g}."
            )


def status_line(scalars: dict[str, float]) -> str:
    """The status line: loss, top-1 accuracy per round, acceptance length if measured, and speed."""
    top = re.compile(r"round_\d+/top_1")
    accuracy = " ".join(f"{100 * value:.0f}" for name, value in scalars.items() if top.match(name))
    parts = [f"loss {scalars['loss']:.3f}", f"top-1 % {accuracy}"]
    if "acceptance_length" in scalars:
        parts.append(f"acceptance length {scalars['acceptance_length']:.2f}")
    return "  ".join([*parts, f"{scalars['tokens_per_second']:.0f} tokens/s"])


class TrainProgress(Progress):
    """A progress bar on a terminal; status lines elsewhere."""

    def __init__(self, console: Console, steps: int, step: int) -> None:
        # The bar is last, so that narrow terminals cut it first.
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            BarColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = steps
        self._step = self.add_task("train", total=steps, completed=step, status="compiling")
        self._tried: dict[str, float] = {}
        self._line = ""
        self._printed = time.monotonic()
        # End of the first step, which compiles, and number of steps since then.
        self._compiled, self._since = 0.0, 0

    def step(self) -> None:
        """Count one finished step."""
        self.advance(self._step)
        if not self._compiled:
            self._compiled = time.monotonic()
        else:
            self._since += 1

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """Show the scalars of a step; an acceptance length is shown until the next is measured."""
        if "acceptance_length" in scalars:
            self._tried = scalars
        status = status_line(self._tried | scalars)
        self.update(self._step, status=status)
        self._line = f"step {step} of {self._steps}{self._describe_left(step)}: {status}"

    def _describe_left(self, step: int) -> str:
        """Estimated remaining time, including evaluations and checkpoints."""
        if not self._since or step == self._steps:
            return ""
        left = (time.monotonic() - self._compiled) / self._since * (self._steps - step)
        return f", about {left / 60:.0f} min left" if left >= 120 else f", about {left:.0f} s left"

    def print_status(self, due: bool) -> None:
        """Print the status line if there is no terminal.

        A line is printed if it is due, or if the last one was printed more than 30 seconds ago.
        """
        due = due or time.monotonic() - self._printed > _LINE_SECONDS
        if self._line and due and not self.console.is_terminal:
            print_line(self.console, self._line)
            self._line, self._printed = "", time.monotonic()


@contextmanager
def open_log(folder: Path, resumed_step: int) -> Generator[Callable[[int, dict[str, float]], None]]:
    """Yield a function that appends the scalars of a step to `metrics.jsonl` and to TensorBoard.

    Rows of `metrics.jsonl` after `resumed_step` are removed first; the resumed run writes them
    again.
    """
    path = folder / "metrics.jsonl"
    kept = []
    for row in path.read_text().splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):  # a killed run may leave an incomplete line
            kept += [f"{row}\n"] * (json.loads(row)["step"] <= resumed_step)
    write_atomically(path, "".join(kept))
    board = folder / "tensorboard"
    board.mkdir(exist_ok=True)
    # `EventsWriter` writes in this thread, so that a full disk raises here; `SummaryWriter` would
    # wait for its own thread.
    with path.open("a") as file, closing(EventsWriter(str(board / "events"))) as events:
        start = _PROTO.SessionLog(status=_PROTO.SessionLog.START)
        events.write_event(_event(resumed_step + 1, session_log=start))

        def write(step: int, scalars: dict[str, float]) -> None:
            file.write(json.dumps({"step": step, **scalars}) + "\n")
            file.flush()
            for name, value in scalars.items():
                events.write_event(_event(step, summary=scalar(name, value)))
            events.flush()

        yield write


def _event(step: int, **content: Any) -> Any:
    return _PROTO.Event(wall_time=time.time(), step=step, **content)
