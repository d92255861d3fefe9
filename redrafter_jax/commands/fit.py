"""`fit`: from a target alone to a draft head and its report."""

import argparse

from redrafter_jax.command_line import call_program, make_folder


def run(arguments: argparse.Namespace) -> None:
    """Fit a head; progress on stderr.

    Raises:
      InputError: the target cannot be used, the folder holds another fit or one that runs, there is
        too little time, or what training needs is not installed.
    """
    from redrafter_jax.lock import hold  # imports JAX

    asked = (arguments.target, arguments.output, arguments.minutes, arguments.dtype)
    make_folder(arguments.output, "OUTPUT")
    with hold(arguments.output, "OUTPUT"):
        call_program("train", "fit.run:fit", *asked)
