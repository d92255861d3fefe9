"""`python -m redrafter_jax COMMAND ...`: the commands of `redrafter_jax.commands`."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import NoReturn

from redrafter_jax.command_line import run
from redrafter_jax.commands import chat, convert, generate
from redrafter_jax.errors import InputError

_COMMANDS = (generate, chat, convert)


class _Parser(argparse.ArgumentParser):
    """Errors as one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help.")

    def refuse_mistyped(self, words: Sequence[str]) -> None:
        """Name the option that was meant; argparse would first ask for those that are missing.

        Raises:
          InputError: a word is an option that there is not.
        """
        options = list(self._option_string_actions)
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            # What begins an option stands for it, and text with a space is a value.
            known = any(option.startswith(name) for option in options)
            if known or not word.startswith("--") or " " in word:
                continue
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help."
            raise InputError(f"unrecognized argument: {word}; {hint}")


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    parser = _Parser(prog="python -m redrafter_jax", description="Speculative decoding.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    words = sys.argv[1:]
    if words and words[0] in commands.choices:
        commands.choices[words[0]].refuse_mistyped(words[1:])
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except BrokenPipeError:
        # The reader has left (`| head`); keep Python from flushing into the pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
