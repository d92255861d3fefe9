"""Texts that are held to grammars: valid, and those of plain decoding."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from schemas import END, compiled, end_tokenizer, pair, random_schema

from redrafter_jax import (
    Generation,
    Grammar,
    InputError,
    SamplingConfig,
    TreeConfig,
    generate,
    make_mesh,
    stream,
)
from redrafter_jax.drafters.base import as_drafter
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.state import page_bytes
from redrafter_jax.parallel.mesh import place
from redrafter_jax.text.grammars import GrammarCompiler

pytest.importorskip("llguidance", reason="needs the extra structured")
pytestmark = pytest.mark.usefixtures("quick_compilation")

TREE = TreeConfig(beam_width=3, draft_rounds=4)
SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["rot", "blau"]}, "maxItems": 2},
    },
    "required": ["größe", "tags"],
    "additionalProperties": False,
}


def text_of(tokens: list[int]) -> str:
    return end_tokenizer().decode(tokens)


def requests(count: int = 4) -> dict[str, Any]:
    """Rows held and free by turns, greedy and sampled."""
    random = np.random.default_rng(0)
    held = [compiled(Grammar(SCHEMA)), None, compiled(Grammar(regex="(ab|cd){3,5}")), None]
    samplings = [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(1.0), SamplingConfig()]
    return {
        "prompts": [random.integers(256, size=size).tolist() for size in range(3, 3 + count)],
        "max_new_tokens": 80,
        "grammars": (held * count)[:count],
        "sampling": (samplings * count)[:count],
        "eos_token_ids": [END],
    }


@cache
def plain() -> Generation:
    return generate(pair()[0], None, **requests())


def test_texts_are_those_without_speculation_and_valid() -> None:
    target, drafter = pair()
    ours = generate(target, drafter, tree=TREE, **requests())
    assert ours.tokens == plain().tokens
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(text_of(ours.tokens[0][:-1])), SCHEMA)
    assert ours.tokens[2][-1] == END
    # What the grammar forces is accepted, whatever the drafter thinks.
    assert ours.accepted_by["grammar"][0] > 10
    assert ours.accepted_by["grammar"][1] == 0
    assert ours.steps[0] < len(ours.tokens[0]) / 2
    free: Any = requests() | {"grammars": None}
    alone = generate(target, drafter, tree=TREE, **free)
    assert [alone.tokens[1], alone.tokens[3]] == [ours.tokens[1], ours.tokens[3]]


@pytest.mark.long
def test_in_streams_engines_and_on_meshes_texts_are_the_same() -> None:
    target, drafter = pair()
    expected = plain().tokens
    *_, last = stream(target, drafter, tree=TREE, steps_per_yield=3, **requests())
    assert last.generation.tokens == expected
    for data, model in ((2, 1), (1, 2)):
        mesh = make_mesh(data, model)
        on_mesh = generate(place(target, mesh), place(drafter, mesh), tree=TREE, **requests())
        assert on_mesh.tokens == expected
    asked = requests()
    columns = ("prompts", "grammars", "sampling")
    rows = list(zip(*(asked[name] for name in columns), strict=True))
    engine = Engine(
        target,
        drafter,
        tree=TREE,
        slots=3,
        context_length=100,
        # Too few pages for all: requests lose their slots and go on later.
        cache_memory=page_bytes(target, as_drafter(drafter)) * 3,
        stop_tokens=[END],
    )
    numbers = {
        engine.submit(Request(prompt, 80, row, sampling, grammar=grammar)): row
        for row, (prompt, grammar, sampling) in enumerate(rows)
    }
    told: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.advance():
            told[event.number] += event.tokens
    assert engine.preemptions > 0
    assert [told[number] for number in numbers] == expected


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_schemas(temperature: float) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    target, drafter = pair()
    random = np.random.default_rng(200)
    valid, forced = 0, 0
    for _ in range(10):
        schemas = [random_schema(random) for _ in range(20)]
        held = [compiled(Grammar(schema)) for schema in schemas]
        asked: dict[str, Any] = {
            "prompts": [random.integers(256, size=5).tolist() for _ in range(24)],
            # Free rows end soon, held ones where their grammar does.
            "max_new_tokens": [400] * 20 + [50] * 4,
            "grammars": [*held, None, None, None, None],
            "sampling": SamplingConfig(temperature),
            "eos_token_ids": [END],
        }
        expected = generate(target, None, **asked).tokens
        ours = generate(target, drafter, tree=TREE, **asked)
        assert ours.tokens == expected
        for schema, tokens in zip(schemas, ours.tokens, strict=False):
            assert tokens[-1] == END
            jsonschema.validate(json.loads(text_of(tokens[:-1])), schema)
            valid += 1
        forced += sum(ours.accepted_by["grammar"])
    assert valid == 200
    assert forced > 0


@pytest.mark.usefixtures("nothing_compiles")
def test_what_does_not_go_together_is_refused() -> None:
    target, drafter = pair()
    asked: dict[str, Any] = requests()
    other = GrammarCompiler(end_tokenizer(), 999, [END]).compile(Grammar(SCHEMA))
    for changes, words in (
        ({"eos_token_ids": [5]}, "its stop tokens lack some tokens that end"),
        ({"grammars": other}, "grammar is over 999 tokens, but the target has 257"),
        (
            {"sampling": SamplingConfig(min_tokens=3)},
            "min_tokens is 3, but the request has a grammar",
        ),
        ({"grammars": [Grammar(SCHEMA)] * 4}, "give tokenizer=load_tokenizer"),
        ({"grammars": [compiled(Grammar(SCHEMA))]}, "grammars has 1 entries for 4 prompts"),
    ):
        wrong: Any = asked | changes
        with pytest.raises(InputError, match=words):
            generate(target, drafter, tree=TREE, **wrong)
