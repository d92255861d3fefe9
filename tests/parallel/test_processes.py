"""Several processes that are one job: what starts them, and that they train as one process does."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from chat_folders import write_lines
from places import ROOT
from servers import wait_until
from tiny_folders import write_pair, write_untrained_target, write_yaml
from train_runs import command, rows, settings, trial, weights

from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.parallel.processes import is_first, join, rows_of_process


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What JAX's runtime is started with, in place of starting it."""
    calls: list[Any] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **_: calls.append(given))
    return calls


VARIABLES = {
    "JAX_COORDINATOR_ADDRESS": "first:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


@pytest.mark.parametrize(
    ("given", "variables", "started"),
    [
        ({}, {}, []),  # one process joins nobody
        ({}, {"SLURM_STEP_NUM_TASKS": "1"}, []),
        ({}, VARIABLES, [("first:1234", 4, 3)]),
        ({"process_id": 1}, VARIABLES, [("first:1234", 4, 1)]),
        # Schedulers are left to JAX.
        ({}, {"SLURM_STEP_NUM_TASKS": "2"}, [(None, None, None)]),
        ({}, {"OMPI_COMM_WORLD_SIZE": "2"}, [(None, None, None)]),
    ],
)
def test_options_come_before_variables(
    joined: list[Any], given: dict[str, Any], variables: dict[str, str], started: list[Any]
) -> None:
    join(**given, environment=variables)
    assert joined == started
    assert is_first()


@pytest.mark.parametrize(
    ("given", "variables", "words"),
    [
        ({"process_id": 0}, {}, "also needs --coordinator-address, --num-processes; give"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            {},
            "process_id is 2; of 2 processes it must be 0 to 1",
        ),
        (
            {"coordinator_address": "a:1", "num_processes": 0, "process_id": 0},
            {},
            "num_processes is 0; it must be 1 or more",
        ),
        ({"process_id": 0}, {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'"),
        ({}, {"SLURM_STEP_NUM_TASKS": "all"}, "SLURM_STEP_NUM_TASKS is 'all'"),
    ],
)
def test_what_cannot_be_joined(
    joined: list[Any], given: dict[str, Any], variables: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        join(**given, environment=variables)
    assert joined == []


def mesh_of(processes: list[list[int]]) -> Any:
    """A mesh whose devices belong to these processes."""
    devices = np.array(
        [[SimpleNamespace(process_index=process) for process in row] for row in processes]
    )
    return SimpleNamespace(devices=devices, shape={"data": devices.shape[0], "model": -1})


def unwrapped(function: Any) -> Any:
    """Without the check of types, which knows no invented mesh."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    ("processes", "own", "part"),
    [
        ([[0, 0], [1, 1], [2, 2]], 2, (2, 3)),
        # One model over two processes: both bring the same rows.
        ([[0, 1]], 1, (0, 1)),
        ([[0, 1], [2, 3]], 3, (1, 2)),
    ],
)
def test_each_process_brings_its_part_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, processes: list[list[int]], own: int, part: tuple[int, int]
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: own)
    assert unwrapped(rows_of_process)(mesh_of(processes)) == part


def test_parts_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked = unwrapped(rows_of_process)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(InputError, match=r"no device of process 1; make a mesh of all \d+ devices"):
        unchecked(mesh_of([[0], [0]]))
    with pytest.raises(InputError, match=r"gives process 1 the shards \[0, 2\] of 3"):
        unchecked(mesh_of([[1], [0], [1]]))


def test_a_single_process_brings_all_rows() -> None:
    assert rows_of_process(None) == rows_of_process(make_mesh(4, 2)) == (0, 1)


@contextmanager
def running(commands: list[list[str]], logs: list[Path]) -> Generator[list[subprocess.Popen[str]]]:
    """The processes, two devices each; what is left of them is killed in the end."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    started = []
    for arguments, log in zip(commands, logs, strict=True):
        with log.open("a") as said:
            started.append(
                subprocess.Popen(
                    arguments, cwd=ROOT, env=environment, stdout=said, stderr=said, text=True
                )
            )
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


LEAST = """
import sys
from redrafter_jax.parallel.processes import join, least_of_all
join(sys.argv[1], 2, int(sys.argv[2]))
print(least_of_all(int(sys.argv[3])))
"""


@pytest.mark.long
def test_the_least_of_all_is_known_to_all_beyond_32_bits() -> None:
    address = free_address()
    values = 80 * 10**9 + 1, 79 * 10**9 + 1
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEAST, address, str(number), str(value)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, value in enumerate(values)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [lines[-1] for lines in said] == [str(values[1])] * 2  # after what gloo says


def two(arguments: list[str]) -> list[list[str]]:
    shared = [*arguments, f"--coordinator-address={free_address()}", "--num-processes=2"]
    return [[*shared, f"--process-id={own}"] for own in range(2)]


def wait_for(count: int, output: Path, process: subprocess.Popen[str], log: Path) -> None:
    """Until the run has written so many rows."""

    def written() -> bool:
        assert process.poll() is None, log.read_text()
        return (output / "metrics.jsonl").is_file() and len(rows(output)) >= count

    wait_until(written)


MEETING = """
import sys
from redrafter_jax.command_line import run
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import join, wait_for_all

def main():
    join("{address}", 2, {own})
    wait_for_all("begun")
    if {own} in {failing}:
        {error}
    wait_for_all("never reached by all")

run(main)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("failing", "error", "codes"),
    [
        ((0,), "raise OSError(28, 'No space left on device', 'report.json')", (2, None)),
        ((0, 1), "raise InputError('steps is 0; it must be 1 or more.')", (2, 2)),
    ],
    ids=["the first alone", "both"],
)
def test_an_error_ends_all_processes_soon(
    tmp_path: Path, failing: tuple[int, ...], error: str, codes: tuple[int | None, ...]
) -> None:
    address = free_address()
    programs = [
        MEETING.format(address=address, own=own, failing=failing, error=error) for own in range(2)
    ]
    commands = [[sys.executable, "-c", program] for program in programs]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    with running(commands, logs) as processes:
        ended = [process.wait(timeout=60) for process in processes]
    assert 0 not in ended
    for code, expected, log in zip(ended, codes, logs, strict=True):
        if expected is None:
            continue
        assert code == expected, log.read_text()
        if expected == 2:
            assert log.read_text().count("error: ") == 1


@pytest.mark.long
def test_a_job_that_loses_a_process_goes_on(tmp_path: Path) -> None:
    """Two processes lose one, one process goes on, and two finish."""
    target = tmp_path / "target"
    write_untrained_target(target, functions=400)
    alone, together = tmp_path / "alone", tmp_path / "together"
    changes: dict[str, Any] = {
        "steps": 600,
        "log_every": 1,
        "checkpoint_every": 20,
        "optimizer": {"learning_rate": 1e-2, "batch_size": 4, "accumulation_steps": 2},
        "acceptance": trial(
            tmp_path, *(f"def f{n}(x)" for n in range(4)), every=200, max_new_tokens=16
        ),
    }
    split = changes | {"mesh": {"data": 4, "fully_sharded": True}}
    subprocess.run(command(tmp_path, settings(target, alone, **changes)), check=True)

    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    arguments = command(tmp_path, settings(target, together, **split))
    with running(two(arguments), logs) as (first, second):
        wait_for(30, together, first, logs[0])
        second.send_signal(signal.SIGKILL)
        assert first.wait(timeout=60) not in (0, -signal.SIGKILL)
    # A collective that fails is told by us; where none runs, JAX ends the process.
    told = ("error: process 0 lost the other processes", "another task died")
    assert any(words in logs[0].read_text() for words in told), logs[0].read_text()
    assert not (together / "drafter").exists()

    arguments = command(tmp_path, settings(target, together, **changes))
    with running([arguments], [tmp_path / "one.log"]) as (one,):
        wait_for(len(rows(together)) + 60, together, one, tmp_path / "one.log")
        one.send_signal(signal.SIGTERM)
        assert one.wait(timeout=120) == 0
    assert "resumed from step" in (tmp_path / "one.log").read_text()

    arguments = command(tmp_path, settings(target, together, **split))
    with running(two(arguments), logs) as both:
        wait_for(len(rows(together)) + 60, together, both[0], logs[0])
        both[1].send_signal(signal.SIGTERM)
        for process in both:
            assert process.wait(timeout=120) == 0, logs[0].read_text()
    assert "stopped by SIGTERM after step" in logs[0].read_text()
    assert not (together / "drafter").exists()

    with running(two(arguments), logs) as both:
        for process in both:
            assert process.wait(timeout=600) == 0, logs[0].read_text()
    assert "drafter written to" in logs[0].read_text()
    tried = [[row["acceptance_length"] for row in rows(run)[199::200]] for run in (alone, together)]
    np.testing.assert_allclose(tried[1], tried[0], rtol=0.1)
    assert len(tried[0]) == 3
    losses = [[row["loss"] for row in rows(run)] for run in (alone, together)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    expected = weights(alone)
    for name, value in weights(together).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=5e-3, err_msg=name)


@pytest.mark.long
def test_two_processes_measure_what_one_does(
    habitual_target: Target, good_drafter: LoadedHead, tmp_path: Path
) -> None:
    target, drafter = write_pair(tmp_path, habitual_target, good_drafter)
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": text} for text in "abde"))
    reports = []
    for name, mesh in (("alone", {}), ("together", {"data": 2, "model": 2})):
        settings = {
            "target": target,
            "drafters": {"head": {"drafter": drafter}},
            "prompts": prompts,
            "clock": False,
            "dtype": "float32",
            "max_new_tokens": 12,
            "samplings": [{"temperature": 0.0}, {"temperature": 1.0}],
            "mesh": mesh,
            "report_dir": str(tmp_path / name),
        }
        config = str(write_yaml(tmp_path / f"{name}.yaml", settings))
        arguments = [sys.executable, "-m", "eval", "compare", "--config", config]
        started = two(arguments) if mesh else [arguments]
        logs = [tmp_path / f"{name}.{index}.log" for index in range(len(started))]
        with running(started, logs) as processes:
            for process, log in zip(processes, logs, strict=True):
                assert process.wait(timeout=300) == 0, log.read_text()
        assert "The report: " in logs[0].read_text()
        # Gloo's own lines aside, the others are silent.
        assert not any("report" in log.read_text() for log in logs[1:])
        reports.append(json.loads((tmp_path / name / "compare.json").read_text()))
    rows = [[case["methods"] for case in report["samplings"]] for report in reports]
    for alone, together in zip(*rows, strict=True):
        for measures in (*alone.values(), *together.values()):
            del measures["bytes_per_step"]  # of one device
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
