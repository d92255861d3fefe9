"""The target of `make demo-tiny`, which was trained on real text: identical texts."""

import json
from typing import Any

import pytest
from places import CONFIGS

from redrafter_jax import (
    PromptLookup,
    SamplingConfig,
    generate,
    generate_autoregressive,
    load_target,
)
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.long
TARGET = CONFIGS / "demo_target"
LIMITS = [64, 48, 32, 25]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET, "float32")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rows = [json.loads(line) for line in (CONFIGS / "demo_prompts.jsonl").read_text().splitlines()]
    tokenizer = open_target(TARGET).tokenizer
    lengths = (64, 17, 3, 40)
    chosen = zip(rows[:: len(rows) // 4], lengths, strict=False)
    return [tokenizer.encode(row["prompt"]).ids[:length] for row, length in chosen]


def test_speculative_text_is_plain_text(target: Target, prompts: list[list[int]]) -> None:
    """Every row of the batch chooses its tokens in a way of its own."""
    asked: dict[str, Any] = {
        "max_new_tokens": LIMITS,
        "sampling": [
            SamplingConfig(),
            SamplingConfig(temperature=0.7, top_p=0.9),
            SamplingConfig(temperature=1.0),
            SamplingConfig(temperature=1.3, top_k=40, min_p=0.02),
        ],
        "eos_token_ids": (),
    }
    plain = generate_autoregressive(target, prompts, **asked)
    assert [len(row) for row in plain.tokens] == LIMITS
    ours = generate(target, PromptLookup(), prompts, **asked, adaptive=False)
    assert ours.tokens == plain.tokens
    # The drafts must be right often enough for this to be a test of acceptance.
    assert ours.acceptance_length > 1.2
