"""The installed commands `redrafter-train` and `redrafter-eval`."""

from redrafter_jax.command_line import call_program, run


def train() -> None:
    """Run `python -m train` from any folder."""
    run(lambda: call_program("train", "__main__:main"))


def evaluate() -> None:
    """Run `python -m eval` from any folder."""
    run(lambda: call_program("eval", "__main__:main"))
