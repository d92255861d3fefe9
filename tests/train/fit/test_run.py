"""`redrafter fit`: from a target alone to a head, also when it is killed on the way."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import run_module
from train_runs import start_command

from eval.config import TuneSettings
from redrafter_jax.settings.files import load_settings
from train.fit.plan import FitRequest, make_plan, write_plan
from train.fit.probe import Rates

MINUTES = 3.0


def prepare(target: Path, folder: Path) -> tuple[Path, list[str]]:
    """A folder with a small plan, as a probe leaves it, and the command that goes on with it."""
    folder.mkdir()
    asked = FitRequest(str(target), "float32", MINUTES)
    plan = make_plan(asked, 0.0, rows=4, rates=Rates(50.0, 60.0, 500.0, 500.0), new_tokens=8)
    write_plan(plan.model_copy(update={"prompts": 2}), folder)
    return folder, ["redrafter_jax", "fit", str(target), str(folder), "--minutes", str(MINUTES)]


def kill_when(command: list[str], reached: Callable[[], bool]) -> None:
    """Start the command and kill it as soon as something is there."""
    process = start_command([sys.executable, "-m", *command])
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.long
def test_a_fit_that_is_killed_three_times_ends_with_the_same_head(
    target_folder: Path, tmp_path: Path
) -> None:
    whole, command = prepare(target_folder, tmp_path / "whole")
    finished = run_module(*command)
    assert finished.returncode == 0, finished.stderr
    for stage in ("regenerate", "features", "train --config", "eval compare", "eval tune"):
        assert f"{stage}" in finished.stderr

    killed, command = prepare(target_folder, tmp_path / "killed")
    written, features = killed / "written.jsonl", killed / "features"
    kill_when(command, lambda: written.exists() and written.read_bytes().count(b"\n") >= 2)
    kill_when(command, lambda: (features / "00000.safetensors").exists())
    checkpoints = killed / "run" / "checkpoints"
    kill_when(command, lambda: any(path.name.isdigit() for path in checkpoints.glob("*")))
    assert not (killed / "run" / "drafter").exists()
    again = run_module(*command)
    assert again.returncode == 0, again.stderr
    for name in ("written.jsonl", "held_out.jsonl", "run/drafter/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()

    load_settings(TuneSettings, whole / "tune.yaml")
    report = json.loads((killed / "report" / "compare.json").read_text())
    for case in report["samplings"]:
        assert [ours["identical"] for ours in case["methods"].values()] == [1.0, 1.0, 1.0]


def test_a_folder_of_another_fit_is_refused(
    target_folder: Path, tmp_path: Path, run_redrafter: Any
) -> None:
    _, (_, *words) = prepare(target_folder, tmp_path / "other")
    code, _, told = run_redrafter(*words[:-1], "30")
    assert code == 2
    assert "holds a fit with minutes 3.0 (now 30.0)" in told
