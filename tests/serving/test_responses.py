"""The Responses API: OpenAI's client gets from it what the same chat answers, as items."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from servers import HTTP, LINES, ROOMY, TOOL_LINES, constrained_server, measured, serving

pytestmark = pytest.mark.usefixtures("quick_compilation")

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Zoë", "Ann"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BORN = {"type": "function", "name": "born", "description": "Says when.", "parameters": PERSON}
ADD = {"type": "function", "name": "add"}
ARGUMENTS = '{"a": [1, "}"]}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
# The fake engine answers with the prompt's own tokens, from the seed's on: here from the first
# after the name of the tool.
SKIPPED = len("add\n")


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A server of an engine that repeats its prompts."""
    with serving(FakeEngine(), template=TOOL_LINES, limits=ROOMY) as base:
        yield base


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """A server of an engine that decodes."""
    with constrained_server() as base:
        yield base


def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def create(base: str, said: Any = "abc", /, **asked: Any) -> Any:
    with client(base) as one:
        return one.responses.create(model="tiny", input=said, **asked)


def streamed(base: str, said: Any = "abc", /, **asked: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the response that OpenAI's client makes of them."""
    with client(base) as one, one.responses.stream(model="tiny", input=said, **asked) as stream:
        events: list[Any] = list(stream)
    return events, events[-1].response


def chat(base: str, *turns: dict[str, Any], **asked: Any) -> Any:
    whole = {"model": "tiny", "messages": [*turns], **asked}
    return HTTP.post(f"{base}/v1/chat/completions", json=whole).json()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def without_names(response: Any) -> dict[str, Any]:
    """A response without what differs each time, nor what the client adds to those of streams."""
    told = response.model_dump(mode="json", exclude_unset=True, by_alias=True)
    assert told.pop("id").startswith("resp_")
    assert (told.pop("completed_at", None) is None) == (told["status"] != "completed")
    del told["created_at"]
    for item in told["output"]:
        assert item.pop("id")
        for name in ("call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    return told


@pytest.mark.parametrize(
    ("asked", "more"),
    [
        pytest.param({}, {}, marks=pytest.mark.long),
        ({"temperature": 0}, {}),
        ({"temperature": 0.7, "top_p": 0.9}, {"top_k": 5, "presence_penalty": 0.5}),
    ],
)
def test_a_text_is_that_of_the_same_chat(
    real: str, asked: dict[str, Any], more: dict[str, Any]
) -> None:
    more = {"seed": 4} | more
    turns = {"role": "system", "content": "Be brief."}, user("Who is it?")
    expected = chat(real, *turns, max_tokens=30, **asked, **more)
    told = create(
        real,
        "Who is it?",
        instructions="Be brief.",
        max_output_tokens=30,
        extra_body=more,
        **asked,
    )
    (choice,) = expected["choices"]
    assert told.output_text == choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (told.usage.input_tokens, told.usage.output_tokens) == (21, 30)
    assert told.usage.total_tokens == 51
    assert (told.model, told.store, told.seed) == ("tiny", False, 4)
    _, last = streamed(
        real,
        "Who is it?",
        instructions="Be brief.",
        max_output_tokens=30,
        extra_body=more,
        **asked,
    )
    assert without_names(last) == without_names(told)


def test_a_response_with_all_that_is_told(base: str) -> None:
    asked: dict[str, Any] = {"max_output_tokens": 3, "metadata": {"session": "7"}}
    told = create(base, "ab", extra_body={"seed": 0, "stop": "\n"}, **asked)
    assert without_names(told) == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 3,
        "model": "tiny",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
                ],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 1},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 6,
        },
        "metadata": {"session": "7"},
        "seed": 0,
        "system_fingerprint": "fp_tiny",
    }


