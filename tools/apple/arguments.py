"""What decode and agreement are told: where each side lies, where the report goes."""

import argparse
from pathlib import Path

from redrafter_jax.checkpoints.config_files import read_drafter_config, require_apple_layout
from redrafter_jax.errors import InputError
from tools.apple.process import WAIT_POLICIES, require_clone


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options of both."""
    parser.add_argument("--torch-python", required=True, help="a Python that has PyTorch")
    parser.add_argument("--repository", type=Path, required=True, help="clone of Apple's code")
    parser.add_argument("--target", type=Path, required=True, help="Llama in Hugging Face layout")
    parser.add_argument("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON report goes")
    parser.add_argument(
        "--wait-policies",
        nargs="+",
        choices=WAIT_POLICIES,
        default=[WAIT_POLICIES[0]],
        help="OMP_WAIT_POLICY of PyTorch's threads, each measured in turn (%(default)s)",
    )


def check_shared(arguments: argparse.Namespace) -> None:
    """Refuse folders that are none, and a clone of something else."""
    for name in ("repository", "target", "drafter"):
        if not getattr(arguments, name).is_dir():
            raise InputError(f"--{name} {getattr(arguments, name)} is not a folder.")
    require_clone(arguments.repository)
    if arguments.output.is_dir() or not arguments.output.resolve().parent.is_dir():
        raise InputError(f"--output {arguments.output} is not a file in an existing folder.")


def check_layout(arguments: argparse.Namespace) -> None:
    """Refuse a drafter that Apple's code cannot read."""
    require_apple_layout(read_drafter_config(arguments.drafter), arguments.drafter)


def at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Refuse numbers below their least, in lists too."""
    for name, minimum in least.items():
        stated = getattr(arguments, name)
        for value in stated if isinstance(stated, list) else [stated]:
            if value < minimum:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} is {value}; the least is {minimum}.")
