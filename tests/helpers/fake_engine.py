"""An engine without a model, whose answers are known and whose steps take a given time."""

import math
import threading
import time
from collections.abc import Callable

from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Counters, Draft, Event, QueueFull, Request, Token
from redrafter_jax.errors import InputError


class FakeEngine(Engine):
    """Answers a prompt with its own tokens, over and over, from the seed's place on.

    Of a prompt half is cached, rounded down; each step had three nodes to verify.

    Args:
      slots: requests that advance together.
      queue_limit: requests that may wait beside them.
      seconds: that a step takes.
      fails: raises in the step of this number.
      warm: what the warm-up waits for.
      gate: what every step waits for.
      expires: number of new tokens with which a request's deadline has passed.
      size: number of tokens that a step decides for each request.

    Attributes:
      paused: while it is set, no step decides anything.
    """

    def __init__(
        self,
        slots: int = 2,
        queue_limit: int = 2,
        seconds: float = 0.0,
        fails: int | None = None,
        warm: threading.Event | None = None,
        gate: threading.Semaphore | None = None,
        expires: float = math.inf,
        size: int = 2,
    ) -> None:
        # Nothing of a real one is made.
        self.counters = Counters()
        self.on_admission = lambda number, cached: None
        self.longest_path = 2
        self.places, self.queue_limit = slots, queue_limit
        self.seconds, self.fails, self.warm, self.gate = seconds, fails, warm, gate
        self.expires, self.size = expires, size
        self.paused = False
        self.steps = self.submitted = 0
        # By number, a request and how many of its tokens are decided; the first ones are decoded.
        self.requests: dict[int, tuple[Request, int]] = {}
        self.told = 0

    @property
    def vocab_size(self) -> int:
        return 50257

    @property
    def mirror(self) -> None:
        return None

    @property
    def pages(self) -> int:
        return 8

    @property
    def pages_used(self) -> int:
        return 2

    @property
    def preemptions(self) -> int:
        return 0

    @property
    def drafted_by(self) -> tuple[str, ...]:
        return ("lookup",)

    def warm_up(self, proceed: Callable[[int, int], bool] = lambda ready, programs: True) -> None:
        while self.warm is not None and not self.warm.wait(timeout=0.01) and proceed(1, 1):
            pass

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def active(self) -> int:
        return min(self.places, len(self.requests))

    @property
    def waiting(self) -> int:
        return len(self.requests) - self.active

    def submit(self, request: Request) -> int:
        if not request.prompt:
            raise InputError("The prompt is empty; it needs at least one token.")
        if len(self.requests) >= self.places + self.queue_limit:
            raise QueueFull("the queue is full; ask again later.", seconds=2.1)
        self.submitted += 1
        self.requests[self.submitted] = request, 0
        return self.submitted

    def cancel(self, number: int) -> None:
        self.requests.pop(number, None)

    def advance(self, passes: int | None = 1, steps: int | None = None) -> list[Event]:
        del passes, steps
        for number in list(self.requests)[: self.places]:
            if number > self.told:
                self.told = number
                self.on_admission(number, len(self.requests[number][0].prompt) // 2)
        time.sleep(self.seconds)
        if self.paused:
            return []
        if self.gate is not None:
            self.gate.acquire()
        self.steps += 1
        if self.steps == self.fails:
            raise RuntimeError("the device is gone")
        events = []
        for number, (request, decided) in list(self.requests.items())[: self.places]:
            end = min(decided + self.size, request.max_new_tokens)
            ids = [
                request.prompt[(request.seed + i) % len(request.prompt)]
                for i in range(decided, end)
            ]
            tokens = [
                Token(id, decided // self.size, "lookup", -0.5, [(id, -0.5), (0, -1.0)])
                for id in ids
            ]
            tokens[-1] = tokens[-1]._replace(origin=None)
            ended = "length" if end == request.max_new_tokens else None
            if end >= self.expires or time.monotonic() > request.deadline:
                ended = "deadline"
            drafts = [Draft(decided // self.size, {"lookup": 3})]
            events.append(Event(number, tokens, ended, drafts))
            self.requests[number] = request, end
            if ended:
                del self.requests[number]
        return events
