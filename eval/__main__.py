"""`python -m eval [command] --config FILE`: what a pair of target and drafter is worth.

Commands: acceptance, drafters, gpu, load, parity, plan, ranks, sampling, steps; without one, speed
against plain decoding.
"""

import sys
from collections.abc import Callable, Sequence

from eval.acceptance import measure_acceptance
from eval.drafters import compare_drafters
from eval.gpu_page import write_gpu_page
from eval.loading_cost import measure_loading
from eval.parity import check_parity
from eval.plan import plan
from eval.ranks import measure_ranks
from eval.sampling_cost import measure_sampling
from eval.speed import measure_speed
from eval.steps import measure_steps
from redrafter_jax.command_line import refuse_unknown_command, run

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
