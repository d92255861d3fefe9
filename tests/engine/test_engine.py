"""Requests that come and go: each gets what `generate` gives it, whatever else is decoded."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any
from unittest.mock import Mock, call

import jax
import numpy as np
import pytest
from engine_runs import ROWS, STOPS, gather, generated, make_requests, run
from tiny_models import forgetful_target, imitating_drafter, tiny_config
from toy_drafters import RepeatLargest

from redrafter_jax import SamplingConfig, TreeConfig
from redrafter_jax.engine import runner as runner_module
from redrafter_jax.engine import trees as trees_module
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, QueueFull, Request
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

CHUNK, STEPS = 8, 3
# Four rows together draft a tree, a few of them a larger one or, to compile less, none.
COMBINED = TreeConfig(beam_width=2, draft_rounds=2, lookup_tokens=2)


def table_of(few: TreeConfig | None) -> TreeTable:
    trees = TunedTree(1, 0.0, few, 1.0, 1.0), TunedTree(4, 0.0, COMBINED, 1.5, 1.5)
    return TreeTable("cpu", "float32", trees)


MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def shallow_target() -> Target:
    """Of one layer, for most of the time goes to compiling them."""
    return forgetful_target(memory=0.15, config=tiny_config(num_hidden_layers=1))


@pytest.fixture(scope="module")
def make_engine(shallow_target: Target) -> MakeEngine:
    """Engines of the same shapes, so that they share what is compiled."""
    drafter = imitating_drafter(shallow_target)

    def make(**options: Any) -> Engine:
        shapes: dict[str, Any] = {
            "drafter": drafter,
            "tree": table_of(None),
            "adaptive": False,
            "slots": 4,
            "context_length": 200,
            "stop_tokens": STOPS,
            "steps_per_call": STEPS,
            "prefill_chunk": CHUNK,
            "top_log_probs": 2,
        }
        engine = Engine(shallow_target, **(shapes | options))
        engine.warm_up()
        return engine

    return make


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Is told what the engine calls on its device, and calls it."""
    device = Mock()
    for name in ("read_rows", "decode_rows", "read_and_decode_rows"):
        watched = getattr(device, name)
        watched.side_effect = getattr(runner_module, name)
        monkeypatch.setattr(runner_module, name, watched)
    return device


@pytest.mark.long
def test_a_warm_up_tells_how_many_programs_are_ready(make_engine: MakeEngine) -> None:
    told: list[tuple[int, int]] = []

    def tell(ready: int, programs: int) -> bool:
        told.append((ready, programs))
        return len(told) < 5

    make_engine().warm_up(tell)
    # Before all of the first turn and two of the second, where it ends.
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4), (4, 4)]


LARGER = TreeConfig(beam_width=3, draft_rounds=5)


