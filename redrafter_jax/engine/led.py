"""One engine in several processes: process 0 leads, and all other processes repeat its calls.

All processes must run the same programs in the same order. This order depends on the calls, on the
clock and on the choice of trees. So the leading process sends all three to the other processes.
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
      request: the request, with its grammar removed.
      grammar: the grammar in the form of `CompiledGrammar.stated`; None without a grammar.
    """

    request: Request
    grammar: tuple[str, str] | None


class Turn(NamedTuple):
    """A call of `advance`, with the calls of `submit` and `cancel` that preceded it.

    Attributes:
      calls: the calls since the previous turn, in order: a submitted request, or the number of a
        cancelled request.
      passes: the argument of `advance`.
      steps: the argument of `advance`.
      now: time in seconds on the leading process's clock.
    """

    calls: list[Submitted | int]
    passes: int | None
    steps: int | None
    now: float


class LedEngine(Engine):
    """An engine in a job of several processes that decode together.

    Args:
      link: connection to the other processes.
      arguments: positional arguments of `Engine`.
      options: keyword arguments of `Engine`, except `clock`.
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
    """The engine of the leading process, which sends each call to the other processes.

    Args:
      link: connection to the other processes.
      arguments: positional arguments of `Engine`.
      options: keyword arguments of `Engine`, except `clock`.
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
        """Send the call to the other processes, then advance as `Engine.advance` does.

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
    """The engine of a process that repeats the calls of the leading process.

    Args:
      link: connection to the leading process.
      arguments: positional arguments of `Engine`.
      options: keyword arguments of `Engine`, except `clock`.
    """

    def __init__(self, link: Follower, *arguments: Any, **options: Any) -> None:
        super().__init__(link, *arguments, **options)
        self._follower = link

    def follow(self, grammars: GrammarCompiler) -> None:
        """Repeat the calls of the leading process, from its warm-up on, until that process ends.

        Other threads compile each grammar as soon as the leading process announces it.

        Raises:
          LostProcessError: the leading process is gone.
        """
        pool = ThreadPoolExecutor(_COMPILERS)
        compiled = lru_cache(_ANNOUNCED)(partial(pool.submit, grammars.compile_stated))

        def grammar_of(stated: tuple[str, str]) -> Any:
            future = compiled(*stated)
            # A grammar that others are compiled before is compiled here.
            return grammars.compile_stated(*stated) if future.cancel() else future.result()

        self._follower.hear_hints(lambda stated: compiled(*stated))
        try:
            self.warm_up()
            while (turn := self._follower.hear()) is not None:
                for call in turn.calls:
                    if isinstance(call, int):
                        self.cancel(call)
                        continue
                    grammar = call.grammar and grammar_of(call.grammar)
                    self.submit(call.request._replace(grammar=grammar))
                self._now = turn.now
                self.advance(turn.passes, turn.steps)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
