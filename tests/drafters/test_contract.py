"""Every drafter against the contract: whatever it proposes, no text changes."""

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from engine_runs import ROOM, ROWS, STOPS, gather, generated, make_requests
from small_batch import DRAFT, MIXED, PROMPTS
from tiny_models import (
    PARITY_CONFIG,
    forgetful_target,
    imitating_attention,
    imitating_block,
    imitating_eagle,
    imitating_hydra,
    imitating_medusa,
)
from toy_drafters import CHAIN, BigramAttention, RepeatLast, Undecorated

from redrafter_jax import (
    Generation,
    InputError,
    KeptCache,
    PromptLookup,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
    make_mesh,
    stream,
)
from redrafter_jax.drafters.base import LoadedHead, as_drafter
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.drafters.self_drafter import SelfDrafter
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, Request
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.cache import slots_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.parallel.model import Model

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = PARITY_CONFIG.vocab_size
WITH_LOOKUP = TreeConfig(beam_width=1, draft_rounds=2, lookup_tokens=3)
# A drafter, the tree that it drafts, and what it drafts at least of ten tokens.
KINDS = {
    "recurrent": DRAFT,
    "recurrent that attends": DRAFT,
    "medusa": DRAFT,
    "eagle": TreeConfig(beam_width=3, draft_rounds=3, num_nodes=12, rerank=True),
    "eagle of version 1": DRAFT,
    "block": DRAFT,
    "block of DFlash": TreeConfig(beam_width=3, draft_rounds=3, num_nodes=7, rerank=True),
    "hydra": DRAFT,
    "hydra of ++": TreeConfig(beam_width=3, draft_rounds=3, num_nodes=12, rerank=True),
    "lookup": CHAIN,
    "repeat": CHAIN,
    "bigram": CHAIN,
    "bigram and lookup": WITH_LOOKUP,
    "model": DRAFT,
    "self": DRAFT,
}
# Of these `make test` has the toy, which has a cache of its own.
QUICK = ("bigram",)
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "sampling": MIXED}
LONG = [(7 * token) % V for token in range(70)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def drafter(kind: str, habitual_target: Target, good_drafter: LoadedHead) -> Any:
    return {
        "recurrent": lambda: good_drafter,
        "recurrent that attends": lambda: imitating_attention(habitual_target),
        "medusa": lambda: imitating_medusa(habitual_target),
        "eagle": lambda: imitating_eagle(habitual_target, "3"),
        "eagle of version 1": lambda: imitating_eagle(habitual_target, "1"),
        "block": lambda: imitating_block(habitual_target, sequential=True, confidence=True),
        "block of DFlash": lambda: imitating_block(habitual_target, sequential=False),
        "hydra": lambda: imitating_hydra(habitual_target, prefix=False),
        "hydra of ++": lambda: imitating_hydra(habitual_target, prefix=True),
        "lookup": PromptLookup,
        "repeat": RepeatLast,
        # Without memory, and with fewer layers.
        "model": lambda: forgetful_target(memory=0.0),
        "self": lambda: SelfDrafter("", layers=1).of(habitual_target),
    }.get(kind, lambda: BigramAttention(V))()


@pytest.fixture(scope="module")
def tree(kind: str) -> TreeConfig:
    return KINDS[kind]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [*PROMPTS[:3], LONG]


@pytest.fixture(scope="module")
def result(
    habitual_target: Target, drafter: Any, tree: TreeConfig, prompts: list[list[int]]
) -> Generation:
    """What the drafter makes of the prompts, on one device."""
    return generate(habitual_target, drafter, prompts, tree=tree, **OPTIONS)


def test_texts_are_the_targets_own(
    habitual_target: Target, kind: str, prompts: list[list[int]], result: Generation
) -> None:
    expected = generate_autoregressive(habitual_target, prompts, **OPTIONS).tokens
    assert result.tokens == expected
    named = kind.removesuffix(" that attends").partition(" of ")[0]
    sources = named.split(" and ")
    assert list(result.accepted_by) == sources
    accepted = [sum(by_row) for by_row in zip(*result.accepted_by.values(), strict=True)]
    # A call gains what it accepts and the bonus, unless the row ends before the bonus.
    for row, steps in enumerate(result.steps):
        assert 0 <= len(expected[row]) - 1 - steps - accepted[row] + 1 <= 1
    assert sum(accepted) > 0, "some drafts came true"


@pytest.mark.long
@pytest.mark.further
def test_texts_with_penalties_are_the_targets_own(
    habitual_target: Target, drafter: Any, tree: TreeConfig
) -> None:
    """In batches, in an engine whose requests come and go, and in streams."""
    chance = np.random.default_rng(5)
    prompts = [chance.integers(V, size=chance.integers(1, 40)).tolist() for _ in range(120)]
    samplings = [
        SamplingConfig(
            temperature=float(row % 2),
            presence_penalty=float(chance.choice([0, 0.8, -0.5])),
            frequency_penalty=float(chance.choice([0, 0.4])),
            repetition_penalty=float(chance.choice([1, 1.3, 0.9])),
            logit_bias={3: 2.0, int(chance.integers(V)): -100.0} if row % 3 == 0 else None,
            min_tokens=int(chance.integers(8)),
        )
        for row in range(120)
    ]
    limits = chance.integers(8, 40, size=120).tolist()
    asked: dict[str, Any] = {"sampling": samplings, "max_new_tokens": limits}
    asked |= {"eos_token_ids": [2, 7]}
    expected = generate_autoregressive(habitual_target, prompts, **asked).tokens
    result = generate(habitual_target, drafter, prompts, tree=tree, **asked)
    assert result.tokens == expected
    assert result.acceptance_length > 1
    *_, last = stream(habitual_target, drafter, prompts, tree=tree, steps_per_yield=4, **asked)
    assert last.generation.tokens == expected
    engine = Engine(
        habitual_target,
        drafter,
        tree=tree,
        slots=6,
        context_length=ROOM,
        cache_memory=page_bytes(habitual_target, as_drafter(drafter)) * 8,
        stop_tokens=[2, 7],
        steps_per_call=3,
        prefill_chunk=16,
    )
    told: dict[int, Event] = {}
    for row, prompt in enumerate(prompts):
        engine.submit(Request(prompt, limits[row], row, samplings[row]))
        gather(told, engine.advance())
    while engine.busy:
        gather(told, engine.advance())
    assert [told[row].tokens for row in range(120)] == expected


def test_a_beginning_that_is_kept_serves_the_drafter_too(
    habitual_target: Target, drafter: Any, tree: TreeConfig
) -> None:
    prompt, cache = LONG, KeptCache(200)
    for more in ([], [5, 6], [1], LONG[:30]):
        prompt = [*prompt, *more]
        options: dict[str, Any] = {"max_new_tokens": 12, "tree": tree}
        *_, alone = stream(habitual_target, drafter, [prompt], **options)
        *_, last = stream(habitual_target, drafter, [prompt], kept_cache=cache, **options)
        assert last.generation.tokens == alone.generation.tokens
        # It drafts as if it had read the whole text itself.
        assert last.generation.steps == alone.generation.steps
        prompt = [*prompt, *alone.generation.tokens[0][:7]]


def test_requests_come_go_and_are_cancelled(
    habitual_target: Target, drafter: Any, tree: TreeConfig
) -> None:
    chance, requests = random.Random(0), make_requests(0, ROWS)
    engine = Engine(
        habitual_target,
        drafter,
        tree=tree,
        slots=3,
        context_length=ROOM,
        stop_tokens=STOPS,
        steps_per_call=2,
        prefill_chunk=8,
        prefill_joins=True,
    )
    told: dict[int, Event] = {}
    cancelled = set()
    for request in requests:
        number = engine.submit(request)
        for _ in range(chance.choice([0, 1, 3])):
            gather(told, engine.advance())
        if chance.random() < 0.2:
            cancelled.add(number)
            engine.cancel(number)
    while engine.busy:
        gather(told, engine.advance())
    assert engine.counters.reused_tokens > 0
    for number, text in enumerate(generated(habitual_target, requests).tokens):
        own = told[number].tokens
        assert own == (text[: len(own)] if number in cancelled else text)


@pytest.mark.parametrize(
    ("data", "model"),
    [(2, 1), pytest.param(1, 2, marks=(pytest.mark.long, pytest.mark.further))],
)
def test_on_a_mesh_it_drafts_the_same(
    habitual_target: Target,
    drafter: Any,
    tree: TreeConfig,
    prompts: list[list[int]],
    result: Generation,
    data: int,
    model: int,
) -> None:
    mesh = make_mesh(data, model)
    placed: Any = place(drafter, mesh) if isinstance(drafter, Model) else drafter
    if isinstance(drafter, ModelDrafter):
        placed = replace(drafter, model=place(drafter.model, mesh))
    ours = generate(place(habitual_target, mesh), placed, prompts, tree=tree, **OPTIONS)
    assert ours.tokens == result.tokens
    assert ours.steps == result.steps


def test_the_cache_holds_what_the_drafter_read(habitual_target: Target) -> None:
    """Entry i is the bigram of tokens i and i + 1, also where a beginning was another text's."""
    engine = Engine(
        habitual_target, BigramAttention(V), slots=1, context_length=200, prefill_chunk=8
    )
    text: list[int] = []
    beginning = [*LONG, *LONG]
    for prompt in (beginning, [*beginning[: 2 * PAGE + 2], 4, 4], [*beginning[:PAGE], 4, 5, 6]):
        engine.submit(make_requests(0, 1)[0]._replace(prompt=prompt, max_new_tokens=9))
        text = list(prompt)
        while engine.busy:
            text += [token for event in engine.advance() for token in event.tokens]
        cache = engine.state.cache
        keys, values = (
            np.asarray(slots_of(layers[-1], cache.table))[0, 0, : len(text) - 1]
            for layers in (cache.keys, cache.values)
        )
        assert keys.argmax(axis=1).tolist() == text[:-1]
        assert values.argmax(axis=1).tolist() == text[1:]
    # Two pages of the second; what ends the first page of the third is of another bigram.
    assert engine.counters.reused_tokens == 2 * PAGE


def test_a_call_gains_what_the_toy_guesses(habitual_target: Target) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "sampling": MIXED}
    result = generate(habitual_target, RepeatLast(), PROMPTS, tree=CHAIN, **options)
    for row, text in enumerate(result.tokens):
        steps, decided = 0, 1
        while decided < len(text):
            right = 0
            while right < 3 and text[decided + right : decided + right + 1] == [text[decided - 1]]:
                right += 1
            steps, decided = steps + 1, decided + right + 1
        assert result.steps[row] == steps


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("drafter", "tree", "words"),
    [
        (PromptLookup(), TreeConfig(), ["prompt lookup drafts a chain", "beam_width=1"]),
        (PromptLookup(), TreeConfig(1, 512), ["draft_rounds is 512", "512 positions"]),
        (None, TreeConfig(), ["there is no drafter", "leave tree out"]),
        (RepeatLast(), 8, ["tree is 8", "give a TreeConfig"]),
        ("lookup", None, ["drafter is 'lookup'", "the result of load_drafter"]),
        (Undecorated(), None, ["Undecorated is not a pytree", "register_dataclass"]),
    ],
)
def test_what_does_not_fit_is_refused(
    habitual_target: Target, drafter: Any, tree: Any, words: list[str]
) -> None:
    with pytest.raises(InputError) as refused:
        generate(habitual_target, drafter, PROMPTS, max_new_tokens=2, tree=tree)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_drafter_is_a_pytree_without_state() -> None:
    assert jax.tree.leaves(BigramAttention(V)) == []
