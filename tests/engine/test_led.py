"""Engines that lead and follow, within one process: the same calls, and the same choices."""

import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import schemas
from engine_runs import ROOM, STOPS, gather, generated, make_requests
from servers import wait_until
from tiny_folders import character_tokenizer

from redrafter_jax import Grammar, TreeConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.engine.led import FollowingEngine, LeadingEngine, Submitted, Turn
from redrafter_jax.engine.messages import Event, QueueFull, Request
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.links import Follower, Hint, Leader, LostProcessError
from redrafter_jax.text.grammars import GrammarCompiler

pytestmark = pytest.mark.usefixtures("quick_compilation")

NO_GRAMMARS = GrammarCompiler(character_tokenizer(), 24, STOPS)
TREE = TreeConfig(beam_width=2, draft_rounds=2)


class Wire(Leader):
    """Keeps what is told until a follower hears it."""

    def __init__(self) -> None:
        super().__init__({})
        self.told: deque[bytes] = deque()

    def tell(self, message: Any) -> None:
        self.told.append(pickle.dumps(message))


class OtherEnd(Follower):
    """Hears it, as another process would."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def hear(self) -> Any:
        return pickle.loads(self.wire.told.popleft())


class Recording(FollowingEngine):
    """Keeps the events, for which a follower has no use."""

    def __init__(self, link: Follower, *arguments: Any, **options: Any) -> None:
        super().__init__(link, *arguments, **options)
        self.events: list[list[Event]] = []

    def advance(self, passes: int | None = 1, steps: int | None = None) -> list[Event]:
        self.events.append(super().advance(passes, steps))
        return self.events[-1]


def pair(
    target: Target, drafter: LoadedHead, **options: Any
) -> tuple[Wire, LeadingEngine, Recording]:
    wire = Wire()
    shared: dict[str, Any] = {
        "tree": TREE,
        "slots": 3,
        "context_length": ROOM,
        "stop_tokens": STOPS,
        "prefill_chunk": 16,
        "row_counts": (),
        **options,
    }
    leader = LeadingEngine(wire, target, drafter, **shared)
    follower = Recording(OtherEnd(wire), target, drafter, **shared)
    return wire, leader, follower


def led(leader: LeadingEngine) -> Iterator[list[Event]]:
    """All that is left."""
    while leader.busy:
        yield leader.advance()


def plain(events: list[list[Event]]) -> Any:
    """Without log-probabilities, which are NaN where nobody asks."""
    return [
        [(e.number, e.tokens, [t.call for t in e.decided], e.ended, e.drafted) for e in turn]
        for turn in events
    ]


@pytest.mark.long
def test_a_follower_decides_what_the_leader_does_through_cancels_and_deadlines(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    options = {"queue_limit": 9, "prefill_joins": True}
    wire, leader, follower = pair(habitual_target, good_drafter, **options)
    leader.warm_up()
    requests = make_requests(0, 12)
    events = []
    for request in requests[:4]:
        leader.submit(request._replace(max_new_tokens=30, stop_tokens=()))
    events.append(leader.advance())
    leader.cancel(1)
    # By the leader's clock it has passed when the next step begins.
    leader.submit(requests[4]._replace(deadline=time.monotonic()))
    for request in requests[5:]:
        leader.submit(request)
    events += led(leader)
    wire.tell(None)
    follower.follow(NO_GRAMMARS)
    assert not wire.told
    assert plain(follower.events) == plain(events)
    told: dict[int, Event] = {}
    for turn in events:
        gather(told, turn)
    assert (told[1].ended, told[4].ended) == ("cancelled", "deadline")
    texts = generated(habitual_target, requests[5:]).tokens
    assert [told[number].tokens for number in range(5, 12)] == texts[:7]
    assert follower.counters == leader.counters


def test_what_the_leader_refuses_nobody_hears_of(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    wire, leader, _ = pair(habitual_target, good_drafter, slots=1, queue_limit=0)
    with pytest.raises(InputError, match="empty"):
        leader.submit(Request([], 1, 0))
    leader.submit(Request([1], 1, 0))
    with pytest.raises(QueueFull):
        leader.submit(Request([2], 1, 0))
    leader.advance()
    (turn,) = map(pickle.loads, wire.told)
    assert [call.request.prompt for call in turn.calls] == [[1]]


def test_the_leader_chooses_trees_by_its_own_clock(
    habitual_target: Target, good_drafter: LoadedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, leader, follower = pair(habitual_target, good_drafter, adaptive=True)
    leader.warm_up()
    chosen = iter([TREE, None, None, TREE, None, TREE])

    def choose(rows: int, temperatures: Any, most: int) -> tuple[TreeConfig | None, int]:
        return next(chosen, TREE), 1

    monkeypatch.setattr(leader._trees, "choose", choose)
    # What a slow process would find.
    monkeypatch.setattr(follower._trees, "choose", lambda rows, temperatures, most: (None, most))
    leader.submit(make_requests(0, 1)[0]._replace(max_new_tokens=30, stop_tokens=()))
    events = list(led(leader))
    drafted = [bool(event.drafted) for turn in events[1:6] for event in turn]
    assert {True, False} == set(drafted)
    wire.tell(None)
    follower.follow(NO_GRAMMARS)
    assert plain(follower.events) == plain(events)


def test_a_warm_up_ends_for_all_where_it_ends_for_one(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    wire, leader, follower = pair(habitual_target, good_drafter)
    leader.warm_up(lambda ready, programs: False)
    wire.tell(None)
    follower.follow(NO_GRAMMARS)
    assert not wire.told


@pytest.mark.parametrize("lost", [LostProcessError("process 1"), None])
def test_a_failed_step_is_the_loss_of_a_process_where_one_is_gone(
    habitual_target: Target,
    good_drafter: LoadedHead,
    monkeypatch: pytest.MonkeyPatch,
    lost: LostProcessError | None,
) -> None:
    wire, leader, _ = pair(habitual_target, good_drafter)
    fault = RuntimeError("Gloo: connection closed by peer")

    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(leader._runner, "read", fail)
    monkeypatch.setattr(wire, "wait_for_loss", lambda seconds: lost)
    leader.submit(Request([1], 1, 0))
    with pytest.raises((LostProcessError, RuntimeError)) as raised:
        leader.advance()
    assert raised.value is (lost or fault)


def test_a_grammar_is_compiled_when_it_is_announced_and_not_again_in_its_turn(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    wire, leader, follower = pair(habitual_target, good_drafter)
    leader.warm_up(lambda ready, programs: False)
    leader.announce_grammar("regex", "a+")
    (hint,) = [one for one in map(pickle.loads, wire.told) if isinstance(one, Hint)]
    wire.told.remove(pickle.dumps(hint))  # which a follower hears aside
    turn = Turn([Submitted(Request([1], 1, 0), ("regex", "a+"))], 1, None, 0.0)
    other = Submitted(Request([1], 1, 0), ("regex", "b+"))
    wire.tell(turn)
    wire.tell(turn._replace(calls=[other]))
    wire.tell(None)
    grammars = Mock(spec=GrammarCompiler)
    grammars.compile_stated.return_value = None  # a grammar that holds to nothing
    heard = follower.warm_up

    def announced(proceed: Any = None) -> None:
        heard()
        follower._follower._on_hint(hint.content)
        wait_until(lambda: grammars.compile_stated.called)

    with patch.object(follower, "warm_up", announced):
        follower.follow(grammars)
    assert grammars.compile_stated.mock_calls == [call("regex", "a+"), call("regex", "b+")]


def test_a_turn_does_not_wait_for_grammars_that_were_announced_before_its_own(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    wire, leader, follower = pair(habitual_target, good_drafter)
    leader.warm_up(lambda ready, programs: False)
    wire.tell(Turn([Submitted(Request([1], 1, 0), ("regex", "b+"))], 1, None, 0.0))
    wire.tell(None)
    grammars, ended = Mock(spec=GrammarCompiler), threading.Event()

    def compile_stated(name: str, stated: str) -> None:
        assert stated == "b+" or ended.wait(60)

    grammars.compile_stated.side_effect = compile_stated
    heard = follower.warm_up

    def announced(proceed: Any = None) -> None:
        heard()
        for stated in ("a+", "aa+", "b+"):  # more than are compiled at a time
            follower._follower._on_hint(("regex", stated))

    try:
        with patch.object(follower, "warm_up", announced):
            follower.follow(grammars)
        assert len(follower.events) == 1
    finally:
        ended.set()


@pytest.mark.long
def test_grammars_are_sent_as_they_are_stated() -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    target, drafter = schemas.pair()
    wire, leader, follower = pair(target, drafter, stop_tokens=(schemas.END,))
    schema = {"type": "array", "items": {"enum": ["rot", "blau"]}, "maxItems": 2}
    leader.warm_up(lambda ready, programs: False)
    for grammar in (Grammar(schema), Grammar(regex="(ab|cd){3,5}"), None):
        held = grammar and schemas.compiled(grammar)
        leader.submit(Request([65, 66], 40, 0, grammar=held))
    events = [*led(leader)]
    assert "grammar" not in {event.ended for turn in events for event in turn}
    wire.tell(None)
    follower.follow(
        GrammarCompiler(schemas.end_tokenizer(), target.config.vocab_size, (schemas.END,))
    )
    assert plain(follower.events) == plain(events)
