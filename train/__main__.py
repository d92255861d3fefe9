"""`python -m train [inspect] --config configs/demo.yaml optimizer.learning_rate=3e-4`."""

import signal
import sys

from rich.console import Console

from redrafter_jax.command_line import refuse_unknown_command, run
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.settings.arguments import parse_settings

from .config import TrainSettings
from .inspect import inspect
from .loop import train


def main() -> None:
    """Train a drafter as the settings say and tell where it is, or `inspect` its data."""
    first, *rest = sys.argv[1:] or [""]
    run(lambda: inspect(rest) if first == "inspect" else _train(first))


def _train(first: str) -> None:
    refuse_unknown_command(first, ["inspect"])
    settings = parse_settings(
        TrainSettings,
        "Train a recurrent drafter for a frozen target; `inspect`, named first, shows its data.",
        processes=True,
    )
    console = Console(quiet=not is_first())
    outcome = train(settings, console)
    if outcome.best is not None:
        console.print(
            f"best drafter, acceptance length {outcome.best.acceptance_length:.2f} at step "
            f"{outcome.best.step}: {settings.output_dir / 'best'}",
            soft_wrap=True,
            markup=False,
        )
    if outcome.exported is not None:
        console.print(f"drafter written to {outcome.exported}", soft_wrap=True, markup=False)
    if outcome.stopped_by is not None:
        goes_on = "" if outcome.exported else "; the same command goes on"
        console.print(f"stopped by {outcome.stopped_by.name} after step {outcome.step}{goes_on}")
    if outcome.stopped_by is signal.SIGINT:
        sys.exit(130)


if __name__ == "__main__":
    main()
