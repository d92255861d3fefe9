"""Tools of a chat: in the prompt, in answers, and back in the next prompt."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_folders import CHATML, chat_tokenizer, write_tokenizer
from fake_engine import FakeEngine
from pydantic import TypeAdapter
from servers import HTTP, LINES, ROOMY, TOOL_LINES, serving
from tiny_folders import byte_tokenizer
from tokenizers import AddedToken

from redrafter_jax.files.target_files import open_target
from redrafter_jax.serving.openai_messages import Tool
from redrafter_jax.serving.openai_schema import ChatRequest
from redrafter_jax.text.chat_template import find_template

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"default": None}}},
    },
}
ARGUMENTS = '{"a": [1, "}"]}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
# The engine answers with the prompt's own tokens, from the seed's on: here the first is after the
# name of the tool.
SKIPPED = len("add\n")


@pytest.fixture(scope="module")
def tooled() -> Iterator[str]:
    with serving(FakeEngine(), template=TOOL_LINES, limits=ROOMY) as base:
        yield base


def ask(base: str, content: str = CALL, **asked: Any) -> Any:
    turns = [{"role": "user", "content": content}]
    whole = {"model": "tiny", "messages": turns, "seed": SKIPPED, "tools": [ADD]}
    whole |= {"max_tokens": len(content) + 1} | asked
    return HTTP.post(f"{base}/v1/chat/completions", json=whole).json()


def message(base: str, content: str = CALL, **asked: Any) -> Any:
    return ask(base, content, **asked)["choices"][0]["message"]


def test_a_call_is_told_apart_from_the_text_before_it(tooled: str) -> None:
    told = message(tooled, f"Let me see.\n{CALL}")
    (call,) = told["tool_calls"]
    assert (told["role"], told["content"]) == ("assistant", "Let me see.")
    assert call["type"] == "function"
    assert call["function"] == {"name": "add", "arguments": ARGUMENTS}
    assert message(tooled)["content"] is None


def test_without_a_call_an_answer_is_as_ever(tooled: str) -> None:
    assert message(tooled, "No. ") == {"role": "assistant", "content": "No. \n", "refusal": None}
    broken = CALL.replace("]}}", "}}")
    assert message(tooled, broken)["content"] == broken + "\n"


def test_none_tells_the_target_of_no_tools_and_reads_no_calls(tooled: str) -> None:
    told = message(tooled, tool_choice="none", seed=0)
    assert told == {"role": "assistant", "content": CALL + "\n", "refusal": None}


def test_each_choice_has_calls_of_its_own(tooled: str) -> None:
    first, second = ask(tooled, f"{CALL}{CALL}", n=2, max_tokens=len(CALL) * 2)["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in (first, second)] == [2, 1]
    assert len({call["id"] for call in first["message"]["tool_calls"]}) == 2
    # Choice 1 begins at the second token, so that its first mark is none.
    assert second["message"]["content"].startswith(CALL[1:])
    told = message(tooled, f"{CALL}{CALL}", max_tokens=len(CALL) * 2, parallel_tool_calls=False)
    assert len(told["tool_calls"]) == 1


def test_openais_client_puts_a_stream_together(tooled: str) -> None:
    with openai.OpenAI(base_url=f"{tooled}/v1", api_key="none", max_retries=0) as client:
        turns: Any = [{"role": "user", "content": f"Hm.\n{CALL}{CALL}|"}]
        tools: Any = [ADD]
        with client.chat.completions.stream(
            model="tiny",
            messages=turns,
            tools=tools,
            seed=SKIPPED,
            stop="|",
        ) as stream:
            pieces = [event for event in stream if "arguments.delta" in event.type]
            choice = stream.get_final_completion().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Hm.")
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("add", ARGUMENTS)
    ] * 2
    assert len(pieces) > 4, "arguments come in pieces"


@pytest.mark.parametrize(("stop", "reason"), [([], "length"), (["\n</tool"], "tool_calls")])
def test_the_reason_of_an_answers_end_is_its_calls_unless_it_was_cut(
    tooled: str, stop: list[str], reason: str
) -> None:
    asked: dict[str, Any] = {"stop": stop, "max_tokens": len(CALL)}
    assert ask(tooled, **asked)["choices"][0]["finish_reason"] == reason


def test_a_call_that_breaks_off_in_a_stream_ends_with_stop(tooled: str) -> None:
    content = CALL.replace("}}", "} oh no")
    asked: dict[str, Any] = {"model": "tiny", "seed": SKIPPED, "tools": [ADD], "stream": True}
    asked |= {"messages": [{"role": "user", "content": content}], "stop": "</tool"}
    lines = HTTP.post(f"{tooled}/v1/chat/completions", json=asked).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert any(choice["delta"].get("tool_calls") for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"


def processor_seconds(work: Callable[[Any], object], given: Any) -> float:
    """Of this thread alone, for engines of other tests may run in others; the least of three."""

    def once() -> float:
        begin = time.thread_time()
        work(given)
        return time.thread_time() - begin

    return min(once() for _ in range(3))


@pytest.mark.usefixtures("unchecked_shapes")
def test_the_names_of_many_tools_are_compared_in_little_time() -> None:
    """Where each was compared with all, this took thirty times as long as reading the tools."""
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(28_000)]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    alone = processor_seconds(TypeAdapter(list[Tool]).validate_python, tools)
    assert processor_seconds(ChatRequest.model_validate, asked) < 10 * alone


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "leave response_format out",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "'sub' is not among the tools",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "it needs tools"),
        ({"tools": [ADD, ADD]}, "tools", "two tools have the name 'add'"),
        (
            {"response_format": {"type": "json_object"}},
            "tool_choice",
            'give tool_choice: "none", or leave response_format out',
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools",
            "the parameters of 'f' have the type 'array'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "tools.0.function.strict",
            "is not supported",
        ),
    ],
)
def test_what_cannot_be_done_with_tools_is_refused(
    tooled: str, asked: Any, field: str, words: str
) -> None:
    error = ask(tooled, **asked)["error"]
    assert error["param"].startswith(field)
    assert words in error["message"]


RESULTS = [
    {"role": "user", "content": "1 and 2?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for turn in messages %}"
    "{{ turn.role }}{{ turn.content }}{{ turn.tool_call_id }}"
    "{% for call in turn.tool_calls or [] %}[TOOL_CALLS]{{ call.id }}{{ call.function.name }}"
    "{{ call.function.arguments.a + 1 }}{% endfor %}|{% endfor %}"
)


def test_a_template_writes_tools_calls_and_results(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, TEMPLATE)
    template = find_template("tokenizer", open_target(folder), "")
    assert (template.tools, template.call_style) == (True, "mistral")
    written = json.dumps(ADD) + "\nuser1 and 2?|assistant[TOOL_CALLS]abcdefghiadd2|"
    written += "tool3abcdefghi|"
    bytewise = chat_tokenizer()
    with serving(FakeEngine(), tokenizer=bytewise, template=template, limits=ROOMY) as base:
        told = message(base, messages=RESULTS, seed=0, max_tokens=len(written))
    # The prompt is no call as Mistral writes it, so that it stays text.
    assert told["content"] == written


def test_a_mark_that_is_a_special_token_is_seen() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    template = LINES._replace(tools=True, call_style="mistral")
    content = f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}]'
    with serving(FakeEngine(), tokenizer=tokenizer, template=template, limits=ROOMY) as base:
        (call,) = message(base, content, max_tokens=len(content) - 11)["tool_calls"]
        assert call["function"]["arguments"] == ARGUMENTS
        alone = message(base, content, max_tokens=len(content) - 11, tool_choice="none", seed=0)
        assert alone["content"] == content.removeprefix("[TOOL_CALLS]")


def test_templates_without_tools_refuse_them(tmp_path: Path) -> None:
    template = find_template("tokenizer", open_target(write_tokenizer(tmp_path, CHATML)), "")
    with serving(FakeEngine(), tokenizer=chat_tokenizer(), template=template) as base:
        for asked, field in ((ADD, "tools"), (None, "messages")):
            given: Any = {"tools": [asked]} if asked else {"tools": [], "messages": RESULTS}
            error = ask(base, **given)["error"]
            assert error["param"] == field
            assert "does not support tools" in error["message"]
    with serving(FakeEngine(), template=LINES._replace(tools=True)) as base:
        error = ask(base)["error"]
        assert "--tool-parser and one of hermes, llama3, mistral" in error["message"]
