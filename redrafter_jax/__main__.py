"""`python -m redrafter_jax COMMAND ...`, installed as `redrafter`: see `redrafter_jax.commands`."""

import os
import sys
from importlib import import_module

from redrafter_jax.command_line import ctrl_c_ends_at_once, run


def main() -> None:
    """Run the command in `sys.argv`; on invalid input, print one sentence and exit with code 2."""
    run(_main)


def _main() -> None:
    # Imported here, before JAX, so that Ctrl-C works as usual; help needs no JAX.
    from redrafter_jax.commands.parser import read_arguments

    arguments = read_arguments(sys.argv[1:])
    with ctrl_c_ends_at_once():
        command = import_module(f"redrafter_jax.commands.{arguments.command}")
    try:
        command.run(arguments)
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`); keep Python from flushing into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