@pytest.mark.parametrize(
    ("seed", "few", "joins"),
    [
        (0, None, False),
        pytest.param(1, None, False, marks=pytest.mark.long),
        pytest.param(2, None, True, marks=pytest.mark.long),
        pytest.param(3, LARGER, False, marks=pytest.mark.long),
    ],
)
def test_every_request_gets_what_generate_gives_it(
    shallow_target: Target, make_engine: MakeEngine, seed: int, few: TreeConfig | None, joins: bool
) -> None:
    chance = random.Random(seed)
    engine = make_engine(tree=table_of(few), prefill_joins=joins)
    requests = make_requests(seed, ROWS)
    trees = {rows: [tree for r, tree in engine._trees.programs if r == rows] for rows in (1, 4)}

    def choose(
        rows: int, temperatures: Sequence[float], most: int
    ) -> tuple[TreeConfig | None, int]:
        return chance.choice(trees[rows]), chance.randint(1, most)

    with pytest.MonkeyPatch.context() as patch:
        # Whatever tree is chosen, for however many steps.
        patch.setattr(engine._trees, "choose", choose)
        told: dict[int, Event] = {}
        cancelled = set()
        for request in requests:
            number = engine.submit(request)
            for _ in range(chance.choice([0, 0, 1, 2, 5])):
                gather(told, engine.advance())
            if chance.random() < 0.25:
                cancelled.add(number)
                engine.cancel(number)
        while engine.busy:
            gather(told, engine.advance())
    assert engine.active == engine.waiting == 0
    assert engine.counters.compiled == 0
    expected = generated(shallow_target, requests)
    assert expected.log_probs is not None
    for number, request in enumerate(requests):
        event, tokens = told[number], expected.tokens[number]
        stops = STOPS if request.stop_tokens is None else request.stop_tokens
        if event.ended == "cancelled":
            assert number in cancelled
            tokens = tokens[: len(event.tokens)]
        else:
            assert event.ended == ("stop" if tokens[-1] in stops else "length")
        assert event.tokens == tokens
        log_probs = expected.log_probs[number][: len(tokens)]
        told_log_probs = [token.log_prob for token in event.decided]
        np.testing.assert_allclose(told_log_probs, log_probs, atol=1e-5)
        for token in event.decided:
            first, second = token.top
            assert first[1] >= second[1]
            assert first[1] >= token.log_prob - 1e-5
            if request.sampling.temperature == 0:
                assert first == (token.id, pytest.approx(token.log_prob))


@pytest.mark.parametrize("changes", [{}, {"drafter": None, "tree": None}])
def test_eight_requests_in_four_slots_share_calls(
    make_engine: MakeEngine, device: Mock, changes: dict[str, Any]
) -> None:
    engine = make_engine(**changes)

    def decode_calls(*groups: list[Request]) -> int:
        device.reset_mock()
        for group in groups:
            for request in group:
                engine.submit(request)
            assert [len(event.tokens) for event in run(engine).values()] == [25] * len(group)
        return device.decode_rows.call_count

    requests = [Request([n], 25, n, stop_tokens=()) for n in range(8)]
    # The prompt gives a token, eight calls of three steps the other 24.
    assert decode_calls(*[[request] for request in requests]) == 8 * 8
    # Before a call one prompt is read: the fourth starts with the fourth call, and each slot
    # decodes two.
    together = decode_calls(requests)
    if changes:
        assert together == 3 + 2 * 8
    else:
        assert together < 3 + 2 * 8
    assert engine.counters.compiled == 0
    jax.jit(lambda value: value + 1)(np.arange(3))
    assert engine.counters.compiled > 0


def test_a_tree_that_costs_more_than_it_gains_gives_way_and_no_text_changes(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees_module, "_seconds", {})
    monkeypatch.setattr(trees_module, "_learned", {})
    requests = [Request([n], 40, n, stop_tokens=()) for n in range(4)]

    def texts_and_drafted(seconds: float, **options: Any) -> tuple[list[list[int]], int]:
        engine = make_engine(adaptive=True, **options)
        # What a step took, whatever this machine is doing.
        monkeypatch.setattr(engine._trees, "seconds", lambda rows, tree: seconds if tree else 1.0)
        for request in requests:
            engine.submit(request)
        told = run(engine)
        return [told[n].tokens for n in range(4)], engine.counters.drafted["recurrent"]

    texts, cheap = texts_and_drafted(seconds=1.0, tree=COMBINED)
    same, dear = texts_and_drafted(seconds=100.0, tree=COMBINED)
    assert same == texts
    assert 0 < dear < cheap / 2


