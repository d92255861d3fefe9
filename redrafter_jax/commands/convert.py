"""`convert`: a drafter or a target as a folder of safetensors."""

import argparse

from redrafter_jax.checkpoints.convert import convert


def run(arguments: argparse.Namespace) -> None:
    """Convert, and say what was written.

    Raises:
      InputError: the source cannot be read, or the folder not be written.
    """
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
