"""Our steps on a case, a request at a time: `python -m tools.apple.training_ours CASE`.

The protocol is that of `worker.py`, which takes Apple's steps.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from tools.apple.worker_protocol import answer_steps, peak_bytes, serve, take_stdout
from train.config import LossSettings, OptimizerSettings
from train.optimizer import make_optimizer
from train.step import init_state, train_step


def load(case: Path) -> Any:
    """The function that takes one step of the case: its number to loss and seconds."""
    numbers = json.loads((case / "case.json").read_text())
    arrays = dict(np.load(case / "batches.npz"))
    target = load_target(case / "target", "float32")
    drafter = load_drafter(case / "drafter", "float32")
    settings = OptimizerSettings(**numbers["optimizer"])
    steps = len(numbers["learning_rates"])
    optimizer = make_optimizer(settings, steps, lambda _: True)
    loss = LossSettings(hard=1.0, soft=0.0, chunk_length=numbers["chunk_length"])
    state = init_state(drafter, optimizer)

    def take_step(number: int) -> tuple[float, float]:
        nonlocal state
        started = time.perf_counter()
        state, metrics = train_step(
            state,
            target,
            drafter.graphdef,
            *(arrays[name][number][None] for name in ("tokens", "loss_mask", "segments")),
            rounds=numbers["rounds"],
            loss_settings=loss,
            optimizer=optimizer,
        )
        value = float(jax.block_until_ready((state, metrics))[1].loss)
        return value, time.perf_counter() - started

    return take_step


def main() -> None:
    """Load, say who is there, serve."""
    answers = take_stdout()
    take_step = load(Path(sys.argv[1]))
    versions = {name: version(name) for name in ("jax", "flax", "optax")}
    about = {"versions": versions, "loaded_bytes": peak_bytes()}
    serve(answers, about, answer_steps(take_step))


if __name__ == "__main__":
    main()
