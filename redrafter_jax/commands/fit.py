"""`fit`: from a target alone to a draft head and its report."""

import argparse

from redrafter_jax.command_line import call_program


def run(arguments: argparse.Namespace) -> None:
    """Fit a head; progress on stderr.

    Raises:
      InputError: the target cannot be used, the folder holds another fit, there is too little time,
        or what training needs is not installed.
    """
    asked = (arguments.target, arguments.output, arguments.minutes, arguments.dtype)
    call_program("train", "fit.run:fit", *asked)
