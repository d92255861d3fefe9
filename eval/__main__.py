"""`python -m eval [command] --config FILE`: evaluate a target with its drafters.

Commands: compare (the default), mirror, parity, plan, serve-load, steps, tune.
"""

import logging
import sys

from redrafter_jax.command_line import ctrl_c_ends_at_once, run


def main() -> None:
    """Run the command; invalid input ends it with exit code 2 and a one-sentence error."""
    run(_main)


def _main() -> None:
    # The first import of matplotlib builds a font cache and logs that on stderr.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with ctrl_c_ends_at_once():
        from .commands import evaluate
    evaluate(sys.argv[1:])


if __name__ == "__main__":
    main()
