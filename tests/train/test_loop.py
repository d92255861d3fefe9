"""`python -m train`: what it writes, what it refuses, and that a killed run loses nothing."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import numpy as np
import pytest
import yaml
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from places import ROOT
from tiny_folders import write_untrained_target
from train_runs import command, rows, settings, weights

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target, save_target
from redrafter_jax.config import DraftConfig, DrafterConfig, TargetConfig
from redrafter_jax.drafters.recurrent import Drafter, init_drafter
from redrafter_jax.errors import InputError
from redrafter_jax.generate import generate
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.text.tokenizer import load_tokenizer
from train.__main__ import main
from train.acceptance import Best, Trial, keep_best
from train.config import AcceptanceSettings
from train.loop import check_same_inputs
from train.step import train_step

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")


@pytest.fixture(scope="module")
def programs_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one run compiled the next one finds, in this process or another."""
    values = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in values}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_untrained_target(folder, functions=400)
    return folder


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def refusal(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command that ends with exit code 2 says, run in this process."""
    monkeypatch.setattr(sys, "argv", ["train", *arguments[3:]])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    output = folder / "whole"
    arguments = command(folder, settings(target_folder, output))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as told:
        patch.setattr(sys, "argv", ["train", *arguments[3:]])
        main()
    assert "drafter written to" in told.getvalue()
    return output


def test_a_run_that_diverges_stops_and_exports_nothing(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "diverged"
    steep = {"learning_rate": 1e30, "warmup_fraction": 0.0, "batch_size": 2}
    # Saved more often than logged: no checkpoint may hold what is no number.
    values = settings(target_folder, output, optimizer=steep, log_every=40, checkpoint_every=3)
    said = refusal(command(tmp_path, values), monkeypatch, capsys)
    assert said.startswith("error: loss is nan at step 3: the run has diverged; begin again in")
    assert "less than optimizer.learning_rate=1e+30" in said
    assert not (output / "drafter").exists()
    assert not list((output / "checkpoints").glob("[0-9]*"))


def test_a_run_leaves_a_drafter_metrics_and_its_settings(finished: Path) -> None:
    drafter = load_drafter(finished / "drafter", "float32")
    assert drafter.config == DrafterConfig(300, 16, 16, 1)
    logged = rows(finished)
    assert [row["step"] for row in logged] == list(range(5, 45, 5))
    assert logged[-1]["loss"] < logged[0]["loss"]
    wanted = {"tokens_per_second", "data_wait_fraction", "round_1/hard_loss", "round_0/top_5"}
    assert wanted <= logged[0].keys()
    assert yaml.safe_load((finished / "config.yaml").read_text())["steps"] == 40
    assert list((finished / "tensorboard").iterdir())
    (source,) = json.loads((finished / "data.json").read_text())
    assert (source["records"], source["skips"]) == (1, [])
    assert source["rows"] == -(-source["tokens"] // 16)


def test_a_killed_run_resumes_to_the_same_parameters_bit_for_bit(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    done = run(command(tmp_path, settings(target_folder, whole)))
    assert done.returncode == 0, done.stderr
    assert "drafter written to" in done.stdout

    output = tmp_path / "killed"
    arguments = command(tmp_path, settings(target_folder, output))
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoint = output / "checkpoints" / "10"
    deadline = time.monotonic() + 240
    while not checkpoint.is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (output / "drafter").exists()

    # It compiles for itself, as a run on another day would.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    resumed = run(arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from step" in resumed.stdout
    ours, theirs = weights(output), weights(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert [row["step"] for row in rows(output)] == [row["step"] for row in rows(whole)]


@pytest.mark.usefixtures("ctrl_c")
def test_sigterm_and_ctrl_c_save_and_the_same_command_goes_on(
    finished: Path,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "stopped"
    arguments = command(tmp_path, settings(target_folder, output, checkpoint_every=1000))
    monkeypatch.setattr(sys, "argv", ["train", *arguments[3:]])
    steps = 0

    def step_with_signal(*values: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps in (7, 14):
            signal.raise_signal(asked)
        return train_step(*values, **named)

    asked = signal.SIGTERM
    monkeypatch.setattr("train.loop.train_step", step_with_signal)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    main()
    assert "stopped by SIGTERM after step 7; the same command goes on" in capsys.readouterr().out
    assert not (output / "drafter").exists()

    # The 14th step, counted from the first start.
    asked = signal.SIGINT
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    said = capsys.readouterr().out
    assert "resumed from step 7" in said
    assert "stopped by SIGINT after step 14; the same command goes on" in said
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert not (output / "drafter").exists()

    main()
    assert "resumed from step 14" in capsys.readouterr().out
    ours, theirs = weights(output), weights(finished)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_the_drafter_is_tried_and_the_best_is_kept(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def "}\n{"prompt": "return x"}\n')
    trial: dict[str, Any] = {"every": 16, "prompts": str(prompts), "max_new_tokens": 12}
    # An untrained target says what no drafter of 40 steps knows: here every token is drafted.
    trial["draft"] = {"beam_width": 300, "draft_rounds": 1}
    draft = DraftConfig(beam_width=300, draft_rounds=1)
    output = tmp_path / "tried"
    values = settings(target_folder, output, acceptance=trial)
    monkeypatch.setattr(sys, "argv", ["train", *command(tmp_path, values)[3:]])
    main()

    tried = {row["step"]: row for row in rows(output) if "acceptance_length" in row}
    assert list(tried) == [16, 32, 40]
    # The prompt's pass decides 1 token of 12, five calls two each, and one the last.
    assert [row["acceptance_length"] for row in tried.values()] == [11 / 6] * 3
    told = f"best drafter, acceptance length 1.83 at step 16: {output}/best\n"
    assert told in capsys.readouterr().out

    # What the run logged is what anyone gets who decodes with the kept drafter.
    tokenizer = load_tokenizer(target_folder)
    result = generate(
        load_target(target_folder, "float32"),
        load_drafter(output / "best", "float32"),
        [tokenizer.encode(text).ids for text in ("def ", "return x")],
        max_new_tokens=12,
        draft=draft,
        eos_token_ids=(),
    )
    assert result.acceptance_length == 11 / 6
    assert tried[16]["acceptance_rate/depth_1"] == 5 / 6


def test_a_better_drafter_takes_the_place_of_the_best(tmp_path: Path) -> None:
    trial = Trial(AcceptanceSettings(every=1, prompts=tmp_path), [], tmp_path / "best", "a")
    drafters = {step: init_drafter(DrafterConfig(31, 16, 16, 1), step) for step in (1, 2, 3)}
    best = None
    for step, measured in ((1, 2.0), (2, 2.5), (3, 2.5)):
        best = keep_best(trial, best, step, measured, drafters[step])
    assert best == Best(2, 2.5, "a")
    kept = load_drafter(tmp_path / "best", "float32").merge().lm_head.kernel[...]
    np.testing.assert_array_equal(kept, drafters[2].merge().lm_head.kernel[...])
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    # Measured on other prompts it does not compare.
    assert keep_best(trial._replace(measured_on="b"), best, 4, 1.5, drafters[3]).step == 4


def test_the_drafter_that_is_tried_and_kept_is_the_one_of_that_step(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def "}\n')
    trial = {"every": 10, "prompts": str(prompts), "max_new_tokens": 4}
    output = tmp_path / "tried"
    arguments = command(
        tmp_path, settings(target_folder, output, acceptance=trial, checkpoint_every=10)
    )
    monkeypatch.setattr(sys, "argv", ["train", *arguments[3:]])
    scripted = {10: 2.0, 20: 3.0, 30: 2.5, 40: 2.9}
    heads: list[np.ndarray] = []

    def tried(trial: Trial, target: Target, drafter: Drafter) -> dict[str, float]:
        heads.append(np.asarray(drafter.merge().lm_head.kernel[...]))
        if len(heads) == 3:
            signal.raise_signal(signal.SIGTERM)
        return {"acceptance_length": scripted[10 * len(heads)]}

    monkeypatch.setattr("train.loop.try_drafter", tried)
    main()
    assert not (output / "drafter").exists()
    main()
    kept = load_drafter(output / "best", "float32").merge().lm_head.kernel[...]
    np.testing.assert_array_equal(kept, heads[1])
    last = load_drafter(output / "drafter", "float32").merge().lm_head.kernel[...]
    np.testing.assert_array_equal(last, heads[3])
    assert not np.array_equal(heads[1], heads[3])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"resume": "never"}, "already holds checkpoint 40"),
        ({"steps": 80}, "holds a run with other settings for steps"),
        ({"drafter": {"exit_dim": 24}}, "does not fit these settings"),
    ],
)
def test_a_folder_with_another_run_is_refused(
    finished: Path,
    target_folder: Path,
    tmp_path: Path,
    changes: dict[str, object],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = command(tmp_path, settings(target_folder, finished, **changes))
    assert sentence in refusal(arguments, monkeypatch, capsys)


def test_a_run_does_not_go_on_with_another_target_or_other_data(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    tokens = tmp_path / "rows.jsonl"
    row = '{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}\n'
    tokens.write_text(row * 8)
    sources = [{"folder": str(folder)}, {"files": [str(tokens)]}]
    data = {"sources": sources, "sequence_length": 16}
    values = settings(folder, tmp_path / "out", data=data, checkpoint_every=40)
    arguments = command(tmp_path, values)
    monkeypatch.setattr(sys, "argv", ["train", *arguments[3:]])
    main()

    def refused() -> str:
        return refusal(arguments, monkeypatch, capsys)

    tokens.write_text(row * 7 + row.replace("4", "5"))
    assert "a run with other contents of data.sources.1 (" in refused()
    tokens.write_text(row * 8)
    text = (folder / "text.py").read_text()
    (folder / "text.py").write_text(text + "pass\n")
    assert "a run with other contents of data.sources.0 (" in refused()
    (folder / "text.py").write_text(text)
    save_target(
        init_target(TargetConfig(300, 16, 24, 1, 2, 1, 8, 1e4, 1e-5, 64, True, (0,)), 1), folder
    )
    assert "a run with other contents of target;" in refused()
    shutil.copy(target_folder / "model.safetensors", folder)
    main()


def test_a_template_of_another_day_is_told_the_way_out() -> None:
    saved, now = {"target": "a", "chats": "b", "texts": "c"}, {"target": "a", "chats": "B"}
    with pytest.raises(InputError, match=r"contents of chats; .*=\{date_string: \.\.\.\}") as told:
        check_same_inputs(saved, now | {"texts": "c"}, {"chats"}, Path("runs"))
    assert str(told.value).endswith("from the first start on.")
    with pytest.raises(InputError, match=r"contents of texts; .* or remove that one\.$"):
        check_same_inputs(saved, saved | {"texts": "C"}, {"chats"}, Path("runs"))


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    values = settings(tmp_path / "no_target", tmp_path / "file" / "x")
    said = refusal(command(tmp_path, values), monkeypatch, capsys)
    assert f"Cannot make output_dir {tmp_path}/file/x: Not a directory." in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": "nowhere/at/all"}, "'nowhere/at/all' is neither a folder nor"),
        (
            {"data": {"sources": [{"folder": "gone"}], "sequence_length": 16}},
            "'gone' is not a folder",
        ),
        (
            {"data": {"sources": [{"folder": "."}], "sequence_length": 65}},
            "the target has 64 positions",
        ),
        (
            {"data": {"sources": [{"files": ["README.md"]}], "sequence_length": 16}},
            "README.md is of no kind that is read here",
        ),
        ({"loss": {"hard": 0, "soft": 0, "lk": 0}}, "hard, soft and lk are all 0"),
        (
            {"drafter": {"exit_dim": 24, "initial_head": "target"}},
            "exit_dim is 24; with",
        ),
        (
            {"drafter": {"exit_dim": 16, "head": "low_rank"}},
            "drafter.head_rank is None",
        ),
        ({"drafter": {"cell": "lstm"}}, "drafter.cell: Input should be 'simple', 'gru' or 'sum'"),
        ({"drafter": {"context_layers": [0]}}, "drafter.context_layers holds 0; the target has 1"),
    ],
)
def test_unusable_settings_end_in_a_sentence(
    target_folder: Path,
    tmp_path: Path,
    changes: dict[str, object],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = command(tmp_path, settings(target_folder, tmp_path / "out", **changes))
    assert sentence in refusal(arguments, monkeypatch, capsys)
