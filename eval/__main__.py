"""`python -m eval [command] --config FILE`: what a pair of target and drafter is worth.

Commands: acceptance, drafters, gpu, load, parity, plan, ranks, sampling, steps; without one, speed
against plain decoding.
"""

import sys
from collections.abc import Callable, Sequence

from redrafter_jax.command_line import refuse_unknown_command, run

from .acceptance import measure_acceptance
from .drafters import compare_drafters
from .gpu_page import write_gpu_page
from .loading_cost import measure_loading
from .parity import check_parity
from .plan import plan
from .ranks import measure_ranks
from .sampling_cost import measure_sampling
from .speed import measure_speed
from .steps import measure_steps

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "acceptance": measure_acceptance,
    "drafters": compare_drafters,
    "gpu": write_gpu_page,
    "load": measure_loading,
    "parity": check_parity,
    "plan": plan,
    "ranks": measure_ranks,
    "sampling": measure_sampling,
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
