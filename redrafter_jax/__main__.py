"""`python -m redrafter_jax COMMAND ...`, installed as `redrafter`: see `redrafter_jax.commands`."""

import os
import sys
from importlib import import_module

from redrafter_jax.command_line import run
from redrafter_jax.commands.arguments import read_arguments


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    arguments = read_arguments(sys.argv[1:])
    # Only now JAX: help needs none, and Ctrl-C while it is imported ends as ever.
    command = import_module(f"redrafter_jax.commands.{arguments.command}")
    try:
        command.run(arguments)
    except BrokenPipeError:
        # The reader has left (`| head`); keep Python from flushing into the pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
