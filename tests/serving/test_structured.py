"""Answers that are held to a form, by HTTP from a real engine."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from servers import body, constrained_server, post

pytest.importorskip("llguidance", reason="needs the extra structured")
pytestmark = pytest.mark.usefixtures("quick_compilation")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Zoë", "Ann"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with constrained_server() as base:
        yield base


def test_a_schema_of_openais_client_holds_the_answer(base: str) -> None:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    form: Any = {"name": "person", "strict": True, "schema": SCHEMA}
    asked: dict[str, Any] = {"model": "tiny", "seed": 1, "max_tokens": 60}
    asked["messages"] = [{"role": "user", "content": "Who?"}]
    asked["response_format"] = {"type": "json_schema", "json_schema": form}
    told = client.chat.completions.create(**asked).choices[0]
    assert told.finish_reason == "stop"
    answer = json.loads(told.message.content or "")
    assert answer["name"] in ("Zoë", "Ann")
    assert answer["age"] <= 99
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in streamed) == told.message.content
    plain = client.chat.completions.create(**asked, extra_body={"speculation": False})
    assert plain.choices[0].message.content == told.message.content


TOOLS = [
    {"type": "function", "function": {"name": "born", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"const": {}}}},
]


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"born", "now"}, "tool_calls"),
        # As OpenAI and vLLM end it.
        ({"type": "function", "function": {"name": "born"}}, {"born"}, "stop"),
    ],
)
def test_an_answer_that_must_call_a_tool_does(
    base: str, choice: Any, names: set[str], reason: str
) -> None:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    tools: Any = TOOLS
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "When?"}],
        seed=3,
        max_tokens=80,
        tools=tools,
        tool_choice=choice,
    ) as pieces:
        streamed = pieces.get_final_completion().choices[0]
    assert streamed.finish_reason == reason
    (call,) = streamed.message.tool_calls or []
    assert call.function.name in names
    if call.function.name == "born":
        assert json.loads(call.function.arguments)["age"] <= 99


@pytest.mark.parametrize(
    ("asked", "matches"),
    [
        ({"structured_outputs": {"regex": "(yes|no)!"}}, {"yes!", "no!"}),
        ({"structured_outputs": {"json": {"const": [1, "é"]}}}, {'[1, "é"]'}),
    ],
)
def test_vllms_names_are_taken(base: str, asked: dict[str, Any], matches: set[str]) -> None:
    answer = post(base, json=body("abc", 20, **asked))
    assert answer.json()["choices"][0]["text"] in matches


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            'Unimplemented keys: ["not"]',
        ),
        ({"response_format": {"type": "json_schema"}}, "give both"),
        ({"response_format": {"type": "grammar"}}, "json_object"),
        ({"structured_outputs": {"regex": "("}}, "regex cannot be used"),
        ({"structured_outputs": {}}, "give exactly one of json, regex and json_object"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "leave min_tokens out"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave ignore_eos out"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(
    base: str, asked: dict[str, Any], words: str
) -> None:
    answer = post(base, json=body("abc", 8, **asked))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"] or "").partition(".")[0] == next(iter(asked))
    assert words in error["message"]
