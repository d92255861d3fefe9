"""Checkpoints of a training run with orbax: arrays and a JSON record, written atomically."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from redrafter_jax.errors import InputError


class Restored(NamedTuple):
    """A checkpoint read back.

    Attributes:
      step: the number of finished optimizer steps.
      arrays: the pytree, shaped like the one given to `restore_latest`.
      record: the JSON record saved beside it.
    """

    step: int
    arrays: Any
    record: dict[str, Any]


def open_checkpoints(folder: Path, kept: int) -> ocp.CheckpointManager:
    """A manager of the newest `kept` checkpoints; saves run behind the training loop.

    Use it as a context manager: leaving the block waits for the last save.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=kept, create=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(
    checkpoints: ocp.CheckpointManager, step: int, arrays: Any, record: dict[str, Any]
) -> None:
    """Save a pytree of arrays and a JSON record; visible only once it is complete."""
    checkpoints.save(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
        ),
    )


def restore_latest(checkpoints: ocp.CheckpointManager, like: Any, resume: bool) -> Restored | None:
    """The newest complete checkpoint, or None where there is none yet.

    Raises:
      InputError: there is a checkpoint and `resume` is False, or its arrays differ in structure
        or shape from `like`.
    """
    step = checkpoints.latest_step()
    if step is None:
        return None
    if not resume:
        raise InputError(
            f"{checkpoints.directory} already holds checkpoint {step}; use another output_dir, "
            "remove that one, or resume=auto."
        )
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        restored = checkpoints.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(shapes), record=ocp.args.JsonRestore()
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"Checkpoint {step} in {checkpoints.directory} does not fit these settings ({reason}); "
            "use another output_dir or remove that one."
        ) from None
    return Restored(step, restored["arrays"], restored["record"])
