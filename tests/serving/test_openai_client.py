"""OpenAI's own client gets from a server process the texts that `generate` gives."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from engine_runs import ROOM, WARM, decoded_alone
from servers import serving_process
from tiny_folders import PairFolders, add_template, decode

from redrafter_jax import SamplingConfig
from redrafter_jax.models.target import Target

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]


@pytest.fixture(scope="module")
def client(
    folders: PairFolders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    target = add_template(Path(folders.target), tmp_path_factory.mktemp("models"))
    sizes = ["--slots", "4", "--queue-limit", "4", "--context-length", str(ROOM)]
    models = ["--target", target, "--drafter", folders.drafter, "--name", "tiny"]
    tree = ["--beam-width", "2", "--draft-rounds", "2"]
    with (
        serving_process(*models, *sizes, *tree) as (base, _),
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def alone(habitual_target: Target) -> Any:
    return partial(decoded_alone, habitual_target)


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    turns: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=turns, **options)


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **options)


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({}, WARM),  # as in OpenAI's API
        ({"temperature": 0}, SamplingConfig()),
        (
            {"temperature": 0.8, "top_p": 0.9, "extra_body": {"top_k": 5, "min_p": 0.01}},
            SamplingConfig(0.8, top_k=5, top_p=0.9, min_p=0.01),
        ),
    ],
)
def test_a_completion_and_a_chat_are_the_baselines_texts(
    client: openai.OpenAI, alone: Any, asked: dict[str, Any], sampling: SamplingConfig
) -> None:
    tokens, log_probs = alone("abc\n", 30, 7, sampling)
    expected = decode(tokens)
    answer = complete(client, "abc\n", max_tokens=30, seed=7, **asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 30)
    told = {"logprobs": True, "top_logprobs": 3}
    answer = chat(client, "abc", max_completion_tokens=30, seed=7, **told, **asked)
    assert answer.choices[0].message.content == expected
    entries = answer.choices[0].logprobs.content
    np.testing.assert_allclose([entry.logprob for entry in entries], log_probs, atol=1e-4)
    assert {len(entry.top_logprobs) for entry in entries} == {3}
    assert (answer.model, answer.seed) == ("tiny", 7)


@pytest.mark.parametrize(("speculation", "origins"), [(True, {None, "recurrent"}), (False, {None})])
def test_a_stream_brings_the_same_text_in_pieces_and_says_who_proposed_it(
    client: openai.OpenAI, alone: Any, speculation: bool, origins: set[str | None]
) -> None:
    expected = decode(alone("abc\n", 60, 6)[0])
    asked: dict[str, Any] = {"max_tokens": 60, "seed": 6, "stream": True}
    watched = {"speculation": speculation, "draft_trace": True, "speculative_metrics": True}
    usage = {"include_usage": True}
    *chunks, end = chat(client, "abc", **asked, stream_options=usage, extra_body=watched)
    told = [chunk.choices[0] for chunk in chunks]
    texts = [choice.delta.content or "" for choice in told]
    assert "".join(texts) == expected
    assert len([text for text in texts if text]) > 3
    assert told[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in told[-2:]] == [None, "length"]
    assert end.choices == []
    assert end.usage.total_tokens == 64
    assert end.usage.prompt_tokens_details.cached_tokens == 0, "shorter than a page"
    tokens = [token for choice in told for token in getattr(choice, "draft_trace", [])]
    assert "".join(token["text"] for token in tokens) == expected
    assert {token["origin"] for token in tokens} == origins
    # Of every call the last token is the target's own.
    calls = [token["call"] for token in tokens]
    own = [token["call"] for token in tokens if token["origin"] is None]
    assert own == sorted({*calls})
    assert calls == sorted(calls)
    metrics = end.metrics["speculative_decoding"]
    steps = max(calls) if speculation else 0  # call 0 reads the prompt
    accepted = Counter(calls[1:].count(call) - 1 for call in range(1, steps + 1))
    depth = metrics["num_spec_tokens"]
    assert metrics["acceptance_histogram"] == [accepted[count] for count in range(depth + 1)]
    assert metrics["num_spec_steps"] == steps
    assert metrics["num_accepted_draft_tokens"] == len(tokens) - len(own)
    assert metrics["num_draft_tokens"] >= steps * depth
    pieces = complete(client, "abc\n", **asked)
    assert "".join(chunk.choices[0].text for chunk in pieces) == expected


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_room(
    client: openai.OpenAI, alone: Any
) -> None:
    answer = chat(client, "abc", seed=5)
    assert answer.choices[0].message.content == decode(alone("abc\n", ROOM - 4, 5)[0])
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_that_was_not_given_is_told(client: openai.OpenAI, alone: Any) -> None:
    first, second = (complete(client, "abc\n", max_tokens=20) for _ in range(2))
    assert first.seed != second.seed
    assert first.choices[0].text == decode(alone("abc\n", 20, first.seed)[0])
