"""The installed commands `redrafter-train` and `redrafter-eval`.

In a wheel the two programs are packages below `redrafter_jax`; in a checkout, which an editable
installation uses, they are the folders `train` and `eval`.
"""

import sys
from importlib import import_module
from importlib.util import find_spec


def train() -> None:
    """`python -m train` from anywhere."""
    _run("train")


def evaluate() -> None:
    """`python -m eval` from anywhere."""
    _run("eval")


def _run(program: str) -> None:
    installed = find_spec(f"redrafter_jax.{program}") is not None
    package = f"redrafter_jax.{program}" if installed else program
    try:
        import_module(f"{package}.__main__").main()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("redrafter_jax", program):
            raise
        sys.exit(
            f"error: redrafter-{program} needs the package {error.name}, which is not installed; "
            "in a checkout of redrafter-jax, pip install '.[train]' installs all it needs."
        )
