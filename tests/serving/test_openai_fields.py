"""OpenAI's schema of requests, field by field: taken, ignored where it asks for nothing, refused.

The lists are written from the `openai` package, release 3.54; the values are what its documentation
names as the defaults, and another.
"""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from fake_engine import FakeEngine
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming as ChatParams,
)
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from places import ROOT
from servers import HTTP, serving

from redrafter_jax.text.chat_template import ChatTemplate, Turn

TURNS = [{"role": "user", "content": "abc"}]
TOOL = {"type": "function", "function": {"name": "f"}}
ARGUMENTS = {"name": "f", "arguments": "[]"}  # which are no object
CALL = {"id": "a", "type": "function", "function": ARGUMENTS | {"arguments": "{}"}}
# With a value that each route takes.
BOTH_TAKE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 4,
    "n": 2,
    "seed": 7,
    "stop": ["zz"],
    "stream": False,
    "stream_options": {},
    "temperature": 0.5,
    "top_p": 0.9,
    "frequency_penalty": 0.1,
    "presence_penalty": -2,
    "logit_bias": {"50256": -100},
}
TAKEN: dict[str, dict[str, Any]] = {
    "chat/completions": BOTH_TAKE
    | {
        "messages": TURNS,
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 0,
        "response_format": {"type": "text"},
    }
    | {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
    "completions": BOTH_TAKE | {"prompt": "abc", "echo": True, "logprobs": 1},
}
# The values that ask for nothing, and one that does ask.
OFF: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "chat/completions": {
        "function_call": (["none", "auto"], {"name": "f"}),
        "functions": ([[]], [{"name": "f"}]),
        "modalities": ([["text"]], ["text", "audio"]),
        "service_tier": (["auto", "default"], "priority"),
        "store": ([False], True),
        "verbosity": (["medium"], "low"),
    },
    "completions": {"best_of": ([1], 2), "suffix": ([""], "the end")},
}
# Whatever their value.
LABELS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "metadata": {"session": "7"},
        "prompt_cache_key": "a",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "prompt_cache_retention": "24h",
        "safety_identifier": "b3f",
        "user": "somebody",
    },
    "completions": {"user": "somebody"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "audio": {"format": "wav", "voice": "ash"},
        "moderation": {"model": "m"},
        "prediction": {"type": "content", "content": "abc"},
        "reasoning_effort": "low",
        "web_search_options": {},
    },
    "completions": {},
}
ROUTES = ("chat/completions", "completions")
SCHEMAS: dict[str, Any] = {"chat/completions": ChatParams, "completions": TextParams}
INNER: dict[Any, str] = {
    ChatCompletionUserMessageParam: "content name role",
    ChatCompletionAssistantMessageParam: (
        "audio content function_call name refusal role tool_calls"
    ),
    ChatCompletionContentPartTextParam: "prompt_cache_breakpoint text type",
    ChatCompletionStreamOptionsParam: "include_obfuscation include_usage",
}


def ask(base: str, route: str, **asked: Any) -> tuple[int, Any]:
    needed = {"messages": TURNS} if route == ROUTES[0] else {"prompt": "abc"}
    whole = {"model": "tiny", "max_tokens": 4, "seed": 0, **needed, **asked}
    if "max_completion_tokens" in asked:
        del whole["max_tokens"]
    answer = HTTP.post(f"{base}/v1/{route}", json=whole)
    return answer.status_code, answer.json()


def of_both(kind: dict[str, dict[str, Any]]) -> Iterable[tuple[str, str, Any]]:
    return [(route, field, value) for route in ROUTES for field, value in kind[route].items()]


@pytest.mark.parametrize("route", ROUTES)
def test_the_lists_are_the_whole_schema(route: str) -> None:
    kinds = [kind[route] for kind in (TAKEN, OFF, LABELS, REFUSED)]
    assert sum(map(len, kinds)) == len(set().union(*kinds)), "a field is of one kind"
    assert set().union(*kinds) == set(SCHEMAS[route].__annotations__)


@pytest.mark.parametrize(("schema", "fields"), INNER.items())
def test_the_fields_within_are_those_of_the_schema(schema: Any, fields: str) -> None:
    assert sorted(schema.__annotations__) == fields.split()


@pytest.mark.parametrize(("route", "field", "value"), of_both(TAKEN))
def test_a_field_that_is_taken_is_answered(base: str, route: str, field: str, value: Any) -> None:
    more = {"logprobs": True} if field == "top_logprobs" else {}
    assert ask(base, route, **{field: value}, **more)[0] == 200


@pytest.mark.parametrize(("route", "field", "values"), of_both(OFF))
def test_a_value_that_asks_for_nothing_changes_nothing_and_others_are_refused(
    base: str, route: str, field: str, values: tuple[list[Any], Any]
) -> None:
    nothing, something = values
    plain = ask(base, route)[1]["choices"]
    for value in nothing:
        status, told = ask(base, route, **{field: value})
        assert (status, told.get("choices")) == (200, plain)
    status, told = ask(base, route, **{field: something})
    assert (status, told["error"]["param"]) == (400, field)
    assert told["error"]["message"] == f"{field} is not supported; leave it out."


