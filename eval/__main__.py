"""`python -m eval [command] --config FILE`: what a pair of target and drafter is worth.

Commands: acceptance, drafters, parity, plan, steps; without one, speed against the autoregressive
baseline.
"""

import sys
from importlib import import_module

from redrafter_jax.command_line import ctrl_c_ends_at_once, refuse_unknown_command, run

# The function in the module of the command's name.
COMMANDS = {
    "acceptance": "measure_acceptance",
    "drafters": "compare_drafters",
    "parity": "check_parity",
    "plan": "plan",
    "steps": "measure_steps",
}


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    first, *rest = sys.argv[1:] or [""]
    refuse_unknown_command(first, COMMANDS)
    with ctrl_c_ends_at_once():
        module = import_module(f".{first if first in COMMANDS else 'speed'}", __package__)
    if first in COMMANDS:
        getattr(module, COMMANDS[first])(rest)
    else:
        module.measure_speed(others=COMMANDS)


if __name__ == "__main__":
    main()
