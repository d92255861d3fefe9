"""Our trainer beside Apple's.

`python -m tools.apple_training --config configs/apple_training.yaml`

Both sides start from the same drafter, take the same batches in the same order with the same
AdamW, and minimise the hard loss in float32: first on a target of random weights with a large
vocabulary, in turns, for speed and memory, then on a small real target, for the loss. They share
the same cores, and whoever is not measured waits for input.
"""

import json
import os
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from redrafter_jax.command_line import make_folder, run
from redrafter_jax.errors import InputError
from redrafter_jax.settings.arguments import parse_settings
from tools.apple_training.case import write_curve_case, write_speed_case
from tools.apple_training.settings import AppleSettings
from tools.apple_training.sides import NAMES, Side, Taken, commands, start

_WARM_UP = 2


def measure_speed(sides: dict[str, Side], settings: AppleSettings) -> dict[str, Any]:
    """Warm both sides up, then let them take turns; rates, memory and their ratios."""
    speed = settings.speed
    taken: dict[str, list[Taken]] = {name: [side.take(0, _WARM_UP)] for name, side in sides.items()}
    for turn in range(speed.turns):
        # Whoever goes first changes each time: neither always follows the other's heat.
        for name in sorted(sides, reverse=turn % 2 == 0):
            first = _WARM_UP + turn * speed.steps_per_turn
            taken[name].append(sides[name].take(first, speed.steps_per_turn))
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


def share_cores(count: int) -> None:
    """Restrict this process, and with it both sides, to so many cores.

    An affinity mask is the one limit that XLA's and PyTorch's thread pools both follow.

    Raises:
      InputError: there are fewer, or this is not Linux, whose /proc also tells the memory.
    """
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/status").is_file():
        raise InputError("The comparison needs Linux, for its affinity masks and /proc.")
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise InputError(f"threads is {count}, but this process has {len(cores)} cores; lower it.")
    os.sched_setaffinity(0, cores[:count])


def compare(settings: AppleSettings, console: Console) -> dict[str, Any]:
    """The whole comparison as one report.

    Raises:
      InputError: a side cannot be started, or target or data cannot be used.
    """
    if not (settings.repository / "recurrent_drafting").is_dir():
        raise InputError(
            f"repository {settings.repository} holds no recurrent_drafting folder; clone "
            "https://github.com/apple/ml-recurrent-drafter."
        )
    share_cores(settings.threads)
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
            taken = {name: side.take(0, steps) for name, side in sides.items()}
    losses = {name: side.losses for name, side in taken.items()}
    return {
        "load_average_before": load_average,
        "versions": versions | {"apple_commit": _commit_of(settings.repository)},
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


def main() -> None:
    """Compare, write the report, show the table."""
    settings = parse_settings(AppleSettings, "Compare with Apple's PyTorch trainer.")
    make_folder(settings.output.parent, "the folder of output")
    report = compare(settings, Console(stderr=True))
    settings.output.write_text(json.dumps(report, indent=1) + "\n")
    console = Console()
    console.print(make_table(report))
    largest = report["curve"]["largest_loss_difference"]
    console.print(f"largest difference of two losses of a step: {100 * largest:.4f}%")


def _start_both(stack: ExitStack, settings: AppleSettings, case: Path) -> dict[str, Side]:
    return {
        name: stack.enter_context(start(name, command))
        for name, command in commands(settings, case).items()
    }


def _commit_of(repository: Path) -> str | None:
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    run(main)
