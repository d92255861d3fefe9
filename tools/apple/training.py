"""Our trainer beside Apple's.

`python -m tools.apple train --config configs/apple_training.yaml`

Both sides start from the same drafter, take the same batches in the same order with the same
AdamW, and minimise the hard loss in float32: first on a target of random weights with a large
vocabulary, in turns, for speed and memory, then on a small real target, for the loss. They share
the same cores, and whoever is not measured waits for input.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from redrafter_jax.command_line import make_folder
from redrafter_jax.settings.arguments import parse_settings
from tools.apple.process import Process, apple_command, start, versions_of
from tools.apple.training_case import WARM_UP, write_curve_case, write_speed_case
from tools.apple.training_settings import AppleSettings

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


def take(side: Process, first: int, steps: int) -> Taken:
    """Let a side take steps of the case, from number `first` on."""
    return Taken(**side.ask({"first": first, "steps": steps}))


def measure_speed(sides: dict[str, Process], settings: AppleSettings) -> dict[str, Any]:
    """Warm both sides up, then let them take turns; rates, memory and their ratios."""
    speed = settings.speed
    taken = {name: [take(side, 0, WARM_UP)] for name, side in sides.items()}
    for turn in range(speed.turns):
        # Whoever goes first changes each time: neither always follows the other's heat.
        for name in sorted(sides, reverse=turn % 2 == 0):
            first = WARM_UP + turn * speed.steps_per_turn
            taken[name].append(take(sides[name], first, speed.steps_per_turn))
    tokens = speed.batch_size * speed.sequence_length * speed.steps_per_turn
    rates = {name: [tokens / sum(turn.seconds) for turn in taken[name][1:]] for name in NAMES}
    return {
        "first_step_seconds": {name: taken[name][0].seconds[0] for name in NAMES},
        "tokens_per_second": {name: statistics.median(rates[name]) for name in NAMES},
        "tokens_per_second_of_turns": rates,
        "ratio_of_turns": [
            ours / theirs for ours, theirs in zip(rates["ours"], rates["apple"], strict=True)
        ],
        "processor_seconds_per_step": {
            name: statistics.median(turn.processor_seconds for turn in taken[name][1:])
            / speed.steps_per_turn
            for name in NAMES
        },
        "loaded_bytes": {name: side.about["loaded_bytes"] for name, side in sides.items()},
        "peak_bytes": {name: taken[name][-1].peak_bytes for name in NAMES},
    }


def compare_losses(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Both curves, and how far they are from each other relative to Apple's."""
    pairs = list(zip(losses["ours"], losses["apple"], strict=True))
    return {
        "largest_loss_difference": max(abs(ours - theirs) / theirs for ours, theirs in pairs),
        "losses": losses,
    }


def compare(settings: AppleSettings) -> dict[str, Any]:
    """The whole comparison as one report.

    Raises:
      InputError: a side cannot be started, or target or data cannot be used.
    """
    # The one limit that XLA's and PyTorch's thread pools both follow.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        # Both before the first measurement: what cannot be used is told at once.
        cases = {part: Path(name, part) for part in ("speed", "curve")}
        write_speed_case(cases["speed"], settings)
        write_curve_case(cases["curve"], settings)
        with ExitStack() as stack:
            sides = _start_both(stack, settings, cases["speed"])
            versions = versions_of(sides["apple"], settings.repository)
            speed = measure_speed(sides, settings)
        with ExitStack() as stack:
            sides = _start_both(stack, settings, cases["curve"])
            curve = compare_losses(
                {name: take(side, 0, settings.curve.steps).losses for name, side in sides.items()}
            )
    return {
        "load_average_before": load_average,
        "versions": versions,
        "settings": settings.model_dump(mode="json"),
        "speed": speed,
        "curve": curve,
    }


def make_table(report: dict[str, Any]) -> Table:
    """The report's figures, both sides in columns."""
    speed, losses = report["speed"], report["curve"]["losses"]
    table = Table("", "ours", "Apple's", "ours / Apple's")

    def add(title: str, values: dict[str, float], form: str = ".0f") -> None:
        ratio = f"{values['ours'] / values['apple']:.6g}"
        table.add_row(title, *(f"{values[side]:{form}}" for side in NAMES), ratio)

    add("tokens per second", speed["tokens_per_second"])
    add("processor seconds per step", speed["processor_seconds_per_step"], ".2f")
    for title, key in (("peak memory", "peak_bytes"), ("before the first step", "loaded_bytes")):
        add(f"{title}, MB", {side: value / 1e6 for side, value in speed[key].items()})
    add("first step, seconds", speed["first_step_seconds"], ".1f")
    steps = len(losses["ours"])
    for number in sorted({0, steps // 2, steps - 1}):
        values = {side: losses[side][number] for side in NAMES}
        add(f"loss of step {number + 1}", values, ".4f")
    return table


def main(arguments: Sequence[str]) -> None:
    """Compare, write the report, show the table."""
    settings = parse_settings(
        AppleSettings, "Compare with Apple's PyTorch trainer.", arguments, command="train"
    )
    make_folder(settings.output.parent, "the folder of output")
    report = compare(settings)
    settings.output.write_text(json.dumps(report, indent=1) + "\n")
    console = Console()
    console.print(make_table(report))
    ratios = report["speed"]["ratio_of_turns"]
    console.print(
        f"speed, ours / Apple's: {statistics.median(ratios):.2f} of the median turn, "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )
    largest = report["curve"]["largest_loss_difference"]
    console.print(f"largest difference of two losses of a step: {100 * largest:.4f}%")


def _start_both(stack: ExitStack, settings: AppleSettings, case: Path) -> dict[str, Process]:
    commands = {
        "ours": [sys.executable, "-m", "tools.apple.training_ours", str(case)],
        "apple": apple_command(settings.torch_python, settings.repository, "train", case),
    }
    return {
        name: stack.enter_context(start(command, settings.wait_policy))
        for name, command in commands.items()
    }
