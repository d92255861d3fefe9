"""The thread that runs the engine for requests from an asyncio event loop."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, Request
from redrafter_jax.generation import not_numbers
from redrafter_jax.parallel.links import LostProcessError

Status = Literal["warming up", "ready", "failed", "closed"]

# Seconds between two checks whether the thread has ended.
_POLL = 0.02

_log = logging.getLogger(__name__)


class News(NamedTuple):
    """An event of the engine, for one of several requests that were submitted together.

    Attributes:
      request: index of the request among the requests that were submitted together.
      event: the engine's event.
      cached: number of the prompt's tokens that were already cached.
    """

    request: int
    event: Event
    cached: int


# The events of requests that were submitted together, one list per step, or an exception if no more
# will come. The queue has no size limit, so a slow reader delays no step.
EventQueue = asyncio.Queue[list[News] | Exception]


class EngineFailedError(Exception):
    """The error for a request after the engine has failed or was closed."""


class _Asker(NamedTuple):
    """A running request and the queue for its events.

    Attributes:
      event_queue: the queue for the request's events.
      request: index of the request among the requests that were submitted together.
      came: arrival time on the monotonic clock, in seconds.
      cached: number of the prompt's tokens that were already cached, once the request has a slot.
    """

    event_queue: EventQueue
    request: int
    came: float
    cached: int = 0


class Worker:
    """The only thread that uses the engine; calls from other threads run between two steps.

    Args:
      engine: engine that decodes; the worker sets the engine's `on_admission`.
      on_failure: function that is called once if the engine fails, in the thread that reports the
        failure: the worker's thread, or a caller of `fail`.
      on_wait: function that is called in the worker's thread with the seconds from `submit` until a
        request got its slot.

    Attributes:
      status: "warming up" until the engine has compiled its programs, then "ready"; "failed" or
        "closed" after the end.
    """

    def __init__(
        self,
        engine: Engine,
        on_failure: Callable[[], None] = lambda: None,
        on_wait: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self.status: Status = "warming up"
        self._engine = engine
        engine.on_admission = self._take_admission
        self._on_failure = on_failure
        self._on_wait = on_wait
        self._calls: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._told = False
        # Keys are the engine's numbers of requests.
        self._running: dict[int, _Asker] = {}
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def vocab_size(self) -> int:
        """V, the vocabulary size of the target."""
        return self._engine.vocab_size

    def start(self) -> None:
        """Start the thread, which begins with the engine's warm-up."""
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> EventQueue:
        """Submit requests to the engine, all of them or none.

        Returns:
          The queue of their events.

        Raises:
          QueueFull: the engine's queue has no room for all of them.
          InputError: a request does not fit the engine.
          EngineFailedError: the engine has failed or was closed.
        """
        came = time.monotonic()  # the engine may be in the middle of a step
        event_queue = EventQueue()
        self._loop = asyncio.get_running_loop()
        accepted: Future[None] = Future()

        def submit() -> None:
            if not accepted.set_running_or_notify_cancel():
                return
            try:
                self._refuse_after_end()
                for index, request in enumerate(requests):
                    self._running[self._engine.submit(request)] = _Asker(event_queue, index, came)
            except Exception as error:
                self._free(event_queue)
                accepted.set_exception(error)
            else:
                accepted.set_result(None)

        self._call(submit)
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:  # the engine may already have taken the requests
            self.cancel(event_queue)
            raise
        return event_queue

    def cancel(self, event_queue: EventQueue, index: int | None = None) -> None:
        """Cancel the requests of an event queue, or only request `index`, before the next step."""
        with contextlib.suppress(EngineFailedError):
            self._call(lambda: self._free(event_queue, index))

    def fail(self, error: Exception) -> None:
        """Record that the engine has failed, and give unfinished requests an error.

        Any thread may call this, because the engine's thread may hang in a step.
        """
        with self._changed:
            if self.status in ("failed", "closed"):
                return
            self.status = "failed"
        if isinstance(error, LostProcessError):
            _log.error("The server ends: %s.", error.strerror)
        else:
            _log.error("The engine failed; the server ends.", exc_info=error)
        try:
            self._end("failed")
        finally:
            self._on_failure()

    async def close(self) -> None:
        """End the thread after its current step or compilation; fail the unfinished requests."""
        self._closing = True
        with contextlib.suppress(EngineFailedError):
            self._call(lambda: self._end("closed"))
        # XLA would crash if Python ended during a compilation. A thread that has failed may hang,
        # so it is not waited for.
        while self._thread.is_alive() and self.status != "failed":
            await asyncio.sleep(_POLL)

    def _call(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._refuse_after_end()
            self._calls.append(call)
            self._changed.notify()

    def _refuse_after_end(self) -> None:
        if self.status in ("failed", "closed"):
            raise EngineFailedError(f"the engine has {self.status}")

    def _free(self, event_queue: EventQueue, index: int | None = None) -> None:
        for number, asker in list(self._running.items()):
            if asker.event_queue is event_queue and index in (None, asker.request):
                del self._running[number]
                self._engine.cancel(number)

    def _run(self) -> None:
        try:
            began = time.monotonic()
            self._engine.warm_up(self._report_warm_up)
            if not self._closing:
                _log.info("Ready after %.0f s of compiling.", time.monotonic() - began)
            with self._changed:
                if self.status == "warming up":
                    self.status = "ready"
            while self.status == "ready":
                with self._changed:
                    self._changed.wait_for(self._has_work)
                    calls, self._calls = self._calls, []
                for call in calls:
                    call()
                if self.status == "ready" and self._engine.busy:
                    self._deliver(self._engine.advance())
        except Exception as error:
            self.fail(error)
        if self.status == "failed":
            self._end("failed")  # for requests that this thread has accepted in the meantime

    def _has_work(self) -> bool:
        return bool(self._calls) or self._engine.busy or self.status != "ready"

    def _report_warm_up(self, ready: int, programs: int) -> bool:
        if ready < programs:
            _log.info("Compiled %d of %d programs.", ready, programs)
        return not self._closing

    def _take_admission(self, number: int, cached: int) -> None:
        asker = self._running[number]
        self._running[number] = asker._replace(cached=cached)
        self._on_wait(time.monotonic() - asker.came)

    def _deliver(self, events: Sequence[Event]) -> None:
        arrived: dict[EventQueue, list[News]] = defaultdict(list)
        for event in events:
            if event.number not in self._running:
                continue  # cancelled
            asker = self._running[event.number]
            arrived[asker.event_queue].append(News(asker.request, event, asker.cached))
            if event.ended:
                del self._running[event.number]
            if event.ended == "not numbers" and not self._told:
                self._told = True
                _log.error("%s", not_numbers(self._engine.target))
        for event_queue, own in arrived.items():
            self._post(event_queue, own)

    def _post(self, event_queue: EventQueue, arrived: list[News] | Exception) -> None:
        self._loop.call_soon_threadsafe(event_queue.put_nowait, arrived)

    def _end(self, status: Status) -> None:
        with self._changed:
            self.status = "failed" if self.status == "failed" else status
            calls, self._calls = self._calls, []
            self._changed.notify()
        error = EngineFailedError(f"the engine has {status}")
        running, self._running = self._running, {}
        for event_queue in {asker.event_queue for asker in list(running.values())}:
            self._post(event_queue, error)
        for call in calls:
            call()