def test_calls_and_origins_say_who_proposed_what(make_engine: MakeEngine) -> None:
    engine = make_engine()
    spoken = engine.submit(Request([1, 2, 3], 30, 0, stop_tokens=()))
    silent = engine.submit(Request([1, 2, 4], 20, 0, stop_tokens=(), speculate=False))
    told = run(engine)
    event = told[spoken]
    calls = [[token.origin for token in own] for _, own in groupby(event.decided, lambda t: t.call)]
    assert [token.call for token in event.decided] == [
        call for call, own in enumerate(calls) for _ in own
    ]
    assert len(calls[0]) == 1, "prefill gains the first token"
    for *drafted, bonus in calls:
        assert bonus is None
        assert all(origin in ("recurrent", "lookup") for origin in drafted)
    assert max(map(len, calls)) > 1
    quiet = [(token.call, token.origin) for token in told[silent].decided]
    assert quiet == [(n, None) for n in range(20)], "as without a drafter, beside one that drafts"
    counters = engine.counters
    assert counters.gained == len(event.tokens) + len(told[silent].tokens) - 2
    assert counters.target_calls == len(calls) + 20 - 2
    proposed = [token.origin for token in event.decided if token.origin]
    assert counters.accepted == {name: proposed.count(name) for name in set(proposed)}
    lengths = [len(own) - 1 for own in calls]
    assert counters.accepted_at == {
        depth: sum(length >= depth for length in lengths) for depth in range(1, max(lengths) + 1)
    }
    nodes = {draft.call: draft.nodes for draft in event.drafted}
    assert counters.drafted_calls == len(nodes) > 1
    assert all(length <= sum(nodes.get(n, {}).values()) for n, length in enumerate(lengths))
    assert counters.drafted == sum((Counter(one) for one in nodes.values()), Counter())
    assert told[silent].drafted == []
    for name, accepted in counters.accepted.items():
        assert counters.drafted[name] >= accepted


