"""Our trainer beside Apple's.

`python -m tools.apple train --config configs/apple_training.yaml`

Both sides start from the same drafter, take the same batches in the same order with the same
AdamW, and minimise the hard loss in float32: first on a target of random weights with a large
vocabulary, for speed and memory, then on a small real target, for the loss. They take turns on the
same cores, and whoever is not measured waits for input.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from redrafter_jax.command_line import make_folder_of
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings
from tools.apple.case import write_case
from tools.apple.process import (
    SIDES,
    Process,
    WaitPolicy,
    apple_command,
    in_turns,
    start,
    versions_of,
)
from train.data.batches import make_batches
from train.data.documents import load_documents
from train.data.rows import make_rows
from train.data.settings import DataSettings
from train.data.types import Windows

# Steps that each side takes before speed is measured.
WARM_UP = 2


class CaseSettings(Settings):
    """After two steps to warm up each side takes `turns` turns of `steps_per_turn` steps."""

    batch_size: PositiveInt
    turns: PositiveInt = 3
    steps_per_turn: PositiveInt = 2

    @property
    def steps(self) -> int:
        """In all."""
        return WARM_UP + self.turns * self.steps_per_turn


class RandomSettings(CaseSettings):
    """A target of random weights, rows of random tokens, all of which carry loss."""

    target: TargetConfig
    sequence_length: PositiveInt

    def make(self) -> tuple[Target, list[Windows]]:
        """The target and a batch for each step."""
        shape = (self.steps, self.batch_size, self.sequence_length)
        tokens = np.random.default_rng(0).integers(0, self.target.vocab_size, shape, np.int32)
        ones = np.ones(shape[1:], np.int32)
        batches = [Windows(batch, ones.astype(bool), ones) for batch in tokens]
        return init_target(self.target, 0), batches


class RealSettings(CaseSettings):
    """A real target and the rows that `python -m train` would see, in its order."""

    target: Path
    data: DataSettings

    def make(self) -> tuple[Target, list[Windows]]:
        """The target and a batch for each step."""
        if self.data.pack:
            raise InputError(
                "curve.data.pack is true, but in Apple's trainer the documents of a row would see "
                "each other; leave it out."
            )
        files = open_target(self.target)
        target = files.load("float32")
        end_token = target.config.eos_token_ids[0]
        mixture = [
            (make_rows(source, self.data, end_token).windows, source.weight)
            for source in load_documents(self.data, files)
        ]
        batches = make_batches(mixture, self.batch_size, self.data.shuffle_seed)
        return target, [
            Windows(batch["tokens"], batch["loss_mask"], batch["segments"])
            for batch in islice(batches, self.steps)
        ]


class AppleSettings(Settings):
    """`python -m tools.apple train`: the same steps by Apple's trainer and by ours.

    `speed` is meant for speed and memory, `curve` for the losses; both are measured of both.
    `torch_python` is a Python with PyTorch and a transformers 4 that Apple's code can use (4.47.1
    can); `repository` a clone of github.com/apple/ml-recurrent-drafter. `threads` is the
    processor's cores that both sides share; `wait_policy` is OMP_WAIT_POLICY of PyTorch's threads.
    """

    torch_python: Path
    repository: Path
    speed: RandomSettings
    curve: RealSettings
    draft_rounds: PositiveInt
    learning_rate: PositiveFloat = 1e-3
    threads: PositiveInt = 2
    wait_policy: WaitPolicy = "PASSIVE"
    output: Path


def take_turns(sides: dict[str, Process], case: CaseSettings, step_tokens: int) -> dict[str, Any]:
    """Warm both sides up, then let them take turns; losses, rates, memory and their ratios."""
    taken = {name: [sides[name].ask(first=0, steps=WARM_UP)] for name in SIDES}
    steps = case.steps_per_turn
    for turn, name in in_turns(case.turns):
        taken[name].append(sides[name].ask(first=WARM_UP + turn * steps, steps=steps))
    turns = {name: taken[name][1:] for name in SIDES}
    rates = {
        name: [steps * step_tokens / sum(turn["seconds"]) for turn in turns[name]] for name in SIDES
    }
    losses = {name: [loss for turn in taken[name] for loss in turn["losses"]] for name in SIDES}
    return {
        "tokens_per_second_of_turns": rates,
        "ratio_of_turns": [
            ours / apple for ours, apple in zip(rates["ours"], rates["apple"], strict=True)
        ],
        "tokens_per_second": {name: median(rates[name]) for name in SIDES},
        "processor_seconds_per_step": {
            name: median(turn["processor_seconds"] for turn in turns[name]) / steps
            for name in SIDES
        },
        "first_step_seconds": {name: taken[name][0]["seconds"][0] for name in SIDES},
        "peak_megabytes": {name: taken[name][-1]["peak_bytes"] / 1e6 for name in SIDES},
        "loaded_megabytes": {name: sides[name].about["loaded_bytes"] / 1e6 for name in SIDES},
        "losses": losses,
        "largest_loss_difference": max(
            abs(ours - apple) / apple
            for ours, apple in zip(losses["ours"], losses["apple"], strict=True)
        ),
    }


def compare(settings: AppleSettings) -> dict[str, Any]:
    """The whole comparison as one report."""
    # The one limit that XLA's and PyTorch's thread pools both follow.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    report: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    report["settings"] = settings.model_dump(mode="json")
    cases = {"speed": settings.speed, "curve": settings.curve}
    # Both before the first measurement, so that errors come at once.
    made = {name: case.make() for name, case in cases.items()}
    for name, (target, batches) in made.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            write_case(path, target, batches, settings.draft_rounds, settings.learning_rate)
            mine = [sys.executable, "-m", "tools.apple.case", str(path)]
            theirs = apple_command(settings.torch_python, settings.repository, "train", path)
            policy = settings.wait_policy
            with start(mine, policy) as ours, start(theirs, policy) as apple:
                report["versions"] = versions_of(apple, settings.repository)
                sides = {"ours": ours, "apple": apple}
                report[name] = take_turns(sides, cases[name], batches[0].tokens.size)
    return report


def main(words: Sequence[str]) -> None:
    """Compare, write the report, print the ratios."""
    description = "Compare with Apple's PyTorch trainer."
    settings = parse_settings(AppleSettings, description, words, command="train")
    make_folder_of(settings.output, "output")
    report = compare(settings)
    settings.output.write_text(json.dumps(report, indent=1) + "\n")
    for name in ("speed", "curve"):
        ratios, largest = report[name]["ratio_of_turns"], report[name]["largest_loss_difference"]
        print(
            f"{name}: speed, ours / Apple's: {median(ratios):.2f} of the median turn, "
            f"{min(ratios):.2f} to {max(ratios):.2f}; largest difference of two losses of a step: "
            f"{100 * largest:.4f}%"
        )
