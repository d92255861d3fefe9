"""`convert`: a drafter or a target as a folder of safetensors."""

import argparse
from pathlib import Path
from typing import Any

from redrafter_jax.checkpoints.convert import DTYPES, convert


def add(commands: Any) -> None:
    """State the command's arguments, to the parser's `add_subparsers()`."""
    command = commands.add_parser(
        "convert",
        help="write a drafter or a target as safetensors",
        description="Write a drafter or a target, of Apple's code or ours, as a folder of "
        "safetensors that loads the same, or rounded to another dtype.",
    )
    command.set_defaults(run=_convert)
    command.add_argument("source", help="folder or hub id, its weights safetensors or .bin")
    command.add_argument("folder", type=Path, help="to write; it must not exist, or be empty")
    command.add_argument("--dtype", choices=tuple(DTYPES), help="of all weights (as stored)")
    command.add_argument(
        "--for-apple", action="store_true", help="refuse a drafter that Apple's code cannot load"
    )


def _convert(arguments: argparse.Namespace) -> None:
    """Convert, and say what was written."""
    written = convert(
        arguments.source, arguments.folder, arguments.dtype, for_apple=arguments.for_apple
    )
    rounded = f", in {arguments.dtype}" if arguments.dtype else ""
    print(
        f"{arguments.folder}: a {written.kind} of {written.weights} weights, "
        f"{written.bytes:,} bytes, {' and '.join(written.dtypes)}; it loads the same as "
        f"{arguments.source}{rounded}."
    )
    print(f"Written: {', '.join(written.files)}")
    if written.left_out:
        print(f"Left out, for loading does not read them: {', '.join(written.left_out)}")
    if written.beyond_apple:
        print(f"Apple's code cannot load it: it does not know {', '.join(written.beyond_apple)}.")
