"""A server whose drafter drafts while the target verifies: its texts, refusals and counts."""

from collections.abc import Iterator
from typing import Any

import pytest
from schemas import END, end_tokenizer, pair
from servers import LIMITS, ROOMY, TOOL_LINES, body, measured, post, serving

from redrafter_jax import MirrorConfig, SamplingConfig, TreeConfig, generate_autoregressive
from redrafter_jax.engine.engine import Engine
from redrafter_jax.text.tokenizer import encode

pytestmark = pytest.mark.usefixtures("quick_compilation")

_COUNTS = ("outcomes", "prepared")


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    target, drafter = pair()
    engine = Engine(
        target,
        drafter,
        tree=TreeConfig(beam_width=2, draft_rounds=2),
        slots=2,
        context_length=120,
        stop_tokens=[END],
        top_log_probs=LIMITS.max_logprobs,
        mirror=MirrorConfig(layer=1, candidates=4, drafter_devices=1),
    )
    options: dict[str, Any] = {"stop_tokens": (END,), "limits": ROOMY, "template": TOOL_LINES}
    with serving(engine, tokenizer=end_tokenizer(), **options) as base:
        yield base


@pytest.mark.parametrize(
    "more", [{"temperature": 0}, {"temperature": 1, "speculation": False}, {"n": 3, "logprobs": 2}]
)
@pytest.mark.long
def test_it_answers_with_the_texts_of_plain_decoding(base: str, more: dict[str, Any]) -> None:
    before = measured(base)
    answer = post(base, json=body(limit=20, draft_trace=True, **more))
    assert answer.status_code == 200, answer.text
    gained = {name: value - before.get(name, 0) for name, value in measured(base).items()}
    assert gained["redrafter_compiled_after_warm_up"] == 0
    choices = answer.json()["choices"]
    plain = generate_autoregressive(
        pair()[0],
        [encode(end_tokenizer(), "hello")] * len(choices),
        max_new_tokens=20,
        sampling=SamplingConfig(float(more.get("temperature", 1))),
        eos_token_ids=[END],
    )
    told = [[token["token"] for token in choice["draft_trace"]] for choice in choices]
    assert told == plain.tokens
    outcomes, prepared = (gained[f"redrafter_mirror_{name}_total"] for name in _COUNTS)
    # Of every row's steps, all but its last have a next one.
    assert outcomes == gained["redrafter_target_calls_total"] - len(choices)
    assert 0 <= prepared <= outcomes


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty 0.5"),
        ({"frequency_penalty": -0.5}, "frequency_penalty -0.5"),
        ({"repetition_penalty": 1.5}, "repetition_penalty 1.5"),
        ({"logit_bias": {"65": 3}}, "logit_bias {65: 3.0}"),
        ({"min_tokens": 2}, "min_tokens 2"),
        ({"min_tokens": 2, "presence_penalty": 1}, "presence_penalty 1.0 and min_tokens 2"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "a grammar"),
        ({"response_format": {"type": "json_object"}}, "a grammar"),
    ],
)
def test_what_it_does_not_support_is_refused(base: str, more: dict[str, Any], what: str) -> None:
    answer = post(base, json=body(**more))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"The request has {what}, which mirror decoding does not support; leave that out, or "
        "decode without mirror."
    )
