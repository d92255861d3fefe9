"""The installed commands `redrafter-train` and `redrafter-eval`."""

from redrafter_jax.command_line import call_program, run


def train() -> None:
    """`python -m train` from anywhere."""
    run(lambda: call_program("train", "__main__:main"))


def evaluate() -> None:
    """`python -m eval` from anywhere."""
    run(lambda: call_program("eval", "__main__:main"))
