"""Where a row of `generate` ends."""

from typing import Any

import pytest
from small_batch import DRAFT, MIXED, PROMPTS
from tiny_models import PARITY_CONFIG, tiny_config

from redrafter_jax import generate, generate_autoregressive, stream
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = PARITY_CONFIG.vocab_size


def cut(text: list[int], stops: list[int]) -> list[int]:
    end = next((end for end, token in enumerate(text, start=1) if token in stops), len(text))
    return text[:end]


def test_a_row_ends_with_the_first_of_its_own_stop_tokens_wherever_that_falls(
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
        stops = [[stop, (stop + 5) % V], [stop], [], [(stop + 1) % V]]
        expected = [cut(row, own) for row, own in zip(plain.tokens, stops, strict=True)]
        result = generate(habitual_target, good_drafter, PROMPTS, eos_token_ids=stops, **options)
        assert result.tokens == expected
        assert result.log_probs is None, "nobody asked for them"
        inside += len(expected[1]) < 24 and len(expected[1]) not in ends
    assert inside > 0


def test_stop_tokens_are_the_targets_own_unless_given(habitual_target: Target) -> None:
    plain = generate_autoregressive(habitual_target, PROMPTS, max_new_tokens=24)
    stops = [plain.tokens[0][3], plain.tokens[1][5]]
    config = tiny_config(eos_token_ids=tuple(stops))
    stopping = Target(config, habitual_target.graphdef, habitual_target.params)
    result = generate_autoregressive(stopping, PROMPTS, max_new_tokens=24)
    assert result.tokens == [cut(row, stops) for row in plain.tokens]
    free = generate_autoregressive(stopping, PROMPTS, max_new_tokens=24, eos_token_ids=())
    assert free.tokens == plain.tokens
