"""`python -m eval [command] --config FILE`: what a pair of target and drafter is worth.

Commands: acceptance, drafters, parity, plan, steps; without one, speed against the autoregressive
baseline.
"""

import sys
from collections.abc import Callable, Sequence

from redrafter_jax.command_line import refuse_unknown_command, run

from .acceptance import measure_acceptance
from .drafters import compare_drafters
from .parity import check_parity
from .plan import plan
from .speed import measure_speed
from .steps import measure_steps

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "acceptance": measure_acceptance,
    "drafters": compare_drafters,
    "parity": check_parity,
    "plan": plan,
    "steps": measure_steps,
}


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    first, *rest = sys.argv[1:] or [""]
    run(lambda: COMMANDS[first](rest) if first in COMMANDS else _measure_speed(first))


def _measure_speed(first: str) -> None:
    refuse_unknown_command(first, COMMANDS)
    measure_speed(others=COMMANDS)


if __name__ == "__main__":
    main()
