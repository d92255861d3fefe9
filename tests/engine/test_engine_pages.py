"""An engine with fewer pages than its slots could fill: texts, counts, and what is shared."""

import random
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from engine_runs import gather, run
from tiny_models import forgetful_target, imitating_eagle, random_target, tiny_config

from redrafter_jax import (
    InputError,
    KeptCache,
    PromptLookup,
    SamplingConfig,
    TreeConfig,
    generate,
    make_mesh,
    stream,
)
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, QueueFull, Request
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.engine.trees import bind_models
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS, LENGTH = 6, 4 * PAGE
TREE = TreeConfig(beam_width=2, draft_rounds=2)


@pytest.fixture(scope="module")
def target() -> Target:
    return forgetful_target(memory=0.15, config=tiny_config(max_position_embeddings=LENGTH))


def engine_of(target: Target, drafter: Any, pages: int | None, **options: Any) -> Engine:
    shapes: dict[str, Any] = {
        "tree": TREE,
        "slots": SLOTS,
        "context_length": LENGTH,
        "stop_tokens": (),
        "steps_per_call": 3,
        "prefill_chunk": 32,
        "row_counts": (),
    }
    given = shapes | options
    bound, _ = bind_models(target, drafter, given["tree"])
    given.setdefault("cache_memory", pages and pages * page_bytes(target, bound))
    return Engine(target, drafter, **given)