def test_the_events_of_a_stream_come_by_their_names_and_numbers(base: str) -> None:
    asked = {"model": "tiny", "input": "abc", "max_output_tokens": 4, "seed": 0, "stream": True}
    answer = HTTP.post(f"{base}/v1/responses", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [one["type"] for one in bodies]
    assert [one["sequence_number"] for one in bodies] == list(range(len(bodies)))
    assert [one["type"].removeprefix("response.") for one in bodies] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [one["response"]["status"] for one in (*bodies[:2], bodies[-1])] == [
        "in_progress",
        "in_progress",
        "incomplete",
    ]
    assert [one["delta"] for one in bodies[4:6]] == ["ab", "c\n"]
    assert bodies[6]["text"] == bodies[7]["part"]["text"] == "abc\n"
    items = [bodies[2]["item"], bodies[8]["item"]]
    assert [(item["status"], len(item["content"])) for item in items] == [
        ("in_progress", 0),
        ("incomplete", 1),
    ]
    assert len({items[0]["id"], *(one["item_id"] for one in bodies[3:8])}) == 1
    assert bodies[-1]["response"]["output"] == [items[1]]


@pytest.mark.parametrize("rest", ["", "Done."])
def test_calls_are_items_after_the_text_before_them(base: str, rest: str) -> None:
    said = f"Hm.\n{CALL}{CALL}{rest}|"
    asked: dict[str, Any] = {"tools": [ADD], "extra_body": {"seed": SKIPPED, "stop": "|"}}
    told = create(base, said, **asked)
    kinds = ["message", "function_call", "function_call", *["message"] * bool(rest)]
    events, last = streamed(base, said, **asked)
    assert [one.type for one in last.output] == kinds
    assert last.status == "completed"
    assert last.output_text == f"Hm.{rest}"
    calls = [one for one in last.output if one.type == "function_call"]
    assert [(one.name, one.arguments, one.status) for one in calls] == [
        ("add", ARGUMENTS, "completed")
    ] * 2
    assert len({one.call_id for one in calls}) == 2
    deltas = [one for one in events if one.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 4, "arguments come in pieces"
    ends = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [one.arguments for one in ends] == [ARGUMENTS] * 2
    assert without_names(told)["output"] == without_names(last)["output"]
    alone = create(base, said, parallel_tool_calls=False, **asked)
    assert [one.type for one in alone.output].count("function_call") == 1


def test_a_whole_call_is_completed_though_the_limit_cuts_its_closing_mark(base: str) -> None:
    limit = len(CALL) - len("call>")
    asked: dict[str, Any] = {"tools": [ADD], "extra_body": {"seed": SKIPPED}}
    for told in (
        create(base, CALL, max_output_tokens=limit, **asked),
        streamed(base, CALL, max_output_tokens=limit, **asked)[1],
    ):
        (call,) = told.output
        assert (told.status, call.arguments, call.status) == ("incomplete", ARGUMENTS, "completed")


@pytest.mark.parametrize("size", [1, 1000])
def test_items_are_in_their_order_however_many_tokens_a_step_decides(size: int) -> None:
    said = f"Hm. {CALL}Done. Bye|"
    asked: dict[str, Any] = {"tools": [ADD], "extra_body": {"seed": SKIPPED, "stop": "|"}}
    with serving(FakeEngine(size=size), template=TOOL_LINES, limits=ROOMY) as base:
        for told in (create(base, said, **asked), streamed(base, said, **asked)[1]):
            before, call, after = told.output
            assert before.content[0].text == "Hm."
            assert (call.name, call.arguments, call.status) == ("add", ARGUMENTS, "completed")
            assert after.content[0].text == "Done. Bye"


def test_a_call_that_breaks_off_in_a_stream_is_incomplete(base: str) -> None:
    said = CALL.replace("}}", "} oh no|")
    asked: dict[str, Any] = {"tools": [ADD], "extra_body": {"seed": SKIPPED, "stop": "|"}}
    _, last = streamed(base, said, **asked)
    call, text = last.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    assert (last.status, text.content[0].text) == ("completed", " oh no")
    (whole,) = create(base, said, **asked).output
    assert whole.type == "message", "which is told once it is known to be no call"


def test_an_answer_without_text_has_an_empty_message(base: str) -> None:
    told = create(base, "|", extra_body={"seed": 0, "stop": "|"})
    ((part,),) = [one.content for one in told.output]
    assert (told.status, part.text) == ("completed", "")


def test_a_schema_holds_the_answer(real: str) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    form = {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON}
    asked: dict[str, Any] = {"text": {"format": form}, "extra_body": {"seed": 1}}
    told = create(real, "Who?", max_output_tokens=60, **asked)
    answer = json.loads(told.output_text)
    assert (told.status, answer["name"] in ("Zoë", "Ann"), answer["age"] <= 99) == (
        "completed",
        True,
        True,
    )
    assert told.text.format.schema_ == PERSON
    _, last = streamed(real, "Who?", max_output_tokens=60, **asked)
    assert last.output_text == told.output_text
    more = {"structured_outputs": {"regex": "(yes|no)!"}}
    regex = create(real, max_output_tokens=9, extra_body=more)
    assert regex.output_text in ("yes!", "no!")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "born"}])
