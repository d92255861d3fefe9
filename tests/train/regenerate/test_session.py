"""Sessions that are written together: their order, and what is left of them when it is late."""

from typing import Any

from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, Request, Token
from train.regenerate.session import Session, run_sessions


class OneByOne(Engine):
    """An engine of two slots, which gives every request one token per call until its limit."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.submitted = 0

    @property
    def slots(self) -> int:
        return 2

    def submit(self, request: Request) -> int:
        self.submitted += 1
        self.left[self.submitted] = request.max_new_tokens
        return self.submitted

    def advance(self, passes: int | None = 1, steps: int | None = None) -> list[Event]:
        del passes, steps
        events = []
        for number in list(self.left)[: self.slots]:
            self.left[number] -= 1
            ended = self.left[number] == 0
            if ended:
                del self.left[number]
            events.append(Event(number, [Token(7, 0, None)], "length" if ended else None))
        return events


def session(*lengths: int) -> Session[list[int]]:
    """One request after the other; returns how many tokens each got."""
    got = []
    for length in lengths:
        tokens = yield Request([1], length, 0)
        got.append(len(tokens))
    return got


def run(calls: int | None, *lengths: tuple[int, ...], **more: Any) -> list[list[int]]:
    """Results; it is late after so many calls of the engine."""
    engine = OneByOne()
    sessions = (session(*each) for each in lengths)
    asked = iter(range(1000))

    def is_late() -> bool:
        # Asked before each session that begins and before each call.
        return calls is not None and next(asked) >= calls + len(lengths)

    return list(run_sessions(engine, sessions, [-1], is_late, **more))


def test_results_come_in_the_order_of_the_sessions_and_are_told_as_they_end() -> None:
    told: list[list[int]] = []
    found = run(None, (5,), (1, 1), (2,), (1,), on_end=told.append)
    assert found == [[5], [1, 1], [2], [1]]
    # The second answer of the second session waits behind the other sessions.
    assert told == [[2], [1], [5], [1, 1]]


def test_when_it_is_late_sessions_end_with_the_tokens_that_they_have() -> None:
    # After two calls the first has two of five tokens, the third one of two; the second waits for
    # its second answer, and the last for a slot.
    assert run(2, (5,), (1, 4), (2,), (1,)) == [[2], [-1], [1], [-1]]
    # A session that would go on after what it has is left out too.
    assert run(2, (5, 5), (9,)) == [[-1], [2]]
    assert run(0, (5,)) == [[-1]]
