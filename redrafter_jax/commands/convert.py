"""`convert`: a drafter or a target as a folder of safetensors."""

import argparse

from redrafter_jax.checkpoints.convert import convert


def run(arguments: argparse.Namespace) -> None:
    """Convert, and say what was written.

    Raises:
      InputError: the source cannot be read, or the folder not be written.
    """
    for sentence in convert(
        arguments.source, arguments.folder, arguments.dtype, for_apple=arguments.for_apple
    ):
        print(sentence)
