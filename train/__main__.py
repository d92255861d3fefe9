"""`python -m train [command] --config FILE [SETTING=VALUE ...]`: train a drafter.

Without a command, the drafter is trained. The commands inspect, features and regenerate show the
training data, store the target's hidden states, and let the target write training data.
"""

import signal
import sys
from importlib import import_module

from redrafter_jax.command_line import ctrl_c_ends_at_once, refuse_unknown_command, run

# Module of each command; the command's function has the command's name.
COMMANDS = {
    "inspect": ".inspect",
    "features": ".features",
    "regenerate": ".regenerate.run",
}


def main() -> None:
    """Run the command that the first argument names; without one, train a drafter."""
    run(_main)


def _main() -> None:
    first, *rest = sys.argv[1:] or [""]
    refuse_unknown_command(first, COMMANDS)
    if first not in COMMANDS:
        _train()
        return
    with ctrl_c_ends_at_once():
        module = import_module(COMMANDS[first], __package__)
    getattr(module, first)(rest)


def _train() -> None:
    with ctrl_c_ends_at_once():
        from rich.console import Console

        from redrafter_jax.drafters.kinds import KINDS
        from redrafter_jax.parallel.processes import is_first
        from redrafter_jax.settings.arguments import parse_settings

        from .config import TrainSettings
        from .data.report import print_line
        from .loop import train
        from .trial import describe_best
    kinds = (f"{kind.title} (drafter.kind={kind.name})" for kind in KINDS if kind.training)
    settings = parse_settings(
        TrainSettings,
        f"Train a drafter for a frozen target: {' or '.join(kinds)}. Commands: `inspect` shows "
        "the training data, `features` stores the target's hidden states for it, and "
        "`regenerate` lets the target write training data.",
        processes=True,
    )
    console = Console(quiet=not is_first())
    outcome = train(settings, console)
    if outcome.best is not None:
        print_line(
            console,
            f"best drafter, acceptance length {outcome.best.acceptance_length:.2f} at step "
            f"{outcome.best.step}: {settings.output_dir / 'best'}",
        )
    if outcome.exported is not None:
        print_line(console, f"drafter written to {outcome.exported}")
        print_line(console, describe_best(outcome.best, settings))
    if outcome.stopped_by is not None:
        goes_on = "" if outcome.exported else "; the same command continues the run"
        print_line(
            console, f"stopped by {outcome.stopped_by.name} after step {outcome.step}{goes_on}"
        )
    if outcome.stopped_by is signal.SIGINT:
        sys.exit(130)


if __name__ == "__main__":
    main()
