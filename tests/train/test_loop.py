"""`python -m train`: what it writes, what it refuses, and that a stopped run loses nothing."""

import io
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from tiny_models import assert_same
from train_runs import (
    Start,
    assert_same_weights,
    command,
    rows,
    run_train,
    settings,
    start_command,
    trial,
    weights,
)

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import load_drafter, save_drafter
from redrafter_jax.files.target_files import load_target, open_target
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.generation import generate
from redrafter_jax.lock import hold
from redrafter_jax.models.target import Target, init_target
from train.config import TrainSettings
from train.loop import Outcome, train
from train.step import train_step
from train.trial import Trial, try_drafter

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def finished(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    output = folder / "whole"
    with redirect_stdout(io.StringIO()) as told:
        run_train(folder, settings(target_folder, output))
    assert "drafter written to" in told.getvalue()
    return output


def test_a_run_that_diverges_stops_and_exports_nothing(
    target_folder: Path, tmp_path: Path, start: Start
) -> None:
    output = tmp_path / "diverged"
    steep = {"learning_rate": 1e30, "warmup_fraction": 0.0, "batch_size": 2}
    # Saved more often than logged: no checkpoint may hold what is no number.
    values = settings(target_folder, output, optimizer=steep, log_every=40, checkpoint_every=3)
    said = start(values, code=2)
    assert said.err.startswith("error: loss is nan at step 3: the run has diverged; start again in")
    assert "with optimizer.learning_rate below 1e+30" in said.err
    assert not (output / "drafter").exists()
    assert not list((output / "checkpoints").glob("[0-9]*"))


@pytest.mark.long
def test_a_late_run_ends_at_a_step_and_goes_on_with_fewer_to_the_same_bits(
    finished: Path, target_folder: Path, tmp_path: Path
) -> None:
    console = Console(quiet=True)

    def run(output: Path, steps: int, late_at: int) -> Outcome:
        stated = settings(target_folder, output, steps=steps, checkpoint_every=10)
        values = TrainSettings.model_validate(stated)
        return train(values, console, lambda step: step >= late_at)

    once, killed = tmp_path / "once", tmp_path / "killed"
    for output in (once, killed):
        outcome = run(output, 40, late_at=13)
        assert (outcome.step, outcome.exported, outcome.stopped_by) == (13, None, None)
    assert run(once, 25, late_at=25).exported
    # As if a kill came after step 20: what was decided is followed to the same head.
    assert run(killed, 25, late_at=20).step == 20
    assert run(killed, 25, late_at=25).exported
    assert_same_weights(once, killed)
    # The schedule is that of 25 steps from there on, at whose end the learning rate is zero.
    assert [row["step"] for row in rows(once)] == [5, 10, 15, 20, 25]
    before, after = rows(finished)[3], rows(once)[3]
    assert before["step"] == after["step"] == 20
    assert before["loss"] != after["loss"]
    # Without a clock a run's steps may not change.
    with pytest.raises(InputError, match=r"steps 25 \(now 20\); steps may only grow"):
        train(TrainSettings.model_validate(settings(target_folder, once, steps=20)), console)


def test_a_run_leaves_a_drafter_metrics_and_its_settings(finished: Path) -> None:
    drafter = load_drafter(finished / "drafter", "float32")
    assert drafter.config == RecurrentConfig(300, 16, 16, 1)
    logged = rows(finished)
    assert [row["step"] for row in logged] == list(range(5, 45, 5))
    assert logged[-1]["loss"] < logged[0]["loss"]
    wanted = {"tokens_per_second", "data_wait_fraction", "round_1/hard_loss", "round_0/top_5"}
    assert wanted <= logged[0].keys()
    assert yaml.safe_load((finished / "config.yaml").read_text())["steps"] == 40
    (source,) = json.loads((finished / "data.json").read_text())
    assert (source["records"], source["skips"]) == (1, [])
    assert source["rows"] == -(-source["tokens"] // 16)


def test_a_finished_run_goes_on_to_more_steps(
    finished: Path, target_folder: Path, tmp_path: Path, start: Start
) -> None:
    output = tmp_path / "longer"
    shutil.copytree(finished, output)
    said = start(settings(target_folder, output, steps=46))
    assert "resumed from step 40" in said.out
    assert [row["step"] for row in rows(output)] == [*range(5, 50, 5), 46]
    before, after = weights(finished), weights(output)
    assert not any(np.array_equal(before[name], value) for name, value in after.items())


@pytest.mark.usefixtures("ctrl_c")
def test_sigterm_and_ctrl_c_save_and_the_same_command_goes_on(
    finished: Path,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Start,
) -> None:
    output = tmp_path / "stopped"
    values = settings(target_folder, output, checkpoint_every=1000)
    # By the step before which they come, counted from the first start.
    asked = {7: signal.SIGTERM, 14: signal.SIGINT, 40: signal.SIGINT}
    steps = 0

    def step_with_signal(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps in asked:
            signal.raise_signal(asked[steps])
        return train_step(*arguments, **named)

    monkeypatch.setattr("train.loop.train_step", step_with_signal)
    for step, name, code in ((7, "SIGTERM", 0), (14, "SIGINT", 130)):
        said = start(values, code=code)
        assert f"stopped by {name} after step {step}; the same command continues" in said.out
        assert f"{name}: finishing this step and saving; Ctrl-C stops now" in said.err
        assert not (output / "drafter").exists()
    assert "resumed from step 7" in said.out

    said = start(values, code=130)
    assert "resumed from step 14" in said.out
    *_, written, verdict, stopped = said.out.splitlines()
    assert written == f"drafter written to {output}/drafter"
    assert verdict.startswith("No verdict: the head was not tried, because `acceptance` is not set")
    assert stopped == "stopped by SIGINT after step 40"
    assert_same_weights(output, finished)


def test_a_second_run_in_a_folder_that_one_works_in_is_refused(
    target_folder: Path, tmp_path: Path, start: Start
) -> None:
    output, kept = tmp_path / "held", tmp_path / "features"
    output.mkdir()
    kept.mkdir()
    values = settings(target_folder, output, steps=1)
    with hold(output, "output_dir"), hold(kept, "features"):
        told = start(values, code=2).err
        assert f"error: output_dir {output} is in use by process {os.getpid()} of " in told
        told = start(values, "features", f"features={kept}", code=2).err
        assert f"error: features {kept} is in use by process {os.getpid()} of " in told
        assert {path.name for path in output.iterdir()} == {".lock"}


@pytest.mark.long
def test_a_run_whose_folder_is_taken_away_ends_with_a_sentence(
    target_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "taken"
    values = settings(target_folder, output, steps=100_000, checkpoint_every=10)
    running = start_command(command(tmp_path, values), subprocess.PIPE)
    try:
        while running.poll() is None and not (output / "checkpoints" / "10").exists():
            time.sleep(0.05)
        (output / "checkpoints").rename(tmp_path / "away")
        # No folder of a next checkpoint can be made, for which orbax would wait ten minutes.
        (output / "checkpoints").touch()
        told, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 2
    *_, last = told.splitlines()
    assert last.startswith("error: ")
    assert "checkpoints" in last


def test_trials_that_cannot_be_are_refused_before_the_target_is_loaded(
    target_folder: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("redrafter_jax.files.target_files.TargetFiles.load")
    for changes, sentence in (
        ({"prompts": str(tmp_path / "nowhere.jsonl")}, "Cannot read "),
        ({"tree": {"beam_width": 5000}}, "beam_width is 5000, more than "),
        ({"max_new_tokens": 5000}, "max_new_tokens is 5000, but the target has 64 positions"),
    ):
        tried = trial(tmp_path, **changes)
        values = settings(target_folder, tmp_path / "refused", acceptance=tried)
        assert sentence in start(values, code=2).err


def test_the_drafter_is_tried_and_the_best_is_kept(
    target_folder: Path, tmp_path: Path, start: Start
) -> None:
    texts, output = ("def ", "return x"), tmp_path / "tried"
    # An untrained target says what no drafter of 40 steps knows: here every token is drafted.
    draft: dict[str, Any] = {"beam_width": 300, "draft_rounds": 1}
    acceptance = trial(tmp_path, *texts, every=16, max_new_tokens=12, tree=draft)
    said = start(settings(target_folder, output, acceptance=acceptance, checkpoint_every=40))

    tried = {row["step"]: row for row in rows(output) if "acceptance_length" in row}
    assert list(tried) == [16, 32, 40]
    # The prompt's pass decides 1 token of 12, five calls two each, and one the last.
    assert [row["acceptance_length"] for row in tried.values()] == [11 / 6] * 3
    assert f"best drafter, acceptance length 1.83 at step 16: {output}/best\n" in said.out
    verdict = said.out.splitlines()[-1]
    assert verdict.startswith("Too little data to tell: the head was tried on 2 texts, but 8 are")

    # What the run logged is what anyone gets who decodes with the kept drafter.
    result = generate(
        load_target(target_folder, "float32"),
        load_drafter(output / "best", "float32"),
        [open_target(target_folder).tokenizer.encode(text).ids for text in texts],
        max_new_tokens=12,
        tree=TreeConfig(**draft),
        eos_token_ids=(),
    )
    assert result.acceptance_length == 11 / 6
    assert tried[16]["acceptance_rate/depth_1"] == 5 / 6
    assert tried[16]["acceptance_calls/depth_1"] == 12


@pytest.mark.long
def test_medusa_heads_are_trained_tried_and_kept_as_they_are_at_that_step(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    output, shape = tmp_path / "tried", {"kind": "medusa", "draft_vocab_size": 40}
    changes = {"drafter": shape | {"initial_head": "target"}, "checkpoint_every": 10}
    acceptance = trial(tmp_path, every=10, tree={"beam_width": 2, "draft_rounds": 2})
    values = settings(target_folder, output, acceptance=acceptance, **changes)
    scripted = {10: 2.0, 20: 3.0, 30: 2.5, 40: 2.9}
    kept: list[LoadedHead] = []

    def tried(by: Trial, target: Target, drafter: LoadedHead) -> dict[str, float]:
        assert try_drafter(by, target, drafter)["acceptance_length"] >= 1
        kept.append(jax.tree.map(np.array, drafter))
        if len(kept) == 3:
            signal.raise_signal(signal.SIGTERM)
        return {"acceptance_length": scripted[10 * len(kept)]}

    monkeypatch.setattr("train.loop.try_drafter", tried)
    start(values)
    assert not (output / "drafter").exists()
    start(values)
    for name, step in (("best", 20), ("drafter", 40)):
        drafter = load_drafter(output / name, "float32")
        assert_same(drafter, kept[step // 10 - 1])
        assert (drafter.config.num_heads, drafter.config.draft_vocab_size) == (2, 40)
    losses = [row["loss"] for row in rows(output)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"resume": "never"}, "already holds checkpoint 40"),
        (
            {"steps": 20},
            "holds a run with other settings: steps 40 (now 20); steps may only grow after all 40 "
            "are taken; use",
        ),
        ({"seed": 1}, "holds a run with other settings: seed 0 (now 1); use another output_dir"),
    ],
)
def test_a_folder_with_another_run_is_refused(
    finished: Path, target_folder: Path, changes: dict[str, object], sentence: str, start: Start
) -> None:
    assert sentence in start(settings(target_folder, finished, **changes), code=2).err


def test_a_run_goes_on_with_no_other_data_target_or_drafter_to_begin_with(
    finished: Path, target_folder: Path, tmp_path: Path, start: Start
) -> None:
    folder, trained, tokens = (tmp_path / name for name in ("target", "trained", "rows.jsonl"))
    shutil.copytree(target_folder, folder)
    shutil.copytree(finished / "drafter", trained)
    row = '{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}\n'
    tokens.write_text(row * 8)
    sources = [{"folder": str(folder)}, {"files": [str(tokens)]}]
    changes = {
        "data": {"sources": sources, "sequence_length": 16},
        "drafter": {"exit_dim": 16, "num_draft_layers": 1, "initial_drafter": str(trained)},
        "checkpoint_every": 40,
    }
    values = settings(folder, tmp_path / "out", **changes)
    start(values)
    assert rows(tmp_path / "out")[0]["loss"] < rows(finished)[0]["loss"]

    tokens.write_text(row * 7 + row.replace("4", "5"))
    assert "a run with other contents of data.sources.1 (" in start(values, code=2).err
    tokens.write_text(row * 8)
    save_target(
        init_target(TargetConfig(300, 16, 24, 1, 2, 1, 8, 1e4, 1e-5, 64, True, (0,)), 1), folder
    )
    assert "a run with other contents of target;" in start(values, code=2).err
    shutil.copy(target_folder / "model.safetensors", folder)
    start(values)
    drafter = load_drafter(trained, "float32")
    save_drafter(jax.tree.map(lambda leaf: 2 * leaf, drafter), trained)
    assert "other contents of drafter.initial_drafter;" in start(values, code=2).err
