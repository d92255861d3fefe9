"""What a run writes of its steps, for programs and for TensorBoard."""

import gc
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2
from train_runs import no_file_larger_than

from train.metrics import TrainProgress, open_log

PROTO: Any = event_pb2


def events(folder: Path) -> list[Any]:
    """Of all event files: https://www.tensorflow.org/tutorials/load_data/tfrecord."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(PROTO.Event.FromString(data[12 : 12 + size]))
            data = data[12 + size + 4 :]
    return found


def write_steps(folder: Path, count: int) -> None:
    with open_log(folder, 0) as write:
        for step in range(1, count + 1):
            write(step, {"loss": float(step)})


def test_a_resumed_run_writes_over_the_steps_past_its_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    # A file is named after the second in which it was begun.
    (written,) = (tmp_path / "tensorboard").iterdir()
    written.rename(written.with_name("earlier"))
    with open_log(tmp_path, 2) as write:
        write(3, {"loss": 7.0})
    assert [json.loads(row) for row in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 7.0},
    ]
    kept: dict[int, float] = {}
    for event in events(tmp_path / "tensorboard"):
        if event.HasField("session_log"):  # TensorBoard drops what lies at or past its step
            kept = {step: value for step, value in kept.items() if step < event.step}
        for value in event.summary.value:
            assert value.tag == "loss"
            kept[event.step] = value.simple_value
    assert kept == {1: 1.0, 2: 2.0, 3: 7.0}


def test_lines_tell_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = 5000.0, io.StringIO()
    monkeypatch.setattr("train.metrics.time.monotonic", lambda: clock)
    shown = TrainProgress(Console(file=told, width=200), steps=1003, step=0)
    for at in (5100.0, 5103.0, 5106.0):  # the first one compiles
        clock = at
        shown.step()
    shown.show(3, {"loss": 1.0, "tokens_per_second": 5.0})
    shown.print_status(due=True)
    assert told.getvalue().startswith("step 3 of 1003, about 50 min left: loss 1.000")
    shown.show(973, {"loss": 1.0, "tokens_per_second": 5.0})
    shown.print_status(due=True)
    assert "step 973 of 1003, about 90 s left: " in told.getvalue()


# What is left open is closed by the collector, which warns of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
def test_a_full_disk_is_an_error_and_no_wait(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), no_file_larger_than(2000):
        write_steps(tmp_path, 1000)
    gc.collect()