def test_an_answer_that_must_call_a_tool_does(real: str, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    asked: dict[str, Any] = {"tools": [BORN], "tool_choice": choice, "extra_body": {"seed": 3}}
    (call,) = create(real, "When?", max_output_tokens=80, **asked).output
    assert (call.type, call.name, call.status) == ("function_call", "born", "completed")
    assert json.loads(call.arguments)["age"] <= 99
    _, last = streamed(real, "When?", max_output_tokens=80, **asked)
    assert [(one.name, one.arguments) for one in last.output] == [(call.name, call.arguments)]


def test_the_items_of_an_answer_are_sent_back_with_the_next_turn(base: str) -> None:
    items: list[Any] = [user(f"Hm.\n{CALL}|")]
    asked: dict[str, Any] = {"tools": [ADD], "extra_body": {"seed": SKIPPED, "stop": "|"}}
    first = create(base, items, **asked)
    _, call = first.output
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    # The template writes the contents of turns alone, and the engine says them again.
    prompt = f"Hm.\n{CALL}|\nHm.\n3\nSo?\n"
    asked = {"max_output_tokens": len(prompt), "extra_body": {"seed": 0}}
    told = create(base, [*items, user("So?")], **asked)
    assert told.usage.input_tokens == len(prompt)
    assert told.output_text == prompt


def test_a_call_that_broke_off_is_left_out_when_it_is_sent_back(base: str) -> None:
    said = CALL.replace('"}"', "oh no|")
    asked: dict[str, Any] = {"tools": [ADD], "extra_body": {"seed": SKIPPED, "stop": "|"}}
    _, last = streamed(base, said, **asked)
    call, text = last.output
    assert (call.arguments, text.content[0].text) == ('{"a": [1,', " oh no")
    prompt = f"{said}\n oh no\nSo?\n"
    items = [user(said), *(one.model_dump(mode="json") for one in last.output), user("So?")]
    told = create(base, items, max_output_tokens=len(prompt), extra_body={"seed": 0})
    assert told.output_text == prompt


def test_reasoning_is_an_item_of_its_own() -> None:
    said = "<think>hm</think>yes"
    asked: dict[str, Any] = {"max_output_tokens": 20, "extra_body": {"seed": 0}}
    with serving(FakeEngine(), template=LINES._replace(thinks=True)) as base:
        told = create(base, said, **asked)
        events, last = streamed(base, said, **asked)
    assert [one.type for one in told.output] == ["reasoning", "message"]
    assert (told.output[0].content[0].text, told.output_text) == ("hm", "yes")
    assert told.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    assert without_names(last) == without_names(told)
    pieces = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == "hm"


def test_how_an_answer_was_drafted_is_told_as_a_chat_tells_it(base: str) -> None:
    more = {"seed": 0, "speculative_metrics": True}
    told = create(base, "abc", max_output_tokens=4, extra_body=more)
    expected = chat(base, user("abc"), max_tokens=4, **more)
    assert told.metrics == expected["metrics"]
    _, last = streamed(base, "abc", max_output_tokens=4, extra_body=more)
    assert last.metrics == told.metrics


def test_a_stream_that_cannot_go_on_ends_as_failed() -> None:
    with serving(FakeEngine(expires=4), limits=replace(ROOMY, deadline=600.0)) as base:
        events, last = streamed(base, "abc", extra_body={"seed": 0})
        assert (events[-1].type, last.status) == ("response.failed", "failed")
        assert last.error.code == "server_error"
        assert "ask for fewer tokens" in last.error.message
        (text,) = last.output
        assert (text.status, text.content[0].text) == ("incomplete", "ab")
        with pytest.raises(openai.APIStatusError, match="was not complete after"):
            create(base, "abc")
        told = measured(base)
    assert told['redrafter_requests_total{outcome="deadline",route="/v1/responses"}'] == 2


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]
FORM = {"format": {"type": "json_object"}}
REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "a"}, "previous_response_id", "send the earlier items in input"),
    ({"conversation": "a"}, "conversation", "send its items in input"),
    ({"background": True}, "background", "leave it out, or set stream"),
    ({"store": True}, "store", "leave it out, or give false"),
    ({"prompt": {"id": "a"}}, "prompt", "send its text in input"),
    ({"include": ["file_search_call.results"]}, "include", "leave it out"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search' is not supported; offer"),
    ({"tools": [ADD | {"strict": True}]}, "tools.0.strict", "is not supported; leave it out"),
    ({"tools": [ADD, ADD]}, "tools", "two tools have the name 'add'"),
    ({"tool_choice": "required"}, "tool_choice", "it needs tools"),
    (
        {"tools": [ADD], "text": FORM},
        "tool_choice",
        'give tool_choice: "none", or leave text.format out',
    ),
    ({"text": FORM, "extra_body": {"min_tokens": 2}}, "text.format", "leave min_tokens out"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "give both"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported"),
    ({"input": IMAGE}, "input.0.content", "parts of type 'input_image' are not"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", "send the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type", "'function_call_output'"),
    ({"input": [user("a"), {"role": "user"}]}, "input.1.content", "is missing; give it"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", ""),
    (
        {"input": [user("a") | {"output": "b"}]},
        "input.0.output",
        "'message' do not have it; leave it",
    ),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": [{"type": "reasoning", "content": "a"}]}, "input", "type reasoning out"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    (
        {"max_output_tokens": 200_000},
        "max_output_tokens",
        "input has 4 tokens and 200000 new ones are asked for",
    ),
    ({"temperature": -1}, "temperature", "0 or more"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "is not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "is not supported"),
    ({"extra_body": {"n": 2}}, "n", "is not supported"),
    ({"extra_body": {"messages": [user("a")]}}, "messages", "is not supported"),
    ({"model": "other"}, "model", "is not served here"),
]


@pytest.mark.parametrize(("asked", "field", "words"), REFUSALS)
def test_what_cannot_be_answered_is_refused_by_its_field(
    base: str, asked: dict[str, Any], field: str, words: str
) -> None:
    whole: dict[str, Any] = {"model": "tiny", "input": "abc"} | asked
    with client(base) as one, pytest.raises(openai.APIStatusError) as raised:
        one.responses.create(**whole)
    assert raised.value.status_code in (400, 404)
    assert raised.value.param == field
    assert words in raised.value.message


@pytest.mark.parametrize(
    "asked",
    [
        {"background": False, "include": [], "instructions": "", "reasoning": {}, "store": False},
        {"service_tier": "auto", "truncation": "disabled", "top_logprobs": 0},
        {"text": {"verbosity": "medium"}, "tools": [], "tool_choice": "auto"},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"previous_response_id": None, "conversation": None, "text": {"format": {"type": "text"}}},
    ],
)
def test_what_asks_for_nothing_changes_nothing(base: str, asked: dict[str, Any]) -> None:
    plain = create(base, extra_body={"seed": 0}, max_output_tokens=4)
    told = create(base, extra_body={"seed": 0}, max_output_tokens=4, **asked)
    assert without_names(told) == without_names(plain)
