"""What both sides train, and our steps on it: `python -m tools.apple.case CASE`.

A case is a folder: the target, the initial drafter, the batches of all steps and the optimizer's
numbers. Our side is served as worker.py serves Apple's.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redrafter_jax.drafters.bind import init_drafter
from redrafter_jax.drafters.recurrent import RecurrentConfig
from redrafter_jax.files.drafter_files import load_drafter, save_drafter
from redrafter_jax.files.target_files import load_target, save_target
from redrafter_jax.models.target import Target
from tools.apple.worker import serve, take_steps
from train.config import LossSettings, OptimizerSettings
from train.data.types import Windows
from train.loss import TOP
from train.optimizer import make_optimizer, make_schedule
from train.step import init_state, train_step


def write_case(
    folder: Path, target: Target, steps: list[Windows], rounds: int, learning_rate: float
) -> None:
    """A case of one batch a step.

    The drafter is new. Its `exit_dim` is twice the target's width: Apple's trainer skips
    `input_proj`, which is then not there.
    """
    width = target.config.hidden_size
    save_target(target, folder / "target")
    shape = RecurrentConfig(target.config.vocab_size, width, 2 * width, num_draft_layers=1)
    save_drafter(init_drafter(shape, 0), folder / "drafter")
    batches = dict(zip(Windows._fields, map(np.stack, zip(*steps, strict=True)), strict=True))
    np.savez(folder / "batches.npz", allow_pickle=False, **batches)
    # The batch is the case's own.
    optimizer = OptimizerSettings(learning_rate=learning_rate, batch_size=1)
    schedule = make_schedule(optimizer, len(steps))
    numbers = {
        "rounds": rounds,
        "accuracies": TOP,
        "optimizer": optimizer.model_dump(mode="json"),
        "learning_rates": np.asarray([schedule(step) for step in range(len(steps))]).tolist(),
    }
    (folder / "case.json").write_text(json.dumps(numbers))


def load_case(case: Path) -> Callable[[int], tuple[float, float]]:
    """The function that takes one of our steps of the case: from its number to loss and seconds."""
    numbers = json.loads((case / "case.json").read_text())
    batches = dict(np.load(case / "batches.npz"))
    target = load_target(case / "target", "float32")
    drafter = load_drafter(case / "drafter", "float32")
    settings = OptimizerSettings(**numbers["optimizer"])
    optimizer = make_optimizer(settings, len(numbers["learning_rates"]))
    state = init_state(drafter, optimizer)

    def take_step(number: int) -> tuple[float, float]:
        nonlocal state
        started = time.perf_counter()
        state, metrics = train_step(
            state,
            target,
            drafter.graphdef,
            *(batches[name][number][None] for name in Windows._fields),
            rounds=numbers["rounds"],
            loss_settings=LossSettings(hard=1.0, soft=0.0),
            optimizer=optimizer,
        )
        jax.block_until_ready(state)
        return float(metrics.loss), time.perf_counter() - started

    return take_step


def main() -> None:
    """Serve our side."""

    def load() -> tuple[dict[str, str], Callable[[Any], dict[str, Any]]]:
        take_step = load_case(Path(sys.argv[1]))
        return {"jax": version("jax")}, lambda request: take_steps(take_step, request)

    serve(load)


if __name__ == "__main__":
    main()
