"""One thread that runs the engine, for requests that come from an asyncio loop."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from redrafter_jax.serving.engine import Engine
from redrafter_jax.serving.messages import Event, Request

Status = Literal["warming up", "ready", "failed", "closed"]

_log = logging.getLogger(__name__)


class EngineFailedError(Exception):
    """The engine has failed, or was closed: nothing more is decoded."""


class Worker:
    """The thread that alone touches the engine; what others want of it is done between its steps.

    Args:
      engine: that decodes; its `admitted` is set.
      failed: called in that thread when the engine has raised.
      waited: told, in that thread, how many seconds after `submit` a request got its slot.

    Attributes:
      status: "ready" once the engine is warmed up.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[], None] = lambda: None,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self.status: Status = "warming up"
        self._engine = engine
        engine.admitted = self._tell_wait
        self._failed = failed
        self._waited = waited
        self._calls: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closing = False
        # By number in the engine: whose request it is, and which of theirs.
        self._running: dict[int, tuple[Submission, int]] = {}
        # By number, when those came that have no slot yet.
        self._waiting: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin with the engine's warm-up."""
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> "Submission":
        """Let requests wait together, all of them or none.

        Raises:
          QueueFull: there is no room for all of them to wait.
          InputError: one does not fit the engine.
          EngineFailedError: there is no engine any more.
        """
        came = time.monotonic()  # the engine may be in the middle of a step
        submission = Submission(self, asyncio.get_running_loop())
        accepted: Future[None] = Future()

        def submit() -> None:
            if not accepted.set_running_or_notify_cancel():
                return
            try:
                self._refuse_after_end()
                for place, request in enumerate(requests):
                    number = self._engine.submit(request)
                    self._running[number] = submission, place
                    self._waiting[number] = came
            except Exception as error:
                self._free(submission)
                accepted.set_exception(error)
            else:
                accepted.set_result(None)

        self._call(submit)
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:  # the engine may have taken them meanwhile
            submission.cancel()
            raise
        return submission

    def cancel(self, submission: "Submission", place: int | None) -> None:
        """Free the rows of a submission, or of one of its requests, before the next step."""
        with contextlib.suppress(EngineFailedError):
            self._call(lambda: self._free(submission, place))

    async def close(self) -> None:
        """End the thread after its step or compilation; who still waits is told so."""
        self._closing = True
        with contextlib.suppress(EngineFailedError):
            self._call(lambda: self._end("closed"))
        # Python must not end before a compilation does: XLA would crash.
        await asyncio.to_thread(self._thread.join)

    def _call(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._refuse_after_end()
            self._calls.append(call)
            self._changed.notify()

    def _refuse_after_end(self) -> None:
        if self.status in ("failed", "closed"):
            raise EngineFailedError(f"the engine has {self.status}")

    def _free(self, submission: "Submission", place: int | None = None) -> None:
        for number, (owner, own) in list(self._running.items()):
            if owner is submission and place in (None, own):
                del self._running[number]
                self._waiting.pop(number, None)
                self._engine.cancel(number)

    def _run(self) -> None:
        try:
            began = time.monotonic()
            self._engine.warm_up(self._warms_up)
            if not self._closing:
                _log.info("Ready after %.0f s of compiling.", time.monotonic() - began)
            self.status = "ready"
            while self.status == "ready":
                with self._changed:
                    self._changed.wait_for(lambda: self._calls or self._engine.busy)
                    calls, self._calls = self._calls, []
                for call in calls:
                    call()
                if self.status == "ready" and self._engine.busy:
                    self._deliver(self._engine.advance())
        except Exception:
            _log.exception("The engine failed; the server ends.")
            self._end("failed")
            self._failed()

    def _warms_up(self, ready: int, programs: int) -> bool:
        if ready < programs:
            _log.info("Compiled %d of %d programs.", ready, programs)
        return not self._closing

    def _tell_wait(self, number: int) -> None:
        self._waited(time.monotonic() - self._waiting.pop(number))

    def _deliver(self, events: Sequence[Event]) -> None:
        arrived: dict[Submission, list[tuple[int, Event]]] = defaultdict(list)
        for event in events:
            if event.number not in self._running:
                continue  # cancelled
            submission, place = self._running[event.number]
            arrived[submission].append((place, event))
            if event.ended:
                del self._running[event.number]
                self._waiting.pop(event.number, None)  # its deadline came before a slot
        for submission, own in arrived.items():
            submission.post(own)

    def _end(self, status: Status) -> None:
        with self._changed:
            self.status, calls, self._calls = status, self._calls, []
        error = EngineFailedError(f"the engine has {status}")
        for submission in {submission for submission, _ in self._running.values()}:
            submission.post(error)
        self._running.clear()
        for call in calls:
            call()


class Submission:
    """Requests that came together, and what is decided of them as it comes; of the loop's thread.

    What comes is kept until it is read: a reader that is slow delays no step.
    """

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self._worker = worker
        self._loop = loop
        self._arrived: asyncio.Queue[list[tuple[int, Event]] | Exception] = asyncio.Queue()

    async def steps(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """After every step, which of the requests have news, and the news; ends with the reader.

        Raises:
          EngineFailedError: nothing more will come.
        """
        while True:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            yield arrived

    def cancel(self, place: int | None = None) -> None:
        """Free the row of one of the requests, or the rows of all that have not ended."""
        self._worker.cancel(self, place)

    def post(self, arrived: list[tuple[int, Event]] | Exception) -> None:
        """Hand over, from the worker's thread."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)
