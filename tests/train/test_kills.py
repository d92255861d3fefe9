"""`make kills`: a training run that is ended ten times at random loses nothing."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from train_runs import assert_same_weights, command, rows, settings, start_command

STEPS, ENDINGS = 1000, 10


def steps_taken(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.long
def test_ten_endings_at_random_steps_change_no_bit(target_folder: Path, tmp_path: Path) -> None:
    changes = {"steps": STEPS, "log_every": 1, "checkpoint_every": 7}
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    arguments = command(tmp_path, settings(target_folder, whole, **changes))
    uninterrupted = start_command(arguments, subprocess.PIPE)
    said, _ = uninterrupted.communicate(timeout=900)
    assert uninterrupted.returncode == 0, said

    draw = random.Random(0)
    endings = [signal.SIGKILL, signal.SIGTERM] * (ENDINGS // 2)
    draw.shuffle(endings)
    arguments = command(tmp_path, settings(target_folder, ended, **changes))
    for ending in endings:
        process = start_command(arguments, subprocess.PIPE)
        # A resumed run first drops the rows past its checkpoint; the file is new when it does.
        written = (ended / "metrics.jsonl").stat().st_mtime_ns if steps_taken(ended) else 0
        wanted, deadline = None, time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if wanted is None:
                path = ended / "metrics.jsonl"
                if path.is_file() and path.stat().st_mtime_ns != written:
                    wanted = steps_taken(ended) + draw.randrange(40)
            elif steps_taken(ended) > wanted:
                break
            time.sleep(0.001)
        # Not at the moment that the row is written, but anywhere in the next steps.
        time.sleep(draw.uniform(0, 0.02))
        process.send_signal(ending)
        said, _ = process.communicate(timeout=300)
        expected = -signal.SIGKILL if ending == signal.SIGKILL else 0
        assert process.returncode == expected, said
        assert ending == signal.SIGKILL or "stopped by SIGTERM after step" in said, said
        assert not (ended / "drafter").exists()

    last = start_command(arguments, subprocess.PIPE)
    said, _ = last.communicate(timeout=900)
    assert last.returncode == 0, said
    assert "resumed from step" in said
    assert_same_weights(ended, whole)
    losses = [[(row["step"], row["loss"]) for row in rows(run)] for run in (ended, whole)]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, STEPS + 1))
