"""A larger real model, quantized: its text is its own with every drafter that needs no training."""

from typing import Any

import pytest
from needs import fetched

from redrafter_jax import (
    PromptLookup,
    TreeConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
    load_tokenizer,
)
from redrafter_jax.files.real_models import QWEN_CODER

pytestmark = [pytest.mark.long, pytest.mark.further]

QUESTION = """Rename the function calc to area in this code and repeat the whole code.

def calc(a, b, c):
    s = (a + b + c) / 2
    return (s * (s - a) * (s - b) * (s - c)) ** 0.5
"""


def test_its_text_is_its_own_with_lookup_and_with_a_copy_of_itself() -> None:
    path = fetched(QWEN_CODER)
    target = load_target(path, "float32")
    asked: dict[str, Any] = {"max_new_tokens": 64, "tokenizer": load_tokenizer(path)}
    question = [{"role": "user", "content": QUESTION}]
    plain = generate_autoregressive(target, question, **asked)
    assert plain.texts is not None
    assert "def area(a, b, c):\n    s = (a + b + c) / 2\n" in plain.texts[0]
    drafters = {
        "lookup": (PromptLookup(), TreeConfig(1, 8)),
        "copy": (load_drafter("self:int8", target=target), TreeConfig(1, 3)),
    }
    for drafter, tree in drafters.values():
        drafted = generate(target, drafter, question, tree=tree, adaptive=False, **asked)
        assert drafted.tokens == plain.tokens
        assert drafted.acceptance_length > 2
