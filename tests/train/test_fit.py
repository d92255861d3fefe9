"""`redrafter fit`: its sizes, and the way from a target to a head, also when it is killed."""

import json
import re
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
from redrafter_jax import load_target
from redrafter_jax.checkpoints.huggingface import load_target_config
from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import load_settings
from train.config import TrainSettings
from train.fit import probe
from train.fit.plan import FitRequest, make_plan, read_plan, write_plan
from train.fit.probe import Rates, measure_rates
from train.fit.run import train_settings

MINUTES = 3.0
RATES = Rates(alone=10.0, written=100.0, read=1000.0, trained=400.0)
ASKED = FitRequest("model", "float32", 20.0)


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
    folder, (_, *words) = prepare(target_folder, tmp_path / "other")
    code, _, told = run_redrafter(*words[:-1], "30")
    assert code == 2
    assert "holds a fit with minutes 3.0 (now 30.0)" in told
    (folder / "plan.json").write_text("{}")
    assert "plan.json is no plan of a fit" in run_redrafter(*words)[2]


def test_the_time_is_divided_among_writing_reading_and_four_passes_of_training() -> None:
    plan = make_plan(ASKED, spent=2.0, rows=48, rates=RATES, new_tokens=96)
    # 18 minutes, of which 78% are for tokens: 1/100 + 1/1000 + 4/400 seconds each.
    assert plan.tokens == int(18 * 60 * 0.78 / 0.021)
    assert plan.seconds["write"] == pytest.approx(plan.tokens / 100)
    assert plan.seconds["train"] == pytest.approx(plan.tokens / 100)
    # 12% of 18 minutes are 1296 tokens at 10 a second, of 6 runs of 96 each: two prompts.
    assert plan.prompts == 2
    # However fast it measures, few of the texts are held out.
    quick = RATES._replace(alone=1000.0)
    assert make_plan(ASKED, spent=17.0, rows=48, rates=quick, new_tokens=96).prompts == 3


def test_too_little_time_is_refused_with_what_is_enough() -> None:
    asked = ASKED._replace(minutes=3.0)
    with pytest.raises(InputError, match=r"In 3 minutes .* 4096 are needed") as refusal:
        make_plan(asked, spent=2.0, rows=48, rates=RATES, new_tokens=96)
    found = re.search(r"--minutes (\d+) or more", str(refusal.value))
    assert found
    enough = asked._replace(minutes=float(found[1]))
    assert make_plan(enough, spent=2.0, rows=48, rates=RATES, new_tokens=96).tokens >= 4096


def test_a_plan_is_kept_for_the_same_model_alone(tmp_path: Path) -> None:
    assert read_plan(tmp_path, ASKED) is None
    plan = make_plan(ASKED, spent=2.0, rows=48, rates=RATES, new_tokens=96)
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path, ASKED) == plan
    for other in (ASKED._replace(target="other"), ASKED._replace(target_dtype="bfloat16")):
        with pytest.raises(InputError, match=r"holds a fit with target\w* \w+ \(now \w+\); use"):
            read_plan(tmp_path, other)


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
def test_rates_are_tokens_by_the_clock(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which every timed call takes a quarter of a second."""
    config = load_target_config(target_folder)
    asked = FitRequest(str(target_folder), "float32", 1.0)
    values = train_settings(asked, tmp_path, config, 1)
    settings = TrainSettings.model_validate(values)
    times = iter(range(1000))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(times) / 4)
    monkeypatch.setattr(probe, "_SECONDS", 0.5)
    rates = measure_rates(load_target(target_folder, "float32"), settings, rows=3, top_k=8)
    positions = 4 * 64 / 0.25
    assert rates == Rates(alone=16 / 0.25, written=3 * 16 / 0.25, read=positions, trained=positions)