@pytest.mark.parametrize(("route", "field", "value"), of_both(LABELS))
def test_a_label_changes_nothing(base: str, route: str, field: str, value: Any) -> None:
    status, told = ask(base, route, **{field: value})
    assert (status, told.get("choices")) == (200, ask(base, route)[1]["choices"])


@pytest.mark.parametrize(("route", "field", "value"), of_both(REFUSED))
def test_what_is_not_supported_is_refused_by_its_name(
    base: str, route: str, field: str, value: Any
) -> None:
    status, told = ask(base, route, **{field: value})
    assert (status, told["error"]["param"]) == (400, field)
    assert ask(base, route, **{field: None})[0] == 200, "null is as if it was not given"


@pytest.mark.parametrize(
    "turn",
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "abc", "prompt_cache_breakpoint": 1}],
        },
        {"role": "user", "content": [{"type": "text", "text": "abc", "cache_control": {"a": 1}}]},
        {"role": "user", "content": "abc", "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": "abc", "name": "bo"},  # of which this template writes nothing
        {"role": "assistant", "content": "abc", "tool_calls": [], "annotations": []}
        | dict.fromkeys(["audio", "function_call", "refusal", "name"]),
    ],
)
def test_marks_within_messages_change_nothing(base: str, turn: dict[str, Any]) -> None:
    status, told = ask(base, ROUTES[0], messages=[turn])
    assert (status, told.get("choices")) == (200, ask(base, ROUTES[0])[1]["choices"])


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"audio": {"id": "a"}}, "audio"),
        ({"function_call": {"name": "f", "arguments": ""}}, "function_call"),
        ({"refusal": "no"}, "refusal"),
        ({"tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": None}]}, "tool_calls.0.id"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": ARGUMENTS | {"name": None}}]},
            "tool_calls.0.function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": ARGUMENTS}]},
            "tool_calls.0.function.arguments",
        ),
        ({"role": "tool"}, "tool_call_id"),
        ({"tool_call_id": "a"}, "tool_call_id"),
        ({"content": None}, "content"),
        ({"name": 7}, "name"),
        ({"content": [{"type": "text", "text": "a", "citations": [1]}]}, "content"),
    ],
)
def test_what_a_message_may_not_hold_is_refused_by_its_place(
    base: str, turn: dict[str, Any], field: str
) -> None:
    status, told = ask(base, ROUTES[0], messages=[{"role": "user", "content": "a"} | turn])
    assert (status, told["error"]["param"]) == (400, f"messages.0.{field}")


def test_obfuscation_of_a_stream_is_refused_unless_it_is_off(base: str) -> None:
    assert ask(base, ROUTES[0], stream_options={"include_obfuscation": False})[0] == 200
    status, told = ask(base, ROUTES[0], stream_options={"include_obfuscation": True}, stream=True)
    assert (status, told["error"]["param"]) == (400, "stream_options.include_obfuscation")


@pytest.mark.parametrize("route", ROUTES)
def test_what_other_servers_name_is_ignored_where_it_is_off(base: str, route: str) -> None:
    # Of vLLM's protocol, with its defaults.
    off = {
        "use_beam_search": False,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "bad_words": [],
        "priority": 0,
        "add_special_tokens": route == "completions",
    }
    plain = ask(base, route)[1]["choices"]
    null: dict[str, Any] = {"stop": None, "stream_options": None, "user": None}
    for asked in (off, {"top_k": -1}, {"stream_options": {"include_usage": False}}, null):
        assert ask(base, route, **asked)[1].get("choices") == plain
    asked = {"bad_words": ["a"], "length_penalty": 2, "use_beam_search": True, "cache_salt": "a"}
    for field, value in asked.items():
        assert ask(base, route, **{field: value})[1]["error"]["param"] == field
    other = ask(base, route, add_special_tokens=route != "completions")
    assert other[1]["error"]["param"] == "add_special_tokens"


def test_the_name_of_who_speaks_is_for_the_template_to_read() -> None:
    def render(turns: list[Turn], add_generation_prompt: bool) -> str:
        return "".join(f"{turn.get('name', '')}{turn['content']}" for turn in turns)

    with serving(FakeEngine(), template=ChatTemplate("named", render, False)) as base:
        turns = [{"role": "user", "content": "b", "name": "a"}, {"role": "user", "content": "c"}]
        told = ask(base, ROUTES[0], messages=turns)[1]
    assert told["choices"][0]["message"]["content"] == "abca"


def test_the_documentation_names_every_field_where_it_belongs() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", text, flags=re.MULTILINE))
    kinds = {
        "supported": TAKEN,
        "accepted only with this value": OFF,
        "ignored": LABELS,
        "refused": REFUSED,
    }
    named = {row: set(re.findall(r"`([a-z_]+)(?:: [^`]*)?`", rows[row])) for row in kinds}
    for row, kind in kinds.items():
        fields = {field for route in ROUTES for field in kind[route]}
        assert named[row] == fields, row
