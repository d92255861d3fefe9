"""Lists of prompts in, tokens out: what `generate` refuses, and where a row ends."""

from functools import partial
from typing import Any

import pytest
from small_batch import DRAFT, MIXED, PROMPTS
from tiny_models import PARITY_CONFIG, forgetful_target, tiny_config

from redrafter_jax import generate, generate_autoregressive, stream
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = PARITY_CONFIG.vocab_size


def test_no_drafter_is_autoregressive_decoding(target: Target) -> None:
    run = partial(generate, target, None, PROMPTS, max_new_tokens=6)
    assert run().tokens == generate_autoregressive(target, PROMPTS, max_new_tokens=6).tokens
    assert run().acceptance_length == 1.0


def cut(text: list[int], stop: int) -> list[int]:
    return text[: text.index(stop) + 1] if stop in text else text


def test_text_ends_with_its_stop_token_wherever_that_falls(
    habitual_target: Target, good_drafter: DraftModel
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "sampling": MIXED, "draft": DRAFT}
    plain = generate_autoregressive(
        habitual_target, PROMPTS, max_new_tokens=24, sampling=MIXED, eos_token_ids=()
    )
    # Lengths of row 1's text after each call: a stop token between two of them was accepted
    # together with tokens that must not be said.
    calls = stream(habitual_target, good_drafter, PROMPTS, eos_token_ids=(), **options)
    ends = {len(one.generation.tokens[1]) for one in calls}
    inside = 0
    for stop in range(V):
        expected = [cut(row, stop) for row in plain.tokens]
        result = generate(habitual_target, good_drafter, PROMPTS, eos_token_ids=[stop], **options)
        assert result.tokens == expected
        inside += len(expected[1]) < 24 and len(expected[1]) not in ends
    assert inside > 0


def test_stop_tokens_are_the_targets_own_unless_given() -> None:
    target = forgetful_target(memory=0.15)
    plain = generate_autoregressive(target, PROMPTS, max_new_tokens=24)
    stops = (plain.tokens[0][3], plain.tokens[1][5])
    stopping = Target(tiny_config(eos_token_ids=stops), target.graphdef, target.params)
    expected = [cut(cut(row, stops[0]), stops[1]) for row in plain.tokens]
    assert generate_autoregressive(stopping, PROMPTS, max_new_tokens=24).tokens == expected
    free = generate_autoregressive(stopping, PROMPTS, max_new_tokens=24, eos_token_ids=())
    assert free.tokens == plain.tokens


def test_each_row_may_stop_at_tokens_of_its_own(
    habitual_target: Target, good_drafter: DraftModel
) -> None:
    plain = generate_autoregressive(habitual_target, PROMPTS, max_new_tokens=24)
    stops = [[row[5], row[9]] if index else [] for index, row in enumerate(plain.tokens)]
    expected = [
        next((row[: at + 1] for at, token in enumerate(row) if token in own), row)
        for row, own in zip(plain.tokens, stops, strict=True)
    ]
    run = partial(generate, habitual_target, good_drafter, PROMPTS, max_new_tokens=24)
    result = run(draft=DRAFT, eos_token_ids=stops)
    assert result.tokens == expected
    assert len(expected[0]) == 24 > max(map(len, expected[1:]))
