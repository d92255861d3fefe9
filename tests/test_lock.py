"""One run at a time in a folder, and none that a dead one keeps out."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT

from redrafter_jax import lock
from redrafter_jax.errors import InputError
from redrafter_jax.lock import hold

HOLDS = """
import sys, time
from pathlib import Path
from typing import Any
from redrafter_jax.lock import hold
with hold(Path(sys.argv[1]), "output_dir"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_told_who_holds_the_folder_until_that_one_is_dead(tmp_path: Path) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        told = (
            rf"^output_dir {tmp_path} is in use by process {held.pid} of .* on .*, since "
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait until it ends, stop it, or give another "
            r"output_dir\.$"
        )
        for _ in range(2):  # being refused changes nothing
            with pytest.raises(InputError, match=told), hold(tmp_path, "output_dir"):
                pass
    finally:
        os.kill(held.pid, signal.SIGKILL)
        held.communicate()
    with hold(tmp_path, "output_dir"):
        pass


def test_a_file_is_held_by_itself_and_again_after_an_error(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    told = pytest.raises(InputError, match=r"output .*one\.jsonl is in use by process")
    with hold(one, "output"), hold(other, "output"), told, hold(one, "output"):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError), hold(one, "output"):
        raise RuntimeError
    with hold(one, "output"):
        pass


def test_a_second_fit_in_a_folder_is_refused(tmp_path: Path, run_redrafter: Any) -> None:
    with hold(tmp_path, "OUTPUT"):
        code, _, told = run_redrafter("fit", "any", str(tmp_path), "--minutes", "9")
    assert (code, told.count("\n")) == (2, 1)
    assert told.startswith(f"error: OUTPUT {tmp_path} is in use by process {os.getpid()} of ")


def no_lock_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / ".lock").mkdir()


def no_locks_of_the_system(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fcntl, "flock", raiser(errno.ENOSYS))


def no_room(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "write_text", raiser(errno.ENOSPC))


def raiser(code: int) -> Any:
    """A function that fails as the system does."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (no_lock_file, "Is a directory"),
        (no_locks_of_the_system, "Function not implemented"),
        (no_room, "No space left on device"),
    ],
)
def test_a_lock_that_fails_is_told_by_all_processes_and_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, reason: str
) -> None:
    told: list[np.ndarray] = []

    def tell(values: np.ndarray) -> np.ndarray:
        told.append(values)
        return values

    sentence = rf"^output_dir {tmp_path} cannot be locked \({{}}.*\); give another output_dir"
    with monkeypatch.context() as patch:
        fault(tmp_path, patch)
        patch.setattr(lock, "broadcast_from_first", tell)
        failed = pytest.raises(InputError, match=sentence.format(reason))
        with failed, hold(tmp_path, "output_dir"):
            pass
        # Another process gives an array of the same kind, and gets the first one's.
        patch.setattr(lock, "is_first", lambda: False)
        patch.setattr(lock, "broadcast_from_first", lambda own: told[0].astype(own.dtype))
        failed = pytest.raises(InputError, match=sentence.format("the first process says why"))
        with failed, hold(tmp_path, "output_dir"):
            pass
    if fault is no_lock_file:
        (tmp_path / ".lock").rmdir()
    with hold(tmp_path, "output_dir"):
        pass
