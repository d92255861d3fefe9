"""`python -m eval [command] --config FILE`: what a pair of target and drafter is worth.

Commands: compare, which may be left out, parity, plan, serve-load, steps, tune.
"""

import logging
import sys

from redrafter_jax.command_line import ctrl_c_ends_at_once, run


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    # Its first import builds a font cache and says so on stderr.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with ctrl_c_ends_at_once():
        from .commands import evaluate
    evaluate(sys.argv[1:])


if __name__ == "__main__":
    main()
