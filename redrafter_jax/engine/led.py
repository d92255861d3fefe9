"""One engine in several processes: process 0 leads, and the others repeat its calls.

All processes run the same programs in the same order. The order depends on the calls, on the clock
and on the choice of trees, and the leader sends all three.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

from redrafter_jax.config import TreeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, Request
from redrafter_jax.parallel.links import Follower, Leader
from redrafter_jax.text.grammars import GrammarCompiler

# Grammars that a follower compiles at a time, and remembers to have been announced.
_COMPILERS, _ANNOUNCED = 2, 16
# Seconds to wait for news of a lost process after a program has failed.
_LOSS_SECONDS = 2.0


class Submitted(NamedTuple):
    """A request on its way to another process.

    Attributes:
      request: without its grammar.
      grammar: as `CompiledGrammar.stated`; None without one.
    """

    request: Request
    grammar: tuple[str, str] | None


class Turn(NamedTuple):
    """A call of `advance`, and what came before it.

    Attributes:
      calls: since the turn before, requests that were submitted and numbers that were cancelled.
      passes: as in `advance`.
      steps: as in `advance`.
      now: seconds of the clock of the process that leads.
    """

    calls: list[Submitted | int]
    passes: int | None
    steps: int | None
    now: float


class LedEngine(Engine):
    """The engine of one process among several that decode as one.

    Args:
      link: to the other processes.
      options: of `Engine`, all but its clock.
    """

    def __init__(self, link: Leader | Follower, *arguments: Any, **options: Any) -> None:
        self._link = link
        self._now = time.monotonic()
        super().__init__(*arguments, **options, clock=lambda: self._now)

    def warm_up(self, proceed: Callable[[int, int], bool] = lambda ready, programs: True) -> None:
        super().warm_up(lambda ready, programs: self._link.agree(proceed(ready, programs)))

    def _choose(self, active: list[int], most: int) -> tuple[int, TreeConfig | None, int]:
        chosen = super()._choose(active, most)
        return self._link.agree(chosen) if self.adaptive else chosen


class LeadingEngine(LedEngine):
    """The engine of the process that leads, which tells the others of every call.

    Args:
      link: to the other processes.
      options: as in `LedEngine`.
    """

    def __init__(self, link: Leader, *arguments: Any, **options: Any) -> None:
        super().__init__(link, *arguments, **options)
        self._leader = link
        self._calls: list[Submitted | int] = []

    def announce_grammar(self, name: str, stated: str) -> None:
        self._leader.hint((name, stated))

    def submit(self, request: Request) -> int:
        self._now = time.monotonic()
        number = super().submit(request)
        stated = request.grammar and request.grammar.stated
        self._calls.append(Submitted(request._replace(grammar=None), stated))
        return number

    def cancel(self, number: int) -> None:
        self._now = time.monotonic()
        super().cancel(number)
        self._calls.append(number)

    def advance(self, passes: int | None = 1, steps: int | None = None) -> list[Event]:
        """As in `Engine`.

        Raises:
          LostProcessError: another process is gone.
        """
        self._now = time.monotonic()
        calls, self._calls = self._calls, []
        self._leader.tell(Turn(calls, passes, steps, self._now))
        try:
            return super().advance(passes, steps)
        except RuntimeError:  # a collective fails when a process is lost, but does not say which
            if lost := self._leader.wait_for_loss(_LOSS_SECONDS):
                raise lost from None
            raise


class FollowingEngine(LedEngine):
    """The engine of a process that follows.

    Args:
      link: to the process that leads.
      options: as in `LedEngine`.
    """

    def __init__(self, link: Follower, *arguments: Any, **options: Any) -> None:
        super().__init__(link, *arguments, **options)
        self._follower = link

    def follow(self, grammars: GrammarCompiler) -> None:
        """Do what the process that leads does, from its warm-up to its end.

        Grammars are compiled in other threads as soon as the leader announces them.

        Raises:
          LostProcessError: it is gone.
        """
        with ThreadPoolExecutor(_COMPILERS) as pool:
            compiled = lru_cache(_ANNOUNCED)(partial(pool.submit, grammars.compile_stated))
            self._follower.hear_hints(lambda stated: compiled(*stated))
            self.warm_up()
            while (turn := self._follower.hear()) is not None:
                for call in turn.calls:
                    if isinstance(call, int):
                        self.cancel(call)
                        continue
                    grammar = call.grammar and compiled(*call.grammar).result()
                    self.submit(call.request._replace(grammar=grammar))
                self._now = turn.now
                self.advance(turn.passes, turn.steps)