def test_a_prompt_that_begins_like_a_kept_text_reads_the_rest_alone(
    shallow_target: Target, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    first = Request([n % 24 for n in range(PAGE - 3)], 6, 0, stop_tokens=())
    engine.submit(first)
    (event,) = run(engine).values()
    assert engine.counters.prefill_passes == 8  # of 8 tokens
    # It ends in a page that its answer has filled, and one more token.
    second = Request(first.prompt + event.tokens[:4], 6, 1, stop_tokens=())
    engine.submit(second)
    (event,) = run(engine).values()
    assert engine.counters.prefill_passes == 9
    assert engine.counters.reused_tokens == PAGE
    assert event.tokens == generated(shallow_target, [second]).tokens[0]


def test_a_request_begins_without_what_the_drafter_kept_of_the_one_before(
    make_engine: MakeEngine,
) -> None:
    drafter = RepeatLargest()
    engine = make_engine(drafter=drafter, tree=drafter.default_tree, slots=1)
    prompts = [20] * (2 * CHUNK), [3, 19, *[2] * CHUNK]
    for prompt in prompts:
        engine.submit(Request(prompt, 1, 0, stop_tokens=()))
        while engine.busy:
            engine.advance()
        assert engine.state.own.tolist() == [max(prompt)]


def test_a_beginning_is_shared_with_a_row_that_goes_on(
    shallow_target: Target, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    engine.on_admission = Mock()
    prompt = [n % 24 for n in range(PAGE)]
    requests = [Request([*prompt, n], 30, n, stop_tokens=()) for n in range(3)]
    for request in requests:
        engine.submit(request)
    told = run(engine)
    assert engine.counters.prefill_passes == 9 + 1 + 1
    assert engine.counters.reused_tokens == 2 * PAGE
    assert engine.on_admission.mock_calls == [call(0, 0), call(1, PAGE), call(2, PAGE)]
    texts = generated(shallow_target, requests).tokens[:3]
    assert [told[number].tokens for number in range(3)] == texts


def test_a_long_prompt_is_admitted_and_then_stops_nobody_for_more_than_a_chunk(
    make_engine: MakeEngine, device: Mock
) -> None:
    engine = make_engine()
    engine.on_admission = device.admitted
    running = [
        engine.submit(Request([n], 40, n, stop_tokens=(), speculate=False)) for n in range(2)
    ]
    engine.advance()
    engine.advance()
    device.reset_mock()
    long = engine.submit(Request([n % 24 for n in range(50)], 5, 9))
    for passes in range(1, 8):
        events = {event.number: event for event in engine.advance()}
        told = [name for name, *_ in device.mock_calls]
        assert told == ["admitted", *["read_rows", "decode_rows"] * passes]
        assert [len(events[number].tokens) for number in running] == [STEPS] * 2
        assert (long in events) == (passes == 7), "50 tokens are seven chunks of 8"
    device.admitted.assert_called_once_with(long, 0)


@pytest.mark.long
def test_a_chunk_joins_a_step_of_rows_that_decode(
    shallow_target: Target, make_engine: MakeEngine, device: Mock
) -> None:
    engine = make_engine(prefill_joins=True)
    requests = [Request([n], 40, n, stop_tokens=(), speculate=False) for n in range(2)]
    told: dict[int, Event] = {}
    for request in requests:
        engine.submit(request)
        gather(told, engine.advance())
    long = Request([n % 24 for n in range(20)], 5, 9, stop_tokens=())
    penalised = long._replace(sampling=SamplingConfig(presence_penalty=1.0))
    for name, request in (("read_and_decode_rows", long), ("read_rows", penalised)):
        number = engine.submit(request)
        for passes in range(1, 4):
            device.reset_mock()
            events = {event.number: event for event in engine.advance()}
            assert [one for one, *_ in device.mock_calls] == [name, "decode_rows"]
            # One step of the chunk's program, and the others in the next.
            assert [len(events[row].tokens) for row in range(2)] == [STEPS] * 2
            assert (number in events) == (passes == 3), "20 tokens are three chunks of 8"
            gather(told, list(events.values()))
        while not told[number].ended:
            gather(told, engine.advance())
        requests.append(request)
    told |= run(engine)
    texts = generated(shallow_target, requests).tokens
    assert [told[row].tokens for row in range(2, 4)] == texts[2:4]


def test_deadlines_end_rows_that_wait_and_rows_that_run(make_engine: MakeEngine) -> None:
    clock = Mock(return_value=0.0)
    engine = make_engine(clock=clock)
    early = [engine.submit(Request([n], 60, n, stop_tokens=(), deadline=1.0)) for n in range(4)]
    late = engine.submit(Request([4], 60, 4, stop_tokens=(), deadline=9.0))
    waiting = engine.submit(Request([5], 30, 5, deadline=1.0))
    for _ in range(4):
        engine.advance()
    clock.return_value = 1.5
    ended = {event.number: event.ended for event in engine.advance() if event.ended}
    assert ended == dict.fromkeys([*early, waiting], "deadline")
    assert engine.active == 1
    assert run(engine)[late].ended == "length"


def test_a_cancelled_request_frees_its_slot_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    numbers = [engine.submit(Request([n] * 30, 20, n, stop_tokens=())) for n in range(6)]
    engine.advance()  # one is being read, the others wait
    engine.cancel(numbers[0])
    engine.cancel(numbers[3])
    engine.cancel(99)  # has never been
    assert (engine.active, engine.waiting) == (0, 4)
    told = run(engine)
    assert {n: event.ended for n, event in told.items() if event.ended == "cancelled"} == {
        numbers[0]: "cancelled",
        numbers[3]: "cancelled",
    }
    engine.cancel(numbers[1])  # has ended
    assert not engine.busy


def test_the_queue_has_a_limit_and_says_at_what_pace_it_moves(make_engine: MakeEngine) -> None:
    clock = Mock(return_value=0.0)
    engine = make_engine(queue_limit=2, clock=clock)
    request = Request([7], 60, 0, stop_tokens=())
    numbers = [engine.submit(request) for _ in range(6)]  # of which four will have slots
    with pytest.raises(QueueFull, match="6 requests wait"):
        engine.submit(request)
    for _ in range(4):
        engine.advance()
    clock.return_value = 10.0
    for number in numbers[:2]:
        engine.cancel(number)
        engine.submit(request)
    with pytest.raises(QueueFull) as full:
        engine.submit(request)
    assert full.value.seconds == 5.0, "two slots in ten seconds"
    run(engine)
    engine.submit(request)
    assert len(run(engine)) == 1
