"""The processes that decode: this one, or several workers, each with a target and an engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, TypeVar

from jax.sharding import Mesh

from redrafter_jax.engine.engine import Engine
from redrafter_jax.files.drafter_files import load_drafter
from redrafter_jax.files.target_files import open_target
from redrafter_jax.parallel.mesh import check_rows

from ..config import RegenerateSettings
from ..workers import Workers, absolute, open_workers
from .session import Session, make_engine, run_sessions

Result = TypeVar("Result")
Item = TypeVar("Item")


def build_mesh(settings: RegenerateSettings) -> Mesh | None:
    """Build the mesh of a process that decodes; None for a single device.

    Raises:
      InputError: there are too few devices, or `mesh.data` does not divide `batch_size`.
    """
    mesh = settings.mesh.build()
    check_rows(settings.batch_size, mesh, "batch_size")
    return mesh


class LoadedTarget:
    """A loaded target, and an engine that is made when it is first used.

    Raises:
      InputError: the target cannot be loaded.
    """

    def __init__(self, settings: RegenerateSettings, stop_tokens: Sequence[int]) -> None:
        self._settings, self._stop_tokens = settings, stop_tokens
        mesh = build_mesh(settings)
        self.target = open_target(settings.target).load(settings.target_dtype, mesh)

    @cached_property
    def engine(self) -> Engine:
        """The engine for the run; it decodes speculatively if `drafter` is set.

        Raises:
          InputError: the drafter cannot be loaded.
        """
        settings, target = self._settings, self.target
        drafter = tree = None
        if settings.drafter is not None:
            dtype, tree = settings.target_dtype, settings.tree
            drafter = load_drafter(settings.drafter, dtype, target.mesh, target=target)
        length = settings.data.sequence_length
        return make_engine(target, drafter, tree, settings.batch_size, length, self._stop_tokens)


def open_writers(
    settings: RegenerateSettings, stop_tokens: Sequence[int]
) -> AbstractContextManager[Workers[LoadedTarget]]:
    """Open the processes that decode: this one, or the workers that the settings ask for.

    `stop_tokens` are the tokens that end a text or a turn.

    Raises:
      InputError: the models cannot be loaded, or the workers do not start.
    """
    drafter = settings.drafter and absolute(settings.drafter)
    paths = {"target": absolute(settings.target), "drafter": drafter}
    load = partial(LoadedTarget, settings.model_copy(update=paths), stop_tokens)
    return open_workers(settings, settings.mesh, load, ahead=2 * settings.batch_size)


def write_all(
    write: Callable[[Item], Session[Result]],
    loaded: LoadedTarget,
    items: Sequence[Item],
    **options: Any,
) -> Iterator[Result]:
    """Run the sessions of all items together, and yield their results in the order of the items.

    Args:
      write: function from an item to its session.
      loaded: the target that writes.
      items: the items.
      **options: options of `run_sessions`.
    """
    return run_sessions(loaded.engine, map(write, items), **options)
