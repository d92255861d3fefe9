"""Bodies and routes: what is taken, and what is refused in a sentence."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from servers import HTTP, JSON, body, post

from redrafter_jax.serving.openai_schema import ChatRequest, CompletionRequest
from redrafter_jax.serving.responses_schema import ResponsesRequest


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b'{"model":', 400, "not valid JSON: Expecting value at character 9"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[" * 5000, 400, "cannot be read"),
        (b"[]", 400, "Send a JSON object"),
        (b"", 400, "Send a JSON object"),
        (b'{"model": "tiny"}', 400, "prompt is missing"),
        (b'{"model": "tiny", "prompt": "a", "tools": [1]}', 400, "tools is not supported"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', 400, "Send a JSON object"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "a lone surrogate"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "it must be finite"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": "9"}', 400, "valid integer"),
        (b'{"model": "tiny", "prompt": [-1]}', 400, "none may be empty"),
        (b'{"model": "tiny", "prompt": {"file": "/etc/passwd"}}', 400, "give a text"),
        (b"x" * 10_000_000, 413, "larger than 10000 bytes"),
    ],
)
def test_a_body_that_cannot_be_read_is_one_sentence(
    base: str, content: bytes, status: int, words: str
) -> None:
    answer = post(base, content=content, headers=JSON)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "field"),
    [(ChatRequest, "messages"), (CompletionRequest, "stop"), (ResponsesRequest, "input")],
)
def test_of_a_million_faults_one_is_told(kind: Any, field: str) -> None:
    # All of them would take seconds, in which nothing is answered, and hundreds of megabytes.
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "tiny", field: [1] * 1_000_000})
    assert sum(error["loc"][0] == field for error in refused.value.errors()) == 1


def test_too_many_prompts_are_refused_unread(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrafter_jax.serving.openai_api._encode", lambda *_: pytest.fail("read"))
    answer = post(base, json=body(n=16) | {"prompt": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert "32 answers, but" in answer.json()["error"]["message"]


def test_unknown_routes_and_methods_are_told(base: str) -> None:
    for path in ("/v1/files", "/openapi.json"):
        assert "is not a route" in HTTP.get(f"{base}{path}").json()["error"]["message"]
    answer = HTTP.get(f"{base}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"].endswith(
        "does not take GET; use a method that the header Allow names."
    )


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        yield client


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}]}
IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"temperature": -1}, "temperature", "-1.0; it must be 0 or more"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"suffix": "x"}, "suffix", "is not supported"),
        ({"extra_body": {"tempo": 1}}, "tempo", "is not supported; leave"),
        ({"max_tokens": 500}, "max_tokens", "500 new .* have room for 120"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"echo": True, "logprobs": 1}, "logprobs", "either echo or logprobs"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"stop": ""}, "stop.0", "it is empty; leave it out"),
        ({"stop": list("abcde")}, "stop", "at most 4 items, not 5"),
        ({"prompt": []}, "prompt", "none may be empty"),
        ({"prompt": ""}, "prompt", "empty; it needs at least one token"),
        ({"prompt": "a" * 120}, "prompt", "120 tokens and 16 new ones"),
        (IMAGE, "messages.0.content", "parts of type 'image_url' are not supported"),
        ({"messages": [{"role": "critic"}]}, "messages.0.role", "'system', 'developer', 'user', "),
        (CHAT | {"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        (CHAT | {"logprobs": True, "top_logprobs": 6}, "top_logprobs", "returns 5 at most"),
        (CHAT | {"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens", "the same"),
        (CHAT | {"max_completion_tokens": 500}, "max_completion_tokens", "500 new .* room for 120"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_that_names_the_field(
    client: openai.OpenAI, asked: dict[str, Any], field: str, words: str
) -> None:
    kind: Any = client.chat.completions if "messages" in asked else client.completions
    if kind is client.completions:
        asked = {"prompt": "abc\n"} | asked
    with pytest.raises(openai.BadRequestError, match=words) as raised:
        kind.create(model="tiny", **asked)
    assert raised.value.param == field


def test_there_is_one_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "redrafter-jax"
    with pytest.raises(openai.NotFoundError, match=r"'big' is not served here; ask for tiny"):
        client.models.retrieve("big")
    with pytest.raises(openai.NotFoundError, match="'big' is not served here") as raised:
        client.completions.create(model="big", prompt="abc")
    assert raised.value.param == "model"
