"""`python -m redrafter_jax COMMAND ...`: the commands of `redrafter_jax.commands`."""

import argparse
import difflib
import os
import sys
from typing import NoReturn

from redrafter_jax.command_line import run
from redrafter_jax.commands import chat, convert, generate
from redrafter_jax.errors import InputError

_COMMANDS = (generate, chat, convert)


class _Parser(argparse.ArgumentParser):
    """Errors as one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help.")


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    parser = _Parser(prog="python -m redrafter_jax", description="Speculative decoding.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    arguments, unknown = parser.parse_known_args()
    if unknown:
        names = vars(arguments).keys() - {"command", "run"}
        options = ["--" + name.replace("_", "-") for name in names]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"see {parser.prog} --help."
        raise InputError(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    try:
        arguments.run(arguments)
    except BrokenPipeError:
        # The reader has left (`| head`); keep Python from flushing into the pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
