"""`python -m train.regenerate`: the same as `python -m train regenerate`."""

import sys

from redrafter_jax.command_line import run

from .run import regenerate


def main() -> None:
    """Run the command."""
    run(lambda: regenerate(sys.argv[1:], command=""))


if __name__ == "__main__":
    main()
