"""`python -m tools.apple decode | train`: beside Apple's PyTorch ReDrafter.

decode: the same prompts with the same weights and trees, for texts, beams and speed.
train: the same training steps, for losses, speed and memory.
"""

import sys

from redrafter_jax.command_line import refuse_unknown_command, run
from redrafter_jax.errors import InputError
from tools.apple import decode, train

COMMANDS = {"decode": decode.main, "train": train.main}


def main() -> None:
    """Run one of the two."""
    command, *words = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__)
        return
    refuse_unknown_command(command, COMMANDS)
    if command not in COMMANDS:
        raise InputError(f"{command} comes before a command; name decode or train first.")
    COMMANDS[command](words)


if __name__ == "__main__":
    run(main)
