"""Penalties, biases, least lengths and scores of prompts, by HTTP from a real engine."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from servers import LIMITS, body, post, serving
from tiny_folders import character_tokenizer

from redrafter_jax import SamplingConfig, TreeConfig, generate
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.engine.engine import Engine
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def base(habitual_target: Target, good_drafter: LoadedHead) -> Iterator[str]:
    engine = Engine(
        habitual_target,
        good_drafter,
        slots=2,
        context_length=120,
        stop_tokens=[2, 7],
        row_counts=(),
        tree=TreeConfig(beam_width=4, draft_rounds=3),
        top_log_probs=LIMITS.max_logprobs,
    )
    with serving(engine, tokenizer=character_tokenizer(), stop_tokens=(2, 7)) as base:
        yield base


def complete(base: str, **more: Any) -> Completion:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    openais = {"frequency_penalty", "presence_penalty", "logit_bias", "n"}
    asked: Any = {name: more.pop(name) for name in openais & more.keys()}
    return client.completions.create(
        model="tiny",
        prompt=PROMPT,
        temperature=0,
        seed=0,
        max_tokens=12,
        **asked,
        extra_body={"draft_trace": True, **more},
    )


def ids(choice: Any) -> list[int]:
    return [token["token"] for token in choice.draft_trace]


@pytest.mark.long
def test_the_fields_do_what_sampling_config_says(
    base: str, habitual_target: Target, good_drafter: LoadedHead
) -> None:
    told = complete(
        base,
        presence_penalty=0.9,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={"3": 2, "5": -100},
        min_tokens=8,
    )
    config = SamplingConfig(
        presence_penalty=0.9,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={3: 2.0, 5: -100.0},
        min_tokens=8,
    )
    expected = generate(
        habitual_target, None, [PROMPT], max_new_tokens=12, sampling=config, eos_token_ids=[2, 7]
    )
    assert ids(told.choices[0]) == expected.tokens[0]
    assert ids(told.choices[0]) != ids(complete(base).choices[0])


def test_scores_of_the_prompt_are_told_as_vllm_does(base: str, habitual_target: Target) -> None:
    told = complete(base, prompt_logprobs=2, n=2)
    expected = generate(
        habitual_target, None, [PROMPT], max_new_tokens=1, prompt_log_probs=True
    ).prompt_log_probs
    assert expected is not None
    for choice in told.choices:
        first, *others = getattr(choice, "prompt_logprobs")  # noqa: B009
        assert first is None
        own = [entry[str(token)] for entry, token in zip(others, PROMPT[1:], strict=True)]
        assert [one["logprob"] for one in own] == pytest.approx(expected[0], abs=1e-5)
        for entry, one in zip(others, own, strict=True):
            assert len(entry) == (2 if one["rank"] <= 2 else 3)
            by_rank = sorted(entry.values(), key=lambda other: other["rank"])
            assert [other["rank"] for other in by_rank[:2]] == [1, 2]
            assert by_rank[0]["logprob"] == max(other["logprob"] for other in by_rank)


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", "is 2.5; it must be -2 or more and at"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2 or more and at most 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01 or more and at most 100"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "has 3: 101.0; token ids start at 0"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id; give the id"),
        ({"logit_bias": {"24": 1}}, "logit_bias", "token 24, outside the vocabulary of 24"),
        ({"min_tokens": 9}, "min_tokens", "min_tokens is 9, but the limit on new tokens is 8"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", "this server returns 5 at most"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "a stream cannot hold"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    base: str, asked: dict[str, Any], field: str, words: str
) -> None:
    answer = post(base, json=body("abc", 8, **asked))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert words in error["message"]


def test_eos_is_ignored_where_that_is_asked(base: str) -> None:
    ends = {"logit_bias": {"2": 50}}
    assert ids(complete(base, **ends).choices[0]) == [2]
    assert ids(complete(base, **ends, ignore_eos=True).choices[0]) == [2] * 12
