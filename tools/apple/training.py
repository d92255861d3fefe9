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
from redrafter_jax.errors import InputError
from redrafter_jax.settings.arguments import parse_settings
from tools.apple.process import Process, apple_command, commit_of, require_clone, share_cpus, start
from tools.apple.training_case import write_curve_case, write_speed_case
from tools.apple.training_settings import AppleSettings

NAMES = ("ours", "apple")
_WARM_UP = 2


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
    taken: dict[str, list[Taken]] = {
        name: [take(side, 0, _WARM_UP)] for name, side in sides.items()
    }
    for turn in range(speed.turns):
        # Whoever goes first changes each time: neither always follows the other's heat.
        for name in sorted(sides, reverse=turn % 2 == 0):
            first = _WARM_UP + turn * speed.steps_per_turn
            taken[name].append(take(sides[name], first, speed.steps_per_turn))
    tokens = speed.batch_size * speed.sequence_length * speed.steps_per_turn
    rates = {name: [tokens / sum(turn.seconds) for turn in taken[name][1:]] for name in sides}
    peaks = {name: taken[name][-1].peak_bytes for name in sides}
    losses = {name: [loss for turn in taken[name] for loss in turn.losses] for name in sides}
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["apple"], strict=True)]
    return {
        "first_step_seconds": {name: taken[name][0].seconds[0] for name in sides},
        "tokens_per_second": {name: statistics.median(rates[name]) for name in sides},
        "tokens_per_second_of_turns": rates,
        "ratio": statistics.median(ratios),
        "ratio_of_turns": ratios,
        "processor_seconds_per_step": {
            name: statistics.median(turn.processor_seconds for turn in taken[name][1:])
            / speed.steps_per_turn
            for name in sides
        },
        "loaded_bytes": {name: side.about["loaded_bytes"] for name, side in sides.items()},
        "peak_bytes": peaks,
        "peak_ratio": peaks["ours"] / peaks["apple"],
        **compare_losses(losses),
    }


def compare_losses(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Both curves, and how far they are from each other relative to Apple's."""
    pairs = list(zip(losses["ours"], losses["apple"], strict=True))
    return {
        "largest_loss_difference": max(abs(ours - theirs) / theirs for ours, theirs in pairs),
        "losses": losses,
    }


def compare(settings: AppleSettings, console: Console) -> dict[str, Any]:
    """The whole comparison as one report.

    Raises:
      InputError: a side cannot be started, or target or data cannot be used.
    """
    if not Path("/proc/self/status").is_file():
        raise InputError("The comparison needs Linux, whose /proc tells a process its memory.")
    require_clone(settings.repository)
    share_cpus(settings.threads)
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "speed").mkdir()
        (folder / "curve").mkdir()
        # Both before the first measurement: what cannot be used is told at once.
        write_speed_case(folder / "speed", settings)
        steps = write_curve_case(folder / "curve", settings)
        with ExitStack() as stack, console.status("speed and memory"):
            sides = _start_both(stack, settings, folder / "speed")
            versions = {name: side.about["versions"] for name, side in sides.items()}
            speed = measure_speed(sides, settings)
        with ExitStack() as stack, console.status("losses"):
            sides = _start_both(stack, settings, folder / "curve")
            taken = {name: take(side, 0, steps) for name, side in sides.items()}
    losses = {name: side.losses for name, side in taken.items()}
    return {
        "load_average_before": load_average,
        "versions": versions | {"apple_commit": commit_of(settings.repository)},
        "settings": settings.model_dump(mode="json"),
        "speed": speed,
        "curve": compare_losses(losses),
    }


def make_table(report: dict[str, Any]) -> Table:
    """The report's figures, both sides in columns."""
    speed, curve = report["speed"], report["curve"]
    table = Table("", "ours", "Apple's", "ratio")

    def add(name: str, values: dict[str, float], ratio: str, form: str = ".0f") -> None:
        table.add_row(name, *(f"{values[side]:{form}}" for side in NAMES), ratio)

    ratios = speed["ratio_of_turns"]
    spread = f"{speed['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    add("tokens per second", speed["tokens_per_second"], spread)
    processor = speed["processor_seconds_per_step"]
    add(
        "processor seconds per step",
        processor,
        f"{processor['apple'] / processor['ours']:.2f} times less",
        ".2f",
    )
    peaks = {name: value / 1e6 for name, value in speed["peak_bytes"].items()}
    add("peak memory, MB", peaks, f"{speed['peak_ratio']:.2f}")
    loaded = {name: value / 1e6 for name, value in speed["loaded_bytes"].items()}
    add("of which before the first step, MB", loaded, "")
    add("first step, seconds", speed["first_step_seconds"], "", ".1f")
    steps = len(curve["losses"]["ours"])
    for number in sorted({0, steps // 2, steps - 1}):
        losses = {name: curve["losses"][name][number] for name in NAMES}
        add(f"loss of step {number + 1}", losses, f"{losses['ours'] / losses['apple']:.6f}", ".4f")
    return table


def main(arguments: Sequence[str]) -> None:
    """Compare, write the report, show the table."""
    settings = parse_settings(
        AppleSettings, "Compare with Apple's PyTorch trainer.", arguments, command="train"
    )
    make_folder(settings.output.parent, "the folder of output")
    report = compare(settings, Console(stderr=True))
    settings.output.write_text(json.dumps(report, indent=1) + "\n")
    console = Console()
    console.print(make_table(report))
    largest = report["curve"]["largest_loss_difference"]
    console.print(f"largest difference of two losses of a step: {100 * largest:.4f}%")
    console.print(f"OMP_WAIT_POLICY of Apple's side: {settings.wait_policy}")


def _start_both(stack: ExitStack, settings: AppleSettings, case: Path) -> dict[str, Process]:
    commands = {
        "ours": [sys.executable, "-m", "tools.apple.training_ours", str(case)],
        "apple": apple_command(settings.torch_python, settings.repository, "train", "--case", case),
    }
    return {
        name: stack.enter_context(start(name, command, settings.wait_policy))
        for name, command in commands.items()
    }
