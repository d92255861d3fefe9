"""`python -m tools.apple decode | agreement | train`: beside Apple's PyTorch ReDrafter.

decode: the same prompts with the same weights and trees, for speed.
agreement: do both draft the same beams and trees?
train: the same training steps, for speed, memory and loss.
"""

import argparse
import sys
from pathlib import Path

from redrafter_jax.command_line import run
from tools.apple import agreement, decode, training


def main() -> None:
    """Run one of the three."""
    words = sys.argv[1:]
    if words[:1] == ["train"]:  # settings from a file, not options
        return training.main(words[1:])
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tools.apple", description=__doc__, formatter_class=layout
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="see python -m tools.apple train --help", add_help=False)
    modules = {"decode": decode, "agreement": agreement}
    for name, module in modules.items():
        options = commands.add_parser(name, description=module.__doc__, formatter_class=layout)
        add = options.add_argument
        add("--torch-python", required=True, help="a Python that has PyTorch")
        add("--repository", type=Path, required=True, help="clone of Apple's code")
        add("--target", type=Path, required=True, help="Llama in Hugging Face layout")
        add("--drafter", type=Path, required=True, help="drafter in Apple's layout")
        add("--output", type=Path, required=True, help="where the JSON report goes")
        module.add_arguments(options)
    arguments = parser.parse_args(words)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    return modules[arguments.command].main(arguments)


if __name__ == "__main__":
    run(main)
