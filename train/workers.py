"""Work that this process does alone, or that several worker processes share.

A worker loads the models once and processes its items in order. With the setting `workers`, each
worker is a Ray actor in its own process, on this machine or on a cluster; see `ray_workers`.
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
    """The workers of a command, each with what it has loaded."""

    @abstractmethod
    def ask(self, question: Callable[[Loaded], Result]) -> Result:
        """Call a function on what one worker has loaded, and return its result."""

    @abstractmethod
    def share(
        self, work: Callable[[Loaded, Sequence[Item]], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield the result of every item, in the order of the items.

        `work` takes what a worker has loaded and some of the items, and yields the results of these
        items in order. The result of an item must not depend on the other items.
        """


class OneProcess(Workers[Loaded]):
    """This process as the only worker."""

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._loaded = load()

    def ask(self, question: Callable[[Loaded], Result]) -> Result:
        return question(self._loaded)

    def share(
        self, work: Callable[[Loaded, Sequence[Item]], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        return work(self._loaded, items)


def prepare(settings: WorkerSettings) -> None:
    """Check that the workers can be used, and leave the accelerators to them.

    If `settings.workers` is set, this restricts JAX in this process to the CPU, by setting
    `jax_platforms`. It must be called before JAX looks for devices.

    Raises:
      InputError: workers cannot be used, or JAX already uses other devices in this process.
    """
    if settings.workers is None:
        return
    if jax.distributed.is_initialized():
        raise InputError(
            f"workers is {settings.workers} in a job of several processes, but workers run only "
            "from a single process; leave out workers, or the options of the job."
        )
    try:
        import_module("ray")
    except ModuleNotFoundError:
        raise InputError(
            f"workers is {settings.workers}, which needs the package ray, which is not installed; "
            "in a checkout of redrafter-jax, install it with pip install '.[train,ray]', or leave "
            "out workers."
        ) from None
    # This process would take most of a GPU's memory from a worker.
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    if (backend := jax.default_backend()) != "cpu":
        jax.config.update("jax_platforms", before)
        raise InputError(
            f"workers is {settings.workers}, but JAX already uses the {backend.upper()} in this "
            f"process, so the workers could not use the memory of the {backend.upper()}; run the "
            "command in a new process."
        )


@contextmanager
def open_workers(
    settings: WorkerSettings, mesh: MeshSettings, load: Callable[[], Loaded], ahead: int
) -> Generator[Workers[Loaded]]:
    """Open the workers of a command, and end them after the block.

    Args:
      settings: the number of workers, and what Ray reserves for each.
      mesh: the devices of each worker.
      load: function that each worker calls once to load the models; it must be picklable if
        `workers` is set.
      ahead: number of results that a worker holds before it waits for the other workers.

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
    """Make an existing path absolute, because workers may run in another folder.

    Other values, such as hub ids, are returned unchanged.
    """
    return path.resolve() if path.exists() else path
