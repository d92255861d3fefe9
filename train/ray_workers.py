"""Workers that are Ray actors.

Worker w of n takes the items w, w + n, w + 2n and so on. It sends each result as soon as the result
is ready. The results are thus used in the order of the items, and none waits for a block of others.
If the process or the machine of a worker fails, a new worker replaces it. The new worker begins
with the first item whose result has not arrived.
"""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from rich.console import Console

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.cluster import is_own, join_cluster
from redrafter_jax.settings.sections import MeshSettings

from .config import WorkerSettings
from .data.report import print_line
from .workers import Workers

Loaded = TypeVar("Loaded")
Item = TypeVar("Item")
Result = TypeVar("Result")

# A run ends after this many losses in succession of a worker that gave no result between them.
_MOST_LOSSES = 3
# Errors of Ray that mean that a worker, or a result that it held, is lost.
_LOST = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError)


class _Worker(Generic[Loaded]):
    """The process of a worker.

    The models are loaded at the first call, not when the actor is made, so that the run receives
    the errors of loading unchanged.
    """

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._load = load
        self._kept: list[Loaded] = []

    def ask(self, question: Callable[[Loaded], Result]) -> Result:
        return question(self._loaded())

    def work(
        self, work: Callable[[Loaded, Sequence[Item]], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        yield from work(self._loaded(), items)

    def _loaded(self) -> Loaded:
        if not self._kept:
            self._kept.append(self._load())
        return self._kept[0]


class RayWorkers(Workers[Loaded]):
    """Several workers, each a Ray actor; the arguments are those of `open_workers`.

    Raises:
      InputError: Ray's cluster cannot be joined, or is too small.
    """

    def __init__(
        self, settings: WorkerSettings, mesh: MeshSettings, load: Callable[[], Loaded], ahead: int
    ) -> None:
        assert settings.workers is not None
        join_cluster()
        cluster = ray.cluster_resources()
        gpus = settings.worker_gpus
        if gpus is None:
            gpus = mesh.data * mesh.model if cluster.get("GPU") else 0
        if is_own():  # another may have machines that are still to start
            check_room(settings, gpus, cluster)
        print_line(
            Console(stderr=True),
            f"{settings.workers} workers, each of which reserves {settings.worker_cpus:g} CPUs and "
            f"{gpus:g} GPUs",
        )
        options: Any = {"num_cpus": settings.worker_cpus, "num_gpus": gpus}
        self._kind: Any = ray.remote(**options)(_Worker)
        self._load: Any = ray.put(load)
        self._ahead = ahead
        self._actors = [self._kind.remote(self._load) for _ in range(settings.workers)]
        self._losses = [0] * settings.workers

    def ask(self, question: Callable[[Loaded], Result]) -> Result:
        while True:
            try:
                return ray.get(self._actors[0].ask.remote(question))
            except RayTaskError as error:
                raise _cause(error) from None
            except _LOST as error:
                self._replace(0, error)

    def share(
        self, work: Callable[[Loaded, Sequence[Item]], Iterator[Result]], items: Sequence[Item]
    ) -> Iterator[Result]:
        workers, held = len(self._actors), ray.put(work)
        given = [0] * workers

        def stream(worker: int) -> Any:
            call = self._actors[worker].work.options(
                num_returns="streaming", _generator_backpressure_num_objects=self._ahead
            )
            return call.remote(held, items[worker::workers][given[worker] :])

        streams = [stream(worker) for worker in range(workers)]
        for number in count():
            worker = number % workers
            while True:
                try:
                    result: Any = ray.get(next(streams[worker]))
                    break
                except StopIteration:
                    return
                except RayTaskError as error:
                    raise _cause(error) from None
                except _LOST as error:
                    self._replace(worker, error)
                    streams[worker] = stream(worker)
            given[worker] += 1
            self._losses[worker] = 0
            yield result

    def _replace(self, worker: int, error: RayError) -> None:
        self._losses[worker] += 1
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if self._losses[worker] == _MOST_LOSSES:
            raise InputError(
                f"Worker {worker} was lost {_MOST_LOSSES} times without a result ({reason}); use "
                "fewer workers or a smaller batch_size if its memory was full, or see Ray's logs."
            )
        console = Console(stderr=True)
        print_line(console, f"worker {worker} was lost ({reason}); a new worker replaces it")
        ray.kill(self._actors[worker])
        self._actors[worker] = self._kind.remote(self._load)


def _cause(error: RayTaskError) -> BaseException:
    """The worker's own error if it is an `InputError`; otherwise Ray's, with the traceback."""
    return error.cause if isinstance(error.cause, InputError) else error


def end() -> None:
    """End all workers, and the cluster if this process started it."""
    ray.shutdown()


def check_room(settings: WorkerSettings, gpus: float, cluster: Mapping[str, float]) -> None:
    """Refuse workers that need more CPUs or GPUs than this machine has: Ray would wait forever."""
    for name, each, way_out in (
        ("CPU", settings.worker_cpus, "workers or worker_cpus"),
        ("GPU", gpus, "workers, worker_gpus or the mesh"),
    ):
        needed, there = each * (settings.workers or 0), cluster.get(name, 0)
        if needed > there:
            raise InputError(
                f"workers is {settings.workers}, and each takes {each:g} {name}s, but this machine "
                f"has {there:g}; lower {way_out}."
            )
