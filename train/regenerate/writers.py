"""Those who write: this process, or several workers, each with a target and an engine."""

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
    """The devices of a process that writes.

    Raises:
      InputError: there are too few, or they do not divide the rows.
    """
    mesh = settings.mesh.build()
    check_rows(settings.batch_size, mesh, "batch_size")
    return mesh


class LoadedTarget:
    """A target, and an engine for it as soon as something is to be written.

    Raises:
      InputError: the target cannot be loaded.
    """

    def __init__(self, settings: RegenerateSettings, stop_tokens: Sequence[int]) -> None:
        self._settings, self._stop_tokens = settings, stop_tokens
        mesh = build_mesh(settings)
        self.target = open_target(settings.target).load(settings.target_dtype, mesh)

    @cached_property
    def engine(self) -> Engine:
        """An engine for the run, speculative if there is a drafter.

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
    """Open the writers that the settings ask for; `stop_tokens` end what they write.

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
    """Write all items together and yield what was written in their order.

    Args:
      write: the session of an item.
      loaded: the target that writes.
      items: the items.
      **options: of `run_sessions`.
    """
    return run_sessions(loaded.engine, map(write, items), **options)
