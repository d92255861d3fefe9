"""The file of measurements of `python -m eval compare`, from which a killed run resumes.

The first line states everything on which the measurements depend. Each other line holds one of two
things: the baseline's answers to one turn of the conversations, or the runs of all methods in one
timed turn. The runs of a timed turn are compared with each other, so they are always measured
together.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import is_first, read_lines
from redrafter_jax.text.prompts import EncodedPrompts

from .benchmark import Run, TimedTurn
from .questions import Answer, Texts

# Maximum length of a value in an error message.
_SHOWN = 24


class Measured(NamedTuple):
    """The contents of a file of measurements.

    Attributes:
      path: path of the file.
      answers: token ids of the baseline's answers to a turn of the conversations, by index of the
        sampling and number of the turn.
      turns: timed turns, by index of the sampling.
    """

    path: Path
    answers: dict[tuple[int, int], Texts]
    turns: dict[int, list[TimedTurn]]

    def answer(self, sampling: int, decode: Answer, asked: EncodedPrompts) -> Texts:
        """Return the answers to a turn; missing answers are decoded and added to the file."""
        turn = asked.turns[0]
        if (sampling, turn) not in self.answers:
            answers = self.answers[sampling, turn] = decode(asked)
            _append(self.path, {"sampling": sampling, "turn": turn, "answers": answers})
        return self.answers[sampling, turn]

    def keep_turn(self, sampling: int, turn: TimedTurn) -> None:
        """Append the runs of a timed turn to the file."""
        self.turns.setdefault(sampling, []).append(turn)
        runs = {
            name: run._asdict() | {"accept_counts": run.accept_counts.tolist()}
            for name, run in turn.runs.items()
        }
        row = {"sampling": sampling, "batch": turn.batch, "repeat": turn.repeat, "runs": runs}
        _append(self.path, row)


def open_measured(path: Path, identity: Mapping[str, Any]) -> Measured:
    """Read the measurements of an earlier run, or begin a file.

    An incomplete last line is removed. `identity` holds everything on which the measurements
    depend, by name.

    Raises:
      InputError: the file holds measurements with other settings, or is not a file of measurements.
    """
    measured, before = Measured(path, {}, {}), None
    now = json.loads(json.dumps(identity))
    lines, tail = read_lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if number == 1:
                before = dict(row["measured"])
            elif "answers" in row:
                measured.answers[row["sampling"], row["turn"]] = row["answers"]
            else:
                runs = {name: _read_run(run) for name, run in row["runs"].items()}
                turn = TimedTurn(row["batch"], row["repeat"], runs)
                measured.turns.setdefault(row["sampling"], []).append(turn)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                f"{path}, line {number} is not a measurement of eval compare; use another "
                "report_dir, or delete this file."
            ) from None
    if before is not None:
        _check_same(path, before, now)
    if is_first() and tail:
        os.truncate(path, sum(len(line) + 1 for line in lines))
    if before is None:
        _append(path, {"measured": now})
    return measured


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse measurements with another identity; the error names all fields that differ."""

    def describe(name: str) -> str:
        values = [json.dumps(side.get(name)) for side in (before, now)]
        shown = all(len(value) <= _SHOWN for value in values)
        return f"{name} {values[0]} (now {values[1]})" if shown else name

    different = [describe(name) for name in {**before, **now} if before.get(name) != now.get(name)]
    if different:
        raise InputError(
            f"{path} holds measurements with other settings: {', '.join(different)}; use another "
            "report_dir, or delete this file to measure again."
        )


def _read_run(row: Mapping[str, Any]) -> Run:
    values: dict[str, Any] = dict(row)
    values["accept_counts"] = np.asarray(row["accept_counts"], int)
    return Run(**values)


def _append(path: Path, row: dict[str, Any]) -> None:
    if is_first():
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
