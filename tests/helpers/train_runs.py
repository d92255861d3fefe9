"""Small training runs for tests: their settings, their command, and what they leave."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeAlias

import numpy as np
import pytest
import yaml
from chat_folders import write_lines
from places import ROOT
from safetensors.numpy import load_file

from train.__main__ import main

# The fixture `start`: from settings, words of the command line, and with `code=` the exit code, to
# what was printed.
Start: TypeAlias = Callable[..., Any]


def settings(target_folder: Path, output: Path, **changes: object) -> dict[str, object]:
    return {
        "target": str(target_folder),
        "target_dtype": "float32",
        "drafter": {"exit_dim": 16, "num_draft_layers": 1},
        "draft_rounds": 2,
        "data": {"sources": [{"folder": str(target_folder)}], "sequence_length": 16},
        "loss": {"soft": 1.0, "hard": 0.5, "chunk_length": 8},
        "optimizer": {"learning_rate": 1e-2, "batch_size": 2, "accumulation_steps": 2},
        "steps": 40,
        "log_every": 5,
        "checkpoint_every": 5,
        "output_dir": str(output),
    } | changes


def trial(folder: Path, *prompts: str, **changes: object) -> dict[str, object]:
    """Settings of `acceptance`; without prompts there is one."""
    files = write_lines(
        folder / "prompts.jsonl", *({"prompt": prompt} for prompt in prompts or ["def "])
    )
    return {"every": 1, "prompts": files, "max_new_tokens": 4} | changes


def command(folder: Path, values: dict[str, object]) -> list[str]:
    path = folder / f"{Path(str(values['output_dir'])).name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return [sys.executable, "-m", "train", "--config", str(path)]


def start_command(arguments: list[str], output: int = subprocess.DEVNULL) -> Popen[str]:
    """Start it, compiling quickly; what it prints goes to `output`."""
    return Popen(
        arguments,
        cwd=ROOT,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_train(folder: Path, values: dict[str, object], *words: str) -> object:
    """`python -m train` with these settings, in this process: the exit code.

    Words are the command, if it is not training, and overrides.
    """
    *_, path = command(folder, values)
    named, overrides = ([word for word in words if ("=" in word) == told] for told in (False, True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", *named, "--config", path, *overrides])
        try:
            main()
        except SystemExit as left:
            return left.code
    return 0


@contextmanager
def no_file_larger_than(size: int) -> Generator[None]:
    """As on a full disk, a file that grows beyond so many bytes cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def weights(output: Path) -> dict[str, np.ndarray]:
    return load_file(output / "drafter" / "model.safetensors")


def rows(output: Path) -> list[dict[str, float]]:
    """The whole lines: a run that goes on may be writing one."""
    text = (output / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def assert_same_weights(ours: Path, theirs: Path) -> None:
    np.testing.assert_equal(weights(ours), weights(theirs))
