"""Checkpoints: what was saved comes back, and a save that fails costs nothing that was there."""

import gc
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from train_runs import no_file_larger_than

from redrafter_jax.errors import InputError
from train.checkpoint import open_checkpoints, restore_latest, save

ARRAYS = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(200, 300)), jnp.float32)}


def save_step(folder: Path, step: int) -> None:
    with open_checkpoints(folder, 2) as checkpoints:
        save(checkpoints, step, ARRAYS, {"step": step})


def restored_step(folder: Path) -> int:
    """The step of the newest checkpoint, which holds what was saved."""
    with open_checkpoints(folder, 2) as checkpoints:
        restored = restore_latest(checkpoints, ARRAYS, resume=True)
    assert restored is not None
    assert restored.record == {"step": restored.step}
    np.testing.assert_array_equal(restored.arrays["kernel"], ARRAYS["kernel"])
    return restored.step


def test_what_was_saved_comes_back_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}
    assert restored_step(tmp_path) == 3


def test_a_full_disk_is_one_sentence_and_leaves_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1)
    sentence = r"\(File too large\); step 1 is still saved; free some disk space"
    with pytest.raises(InputError, match=sentence), no_file_larger_than(50_000):
        save_step(tmp_path, 2)
    assert "Traceback" not in capfd.readouterr().err
    assert restored_step(tmp_path) == 1


# Tensorstore names no error of the operating system where a file that it reads back is gone.
GONE = (
    'NOT_FOUND: Error writing "kernel/0.0" in OCDBT database at local file "2/": Error reading '
    'Byte range [1073470, 1073846) of local file "2/d/8fea4570736e578890b46b7b58f0ee5d"'
)


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (ValueError(GONE), r"\(No such file or directory\); step 1 is still saved; fix the cause"),
        (NotADirectoryError(20, "Not a directory"), r"\(Not a directory\); step 1 is still saved"),
    ],
)
def test_a_folder_that_vanishes_during_a_save_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, sentence: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    save_step(tmp_path, 1)
    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(InputError, match=sentence):
        save_step(tmp_path, 2)


def test_an_error_that_is_not_of_the_disk_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("FAILED_PRECONDITION: shapes differ")

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(ValueError, match="shapes differ"):
        save_step(tmp_path, 1)


# What orbax leaves half done when it meets a damaged file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whatever_file_is_damaged_the_way_out_is_the_checkpoint_before(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path / "whole", step)
    files = [path for path in (tmp_path / "whole" / "2").rglob("*") if path.is_file()]
    refusals = []
    for number, path in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", copy)
        place = copy / path.relative_to(tmp_path / "whole")
        place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
        try:  # orbax keeps notes that it does not need: what it gives is right all the same
            assert restored_step(copy) == 2
        except InputError as error:
            refusals.append(str(error))
    gc.collect()  # here, where what orbax left half done is expected
    assert len(refusals) > 3
    for refusal in refusals:
        assert re.match(
            r"Checkpoint 2 in .* cannot be read \(.+\); restore its files, or delete checkpoint 2 "
            r"to resume",
            refusal,
        )


@pytest.mark.parametrize("like", [{"kernel": jnp.zeros((4, 4))}, {"other": ARRAYS["kernel"]}])
def test_arrays_of_other_names_or_shapes_are_refused(
    tmp_path: Path, like: dict[str, jax.Array]
) -> None:
    save_step(tmp_path, 1)
    sentence = "does not fit these settings: .* other names or shapes; use another output_dir"
    with open_checkpoints(tmp_path, 2) as checkpoints, pytest.raises(InputError, match=sentence):
        restore_latest(checkpoints, like, resume=True)
