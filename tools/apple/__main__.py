"""`python -m tools.apple decode | agreement | train`: beside Apple's PyTorch ReDrafter.

decode: the same prompts with the same weights and trees, for speed.
agreement: do both draft the same beams and trees?
train: the same training steps, for speed, memory and loss.
"""

import argparse
import sys

from redrafter_jax.command_line import run
from tools.apple import agreement, decode, training


def main() -> None:
    """Run one of the three."""
    words = sys.argv[1:]
    if words[:1] == ["train"]:  # settings from a file, not options
        return training.main(words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m tools.apple",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="see python -m tools.apple train --help", add_help=False)
    modules = {"decode": decode, "agreement": agreement}
    for name, module in modules.items():
        module.add_arguments(
            commands.add_parser(
                name,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    arguments = parser.parse_args(words)
    return modules[arguments.command].main(arguments)


if __name__ == "__main__":
    run(main)
