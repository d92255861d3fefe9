"""`python -m eval [command] --config FILE`: what a pair of target and drafter is worth.

Commands: acceptance, parity, plan, steps; without one, speed beside the autoregressive baseline.
"""

import sys

from redrafter_jax.command_line import ctrl_c_ends_at_once, run


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    with ctrl_c_ends_at_once():
        from .commands import evaluate
    evaluate(sys.argv[1:])


if __name__ == "__main__":
    main()
