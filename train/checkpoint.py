"""Orbax checkpoints of a training run: arrays and a JSON record, written atomically."""

import errno
import logging
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from redrafter_jax.errors import InputError


class Restored(NamedTuple):
    """A restored checkpoint: the number of finished steps, the arrays and the JSON record."""

    step: int
    arrays: Any
    record: dict[str, Any]


@contextmanager
def open_checkpoints(folder: Path, kept: int) -> Generator[ocp.CheckpointManager]:
    """Open a checkpoint manager that keeps the newest `kept` checkpoints.

    Saves run in the background; leaving the block waits for the last save.

    Raises:
      InputError: a checkpoint could not be written.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=kept, create=True)
    log = logging.getLogger("absl")
    before = log.level
    # Orbax raises failed saves, and also logs a traceback of them from each of its threads.
    log.setLevel(logging.CRITICAL)
    try:
        with ocp.CheckpointManager(folder.absolute(), options=options) as checkpoints:
            yield checkpoints
            with _writing(checkpoints):
                checkpoints.wait_until_finished()
    finally:
        log.setLevel(before)


def save(
    checkpoints: ocp.CheckpointManager, step: int, arrays: Any, record: dict[str, Any]
) -> None:
    """Save a pytree of arrays and a JSON record atomically, in the background.

    Raises:
      InputError: this save or the previous one failed; older checkpoints are unchanged.
    """
    # The shapes distinguish a checkpoint of another model from a damaged checkpoint.
    stated = {"record": record, "shapes": _shapes(arrays)}
    with _writing(checkpoints):
        checkpoints.save(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(stated)
            ),
        )


@contextmanager
def _writing(checkpoints: ocp.CheckpointManager) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        text = str(error).partition("\n")[0]
        # The last of tensorstore's chained messages comes from the operating system.
        found = re.search(r"([^:]*) \[os_error_code", text)
        if found is not None:
            reason = found[1].strip()
        elif isinstance(error, OSError):
            reason = error.strerror or text
        elif text.startswith("NOT_FOUND: "):  # a file that tensorstore reads back is gone
            reason = os.strerror(errno.ENOENT)
        else:
            raise  # a bug, not the disk
        full = (os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        remedy = "free some disk space" if reason in full else "fix the cause"
        newest = checkpoints.latest_step()
        left = "no checkpoint is saved yet" if newest is None else f"step {newest} is still saved"
        raise InputError(
            f"A checkpoint could not be written to {checkpoints.directory} ({reason}); {left}; "
            f"{remedy} and start the same command again."
        ) from None


def restore_latest(checkpoints: ocp.CheckpointManager, like: Any, resume: bool) -> Restored | None:
    """Restore the newest complete checkpoint; None if there is no checkpoint.

    Args:
      checkpoints: the manager of the folder.
      like: pytree of arrays with the expected structure, shapes, dtypes and shardings.
      resume: whether a checkpoint may exist.

    Raises:
      InputError: there is a checkpoint although `resume` is False, the checkpoint cannot be read,
        or its arrays differ from `like` in structure or shape.
    """
    step = checkpoints.latest_step()
    if step is None:
        return None
    if not resume:
        raise InputError(
            f"resume=never, but {checkpoints.directory} already holds checkpoint {step}; set "
            "resume=auto, use another output_dir, or delete this folder."
        )

    def read(**parts: Any) -> Any:
        try:
            return checkpoints.restore(step, args=ocp.args.Composite(**parts))
        except jax.errors.JaxRuntimeError:  # raised by a device or another process
            raise
        except Exception as error:  # orbax has no narrower type for unreadable files
            older = [saved for saved in checkpoints.all_steps() if saved < step]
            rest = f"to resume from step {max(older)}" if older else "to start again"
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise InputError(
                f"Checkpoint {step} in {checkpoints.directory} cannot be read ({reason}); restore "
                f"its files, or delete checkpoint {step} {rest}."
            ) from None

    stated = read(record=ocp.args.JsonRestore())["record"]
    if stated["shapes"] != _shapes(like):
        raise InputError(
            f"Checkpoint {step} in {checkpoints.directory} does not fit these settings: its arrays "
            "have other names or shapes; use another output_dir, or delete this folder."
        )
    expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    arrays = read(arrays=ocp.args.StandardRestore(expected))["arrays"]
    return Restored(step, arrays, stated["record"])


def _shapes(arrays: Any) -> dict[str, list[int]]:
    """The shape of each array by its path in the pytree, as JSON values."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}
