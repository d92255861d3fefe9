"""`fit`: trains a draft head from a target alone, and reports its speed."""

import argparse

from redrafter_jax.command_line import call_program, make_folder


def run(arguments: argparse.Namespace) -> None:
    """Fit a head; progress goes to stderr.

    Raises:
      InputError: the target cannot be used, the folder holds another fit or a fit that is running,
        the time is too short, or a package that training needs is not installed.
    """
    from redrafter_jax.lock import hold  # imports JAX

    asked = (arguments.target, arguments.output, arguments.minutes)
    chosen = (arguments.dtype, arguments.chat_template)
    make_folder(arguments.output, "OUTPUT")
    with hold(arguments.output, "OUTPUT"):
        call_program("train", "fit.run:fit", *asked, *chosen)
