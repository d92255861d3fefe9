"""Texts and conversations that are written side by side, and given out in their order."""

from collections.abc import Generator, Iterator
from typing import Any, TypeAlias, TypeVar

from redrafter_jax.serving.slots import Request, Slots

Result = TypeVar("Result")
# What yields requests one after the other, is sent the tokens of each, and returns a result.
Session: TypeAlias = Generator[Request, list[int], Result]
# Rows of the output, as JSON has them.
Rows: TypeAlias = list[dict[str, Any]]

# Between two looks at which rows have ended.
_STEPS = 16


def run_sessions(slots: Slots, sessions: Iterator[Session[Result]]) -> Iterator[Result]:
    """What the sessions return, in their order; later ones go on while earlier ones are decoded.

    Of twice as many sessions as there are rows requests wait, so that no row is idle for long.
    """
    running: dict[int, Session[Result]] = {}
    ended: dict[int, Result] = {}
    numbered = enumerate(sessions)
    first = 0

    def go_on(number: int, session: Session[Result], tokens: list[int] | None) -> None:
        try:
            request = next(session) if tokens is None else session.send(tokens)
        except StopIteration as stop:
            ended[number] = stop.value
            return
        slots.submit(number, request)
        running[number] = session

    while True:
        while first in ended:
            yield ended.pop(first)
            first += 1
        if len(running) < 2 * slots.rows and (started := next(numbered, None)):
            go_on(*started, None)
        elif running:
            for number, tokens in slots.advance(_STEPS):
                go_on(number, running.pop(number), tokens)
        else:
            return
