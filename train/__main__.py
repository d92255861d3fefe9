"""`python -m train --config configs/demo.yaml optimizer.learning_rate=3e-4`."""

from rich.console import Console

from redrafter_jax.command_line import parse_settings, run
from train.config import TrainSettings
from train.loop import train


def main() -> None:
    """Train a drafter as the settings say and tell where it is."""
    run(_train)


def _train() -> None:
    settings = parse_settings(TrainSettings, "Train a recurrent drafter for a frozen target.")
    console = Console()
    exported = train(settings, console)
    console.print(f"drafter written to {exported}")


if __name__ == "__main__":
    main()
