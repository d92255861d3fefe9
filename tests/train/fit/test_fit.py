"""`redrafter fit`: the way from a target to a head, also when it is killed."""

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
from redrafter_jax.files.tree_table import find_tree_table
from redrafter_jax.settings.files import load_settings
from train.fit.plan import FitRequest, make_plan, write_plan
from train.fit.probe import Rates

MINUTES = 60.0


def prepare(target: Path, folder: Path) -> tuple[Path, list[str]]:
    """A folder with a small plan and much time, as a probe leaves it, and what goes on with it."""
    folder.mkdir()
    rates = Rates(50.0, 60.0, 500.0, 500.0, 5.0)
    asked = FitRequest(str(target), "float32", MINUTES)
    plan = make_plan(asked, 0.0, rows=4, rates=rates, new_tokens=8, row_tokens=64)
    changes = {"tokens": 4096, "prompts": 8, "answer_tokens": 64, "new_tokens": 8}
    write_plan(plan.model_copy(update=changes), folder)
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

    settings = load_settings(TuneSettings, whole / "tune.yaml")
    assert settings.drafter == str(whole / "run" / "drafter")
    report = json.loads((killed / "report" / "compare.json").read_text())
    for case in report["samplings"]:
        assert {ours["identical"] for ours in case["methods"].values()} == {1.0}
        assert len(case["prompts"]) == 8
    table = find_tree_table(killed / "run" / "drafter")
    assert table
    assert {tree.temperature for tree in table.trees} == {0.0, 0.7}
    # All is done: the same command says again what was found, and changes nothing.
    once_more = run_module(*command)
    assert once_more.returncode == 0
    assert once_more.stderr.splitlines()[-1] == again.stderr.splitlines()[-1]
    assert find_tree_table(killed / "run" / "drafter") == table


def test_a_folder_of_another_fit_is_refused(
    target_folder: Path, tmp_path: Path, run_redrafter: Any
) -> None:
    folder, (_, *words) = prepare(target_folder, tmp_path / "other")
    code, _, told = run_redrafter(*words[:-1], "30")
    assert code == 2
    assert "holds a fit with minutes 60.0 (now 30.0)" in told
    (folder / "plan.json").write_text("{}")
    assert "plan.json is not the plan of a fit" in run_redrafter(*words)[2]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none", "--chat-template is none, but a head is fitted on conversations"),
        ("chatml", "--chat-template chatml needs the token '<|im_start|>', but the tokenizer of"),
        ("tokenizer", "has no chat template; save one beside it as chat_template.jinja, or"),
        ("missing", "--chat-template missing names no chat template"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_the_probe(
    name: str, told: str, target_folder: Path, tmp_path: Path, run_redrafter: Any
) -> None:
    words = ["fit", str(target_folder), str(tmp_path), "--chat-template", name]
    code, _, said = run_redrafter(*words)
    assert (code, told in said) == (2, True), said
    assert not list(tmp_path.glob("*.json"))