def requests_of(count: int, seed: int) -> list[Request]:
    """A third shares one of three beginnings; some fill all positions that there are."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(24) for _ in range(2 * PAGE)] for _ in range(3)]
    made = []
    for number in range(count):
        beginning = chance.choice(beginnings) if chance.random() < 1 / 3 else []
        rest = [chance.randrange(24) for _ in range(chance.randint(1, 60))]
        prompt = [*beginning, *rest]
        limit = chance.choice([1, 20, 60, LENGTH - len(prompt)])
        sampling = chance.choice([SamplingConfig(), SamplingConfig(1.0)])
        made.append(Request(prompt, min(limit, LENGTH - len(prompt)), number, sampling, ()))
    return made


def texts_alone(target: Target, requests: list[Request]) -> list[list[int]]:
    result = generate(
        target,
        None,
        [request.prompt for request in requests],
        max_new_tokens=[request.max_new_tokens for request in requests],
        sampling=[request.sampling for request in requests],
        seeds=[request.seed for request in requests],
        eos_token_ids=(),
    )
    return result.tokens


def crowd(engine: Engine, requests: list[Request], cancels: float = 0.0) -> dict[int, Event]:
    """What requests of which new ones come all the time are told; some are cancelled."""
    chance = random.Random(len(requests))
    told: dict[int, Event] = {}
    for request in requests:
        number = engine.submit(request)
        for _ in range(chance.choice([0, 0, 1, 2])):
            gather(told, engine.advance())
        if chance.random() < cancels:
            engine.cancel(number - chance.randint(0, 3))
    return told | run_on(engine, told)


def run_on(engine: Engine, told: dict[int, Event]) -> dict[int, Event]:
    while engine.busy:
        gather(told, engine.advance())
    return told


def assert_texts(told: dict[int, Event], texts: list[list[int]]) -> None:
    for number, text in enumerate(texts):
        event = told[number]
        if event.ended == "cancelled":
            assert event.tokens == text[: len(event.tokens)]
        else:
            assert (event.tokens, event.ended) == (text, "length")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "cancels"),
    [("none", 0.0), ("eagle", 0.15)],
    ids=["baseline", "drafter with a cache"],
)
def test_every_text_is_its_own_in_a_quarter_of_the_pages(
    target: Target, kind: str, cancels: float
) -> None:
    drafter = None if kind == "none" else imitating_eagle(target, "3")
    pages = SLOTS * LENGTH // PAGE // 4
    # With a drafter chunks are read together with steps.
    options = {"tree": TREE, "prefill_joins": True} if drafter else {"tree": None}
    engine = engine_of(target, drafter, pages, **options)
    requests = requests_of(24, 0)
    told = crowd(engine, requests, cancels)
    assert_texts(told, texts_alone(target, requests))
    assert engine.preemptions > 0
    assert engine.counters.reused_tokens > 0
    if not cancels:
        assert engine.counters.prompt_tokens == sum(len(one.prompt) for one in requests)
    assert engine.pages_used == 0, "no page is lost"


@pytest.mark.long
@pytest.mark.further
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("data", [1, 2])
def test_five_hundred_requests_leave_no_page_behind(target: Target, data: int, seed: int) -> None:
    mesh = None if data == 1 else make_mesh(data, 1)
    drafter = imitating_eagle(target, "3")
    placed = (place(target, mesh), place(drafter, mesh)) if mesh else (target, drafter)
    clock = iter(range(10**9))
    options = {"clock": lambda: next(clock), "prefill_joins": seed == 2}
    engine = engine_of(*placed, SLOTS * LENGTH // PAGE // 4, **options)
    requests = requests_of(500, seed)
    patient = [
        one._replace(deadline=float(40 * at + 4000) if at % 50 == 7 else one.deadline)
        for at, one in enumerate(requests)
    ]
    engine.warm_up()
    told = crowd(engine, patient, cancels=0.1)
    assert engine.counters.compiled == 0
    late = [number for number, event in told.items() if event.ended == "deadline"]
    texts = texts_alone(target, requests)
    for number in late:
        event = told.pop(number)
        assert event.tokens == texts[number][: len(event.tokens)]
        told[number] = event._replace(ended="cancelled")
    assert_texts(told, texts)
    assert engine.preemptions > 0
    assert engine.pages_used == 0


def test_what_is_shared_is_not_copied_and_what_is_not_shared_is_not_seen(target: Target) -> None:
    engine = engine_of(target, None, None, tree=None, slots=2)
    beginning = [n % 24 for n in range(2 * PAGE)]
    first, second = (Request([*beginning, n, n], 9, 0, stop_tokens=()) for n in (1, 2))
    engine.submit(first)
    run(engine)
    kept = set(engine._scheduler.pools[0]._left)
    assert len(kept) == 2
    shared = [page in kept for page in range(engine.pages)]
    # Nothing of any other page may reach the text.
    cache = engine.state.cache
    spoilt = tuple(
        tuple(layer.at[~np.array(shared)].set(np.nan) for layer in side)
        for side in (cache.keys, cache.values)
    )
    engine._runner.state = engine._runner.state._replace(
        cache=cache._replace(keys=spoilt[0], values=spoilt[1])
    )
    before = jax.tree.map(lambda layer: np.array(layer[np.array(shared)]), spoilt)
    engine.submit(second)
    (event,) = run(engine).values()
    assert engine.counters.reused_tokens == 2 * PAGE
    assert event.tokens == texts_alone(target, [second])[0]
    cache = engine.state.cache
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves((cache.keys, cache.values)), strict=True
    ):
        np.testing.assert_array_equal(np.array(new)[np.array(shared)], old)


@pytest.mark.long
def test_a_beginning_that_is_shared_serves_layers_that_see_a_window() -> None:
    config = tiny_config(
        sliding_window=5, windowed_layers=(0,), max_position_embeddings=LENGTH, vocab_size=24
    )
    target = random_target(config)
    engine = engine_of(target, PromptLookup(), None, tree=TreeConfig(1, 3), slots=2)
    beginning = [n * n % 24 for n in range(2 * PAGE - 3)]
    requests = [Request(beginning, 20, 0, stop_tokens=())]
    engine.submit(requests[0])
    told = run(engine)
    # It goes on within the page that the first answer has filled.
    requests.append(Request([*beginning, *told[0].tokens[:9]], 20, 1, stop_tokens=()))
    engine.submit(requests[1])
    told |= run(engine)
    assert engine.counters.reused_tokens == 2 * PAGE
    assert [told[n].tokens for n in (0, 1)] == texts_alone(target, requests)


def test_a_request_that_has_given_way_tells_each_token_once(target: Target) -> None:
    engine = engine_of(target, None, 4, tree=None, slots=2)
    requests = [Request([n], 3 * PAGE, n, stop_tokens=()) for n in (1, 2)]
    told_of: list[int] = []
    engine.on_admission = lambda number, cached: told_of.append(number)
    for request in requests:
        engine.submit(request)
    told = run(engine)
    assert engine.preemptions > 0
    assert told_of == [0, 1]
    assert engine.counters.prompt_tokens == 2
    for event, text in zip(told.values(), texts_alone(target, requests), strict=True):
        assert event.tokens == text
        assert [token.call for token in event.decided] == list(range(3 * PAGE))


@pytest.mark.parametrize(
    "where", ["runner.read_rows", "runner.decode_rows", "runner.place", "engine.to_host"]
)
def test_an_engine_that_was_interrupted_goes_on_with_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    prompt = [n % 24 for n in range(2 * PAGE + 9)]
    kept, drafter = KeptCache(LENGTH), PromptLookup()
    tree = TreeConfig(beam_width=1, draft_rounds=3)
    options: dict[str, Any] = {"max_new_tokens": 20, "tree": tree, "kept_cache": kept}
    (*_, last) = stream(target, drafter, [[5]], **options)
    engine = kept._engine
    assert engine is not None
    with monkeypatch.context() as patch:
        patch.setattr(f"redrafter_jax.engine.{where}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(stream(target, drafter, [prompt], **options))
    assert not engine.intact
    with pytest.raises(InputError, match="interrupted within a step; make another engine"):
        engine.advance()
    (*_, last) = stream(target, drafter, [prompt], **options)
    assert kept._engine is not engine
    alone = generate(target, None, [prompt], max_new_tokens=20)
    assert last.generation.tokens == alone.tokens


def test_a_request_counts_as_waiting_where_slots_are_free_and_pages_are_not(
    target: Target,
) -> None:
    engine = engine_of(target, None, 4, tree=None, queue_limit=0)
    long = Request([1] * (3 * PAGE), PAGE, 0, stop_tokens=())
    engine.submit(long)
    engine.advance()
    engine.submit(Request([2] * (3 * PAGE), PAGE, 1, stop_tokens=()))
    for _ in range(3 * PAGE // 32):  # chunks of the first prompt
        engine.advance()
    with pytest.raises(QueueFull, match="1 requests wait"):
        engine.submit(Request([3], 4, 2))
    engine.cancel_all()
    engine.submit(Request([3], 4, 2))
    assert len(run(engine)) == 1


def test_memory_for_one_text_is_the_least(target: Target) -> None:
    page = page_bytes(target, bind_models(target, None, None)[0])
    with pytest.raises(InputError, match="hold a text of 193 tokens, but context_length is 256;"):
        engine_of(target, None, 3, tree=None)
    assert engine_of(target, None, 3, tree=None, context_length=193).pages == 3
    with pytest.raises(InputError, match=r"^cache_memory is 0; it must be 1"):
        engine_of(target, None, None, tree=None, cache_memory=0)
    assert page == 2 * 2 * 2 * PAGE * 8 * 4, (
        "keys and values, layers, heads, tokens, width, float32"
    )
