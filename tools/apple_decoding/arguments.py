"""What both comparisons with Apple's code are told: where each side lies, where the report goes."""

import argparse
import subprocess
from pathlib import Path

from redrafter_jax.errors import InputError


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument("--torch-python", required=True, help="a Python that has PyTorch")
    parser.add_argument("--repository", type=Path, required=True, help="clone of Apple's code")
    parser.add_argument("--target", type=Path, required=True, help="Llama in Hugging Face layout")
    parser.add_argument("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON report goes")


def check_folders(arguments: argparse.Namespace) -> None:
    """Refuse folders that are none, and a clone of something else."""
    for name in ("repository", "target", "drafter"):
        if not getattr(arguments, name).is_dir():
            raise InputError(f"--{name} {getattr(arguments, name)} is not a folder.")
    if not (arguments.repository / "recurrent_drafting").is_dir():
        raise InputError(
            f"--repository {arguments.repository} holds no recurrent_drafting folder; "
            "clone https://github.com/apple/ml-recurrent-drafter."
        )
    if arguments.output.is_dir() or not arguments.output.resolve().parent.is_dir():
        raise InputError(f"--output {arguments.output} is not a file in an existing folder.")


def commit_of(repository: Path) -> str | None:
    """The clone's commit; None where git cannot tell."""
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
