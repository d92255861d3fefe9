"""Work that this process does alone, or that several processes share.

A worker loads the models once and works through its items, in order. With `workers`, each worker is
an actor of Ray in a process of its own, on this machine or on a cluster; see `ray_workers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar

import jax

from redrafter_jax.errors import InputError
from redrafter_jax.settings.sections import MeshSettings

from .config import WorkerSettings

Loaded = TypeVar("Loaded")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(ABC, Generic[Loaded]):
    """Those who share the work, each with what it has loaded."""

    @abstractmethod
    def ask(self, question: Callable[[Loaded], Result]) -> Result:
        """The answer of one worker."""

    @abstractmethod
    def share(
        self, work: Callable[[Loaded, Sequence[Item]], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """The result of every item, in the order of the items.

        `work` takes any of the items and yields their results in order. The result of an item does
        not depend on the other items.
        """


class OneProcess(Workers[Loaded]):
    """This process, which does all the work."""

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._loaded = load()

    def ask(self, question: Callable[[Loaded], Result]) -> Result:
        return question(self._loaded)

    def share(
        self, work: Callable[[Loaded, Sequence[Item]], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        return work(self._loaded, items)


def prepare(settings: WorkerSettings) -> None:
    """Refuse workers without Ray or in a job of several processes; leave the devices to workers.

    With workers, JAX uses only the CPU in this process from then on: this sets `jax_platforms`. To
    be called before JAX looks for devices.

    Raises:
      InputError: workers cannot be used, or JAX already uses other devices in this process.
    """
    if settings.workers is None:
        return
    if jax.distributed.is_initialized():
        raise InputError(
            f"workers is {settings.workers} in a job of several processes, but each worker is a "
            "process of its own; leave out workers, or the options of the job."
        )
    try:
        import_module("ray")
    except ModuleNotFoundError:
        raise InputError(
            f"workers is {settings.workers}, which needs the package ray, which is not installed; "
            "in a checkout of redrafter-jax, pip install '.[train,ray]' installs it; without "
            "workers, this process does the work alone."
        ) from None
    # This process would take most of a GPU's memory from a worker.
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    if (backend := jax.default_backend()) != "cpu":
        jax.config.update("jax_platforms", before)
        raise InputError(
            f"workers is {settings.workers}, but JAX already uses the {backend.upper()} in this "
            "process, which would keep its memory from the workers; run the command in a process "
            "of its own."
        )


@contextmanager
def open_workers(
    settings: WorkerSettings, mesh: MeshSettings, load: Callable[[], Loaded], ahead: int
) -> Generator[Workers[Loaded]]:
    """The workers of a command.

    Args:
      settings: the number of workers.
      mesh: the devices of each worker.
      load: what each worker loads; with `workers`, it can be pickled.
      ahead: number of results that a worker holds before it waits for the others.

    Raises:
      InputError: Ray's cluster cannot be joined, or is too small.
    """
    if settings.workers is None:
        yield OneProcess(load)
        return
    from .ray_workers import RayWorkers, end

    try:
        yield RayWorkers(settings, mesh, load, ahead)
    finally:
        end()


def absolute(path: Path) -> Path:
    """The absolute path of what exists: workers may run in another folder. Hub ids stay."""
    return path.resolve() if path.exists() else path
