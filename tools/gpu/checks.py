"""Runs the tests that need a GPU, with pytest."""

import argparse
import subprocess
import sys
from typing import Any

from redrafter_jax.command_line import run
from tools.gpu.measured import run_piece


def main() -> None:
    """Run the tests and write their result."""
    # Run pytest before this process opens the device, because JAX takes most of its memory.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(ended.stdout)
    last = (ended.stdout.strip().splitlines() or ["no output"])[-1]

    def measure(_: argparse.Namespace) -> dict[str, Any]:
        return {"exit_code": ended.returncode, "said": last}

    run_piece(argparse.ArgumentParser(prog="python -m tools.gpu.checks"), measure)


if __name__ == "__main__":
    run(main)
