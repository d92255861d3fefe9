"""Checkpoints: what was saved comes back, and a save that fails costs nothing that was there."""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from redrafter_jax.checkpoint import open_checkpoints, restore_latest, save
from redrafter_jax.errors import InputError

ARRAYS = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(200, 300)), jnp.float32)}


@contextmanager
def no_file_larger_than(size: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_step(folder: Path, step: int) -> None:
    with open_checkpoints(folder, 2) as checkpoints:
        save(checkpoints, step, ARRAYS, {"step": step})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save_step(tmp_path, 3)
    save_step(tmp_path, 7)
    with open_checkpoints(tmp_path, 2) as checkpoints:
        restored = restore_latest(checkpoints, ARRAYS, resume=True)
    assert restored is not None
    assert (restored.step, restored.record) == (7, {"step": 7})
    np.testing.assert_array_equal(restored.arrays["kernel"], ARRAYS["kernel"])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}


def test_a_full_disk_is_one_sentence_and_leaves_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1)
    with (
        pytest.raises(
            InputError, match=r"\(File too large\); 1 is the newest whole one: make room"
        ),
        no_file_larger_than(50_000),
    ):
        save_step(tmp_path, 2)
    assert "Traceback" not in capfd.readouterr().err
    with open_checkpoints(tmp_path, 2) as checkpoints:
        restored = restore_latest(checkpoints, ARRAYS, resume=True)
    assert restored is not None
    assert restored.step == 1
    np.testing.assert_array_equal(restored.arrays["kernel"], ARRAYS["kernel"])


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = max(files, key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
    with (
        open_checkpoints(tmp_path, 2) as checkpoints,
        pytest.raises(InputError, match=r"Checkpoint 1 in .* is damaged; remove 1 to go on from"),
    ):
        restore_latest(checkpoints, ARRAYS, resume=True)


@pytest.mark.parametrize("part", ["arrays", "record"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, part: str) -> None:
    save_step(tmp_path, 1)
    (tmp_path / "1" / part).rename(tmp_path / "1" / "other")
    with (
        open_checkpoints(tmp_path, 2) as checkpoints,
        pytest.raises(InputError, match=r"Checkpoint 1 in .* does not fit"),
    ):
        restore_latest(checkpoints, ARRAYS, resume=True)


def test_arrays_of_other_shapes_are_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with (
        open_checkpoints(tmp_path, 2) as checkpoints,
        pytest.raises(InputError, match="use another output_dir or remove that one"),
    ):
        restore_latest(checkpoints, {"kernel": jnp.zeros((4, 4))}, resume=True)
