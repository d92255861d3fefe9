"""Prompts as tokens, and tokens as text, over HTTP."""

from collections.abc import Iterator
from typing import Any

import pytest
from chat_folders import BEGIN, IM_END, chat_tokenizer
from fake_engine import FakeEngine
from servers import HTTP, TOOL_LINES, serving


def plain_ids(text: str) -> list[int]:
    """The tokens of a text without special ones, by the tokenizers library."""
    return chat_tokenizer().encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def chatty() -> Iterator[str]:
    with serving(FakeEngine(), tokenizer=chat_tokenizer(), template=TOOL_LINES) as base:
        yield base


def ask(base: str, route: str, **asked: Any) -> Any:
    return HTTP.post(f"{base}/{route}", json={"model": "tiny"} | asked).json()


@pytest.mark.parametrize(("adds", "begin"), [(True, [BEGIN]), (False, [])])
def test_a_text_is_read_as_completions_read_it(chatty: str, adds: bool, begin: list[int]) -> None:
    tokens = [*begin, *plain_ids("hé"), IM_END]
    told = ask(chatty, "tokenize", prompt="hé<|im_end|>", add_special_tokens=adds)
    said = {"count": len(tokens), "max_model_len": 120, "token_strs": None}
    assert told == said | {"tokens": tokens}
    back = ask(chatty, "detokenize", tokens=tokens)
    assert back == {"prompt": "<s>" * adds + "hé<|im_end|>"}


def test_a_conversation_is_the_prompt_of_the_same_chat(chatty: str) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    turns = [{"role": "user", "content": "ab"}]
    told = ask(chatty, "tokenize", messages=turns, tools=[tool], return_token_strs=True)
    assert told["tokens"] == plain_ids("add\nab\n")
    assert len(told["token_strs"]) == told["count"] == 7
    asked = {"messages": turns, "tools": [tool], "max_tokens": 1}
    answer = ask(chatty, "v1/chat/completions", **asked)
    assert answer["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("route", "asked", "field", "words"),
    [
        ("tokenize", {}, "prompt", "give either a prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", ""),
        ("tokenize", {"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", ""),
        ("tokenize", {"prompt": "a", "model": "other"}, "model", "is not served here"),
        (
            "detokenize",
            {"tokens": [1, 260]},
            "tokens",
            "260 is not a token id of tiny, which has",
        ),
        ("detokenize", {"tokens": [2**40]}, "tokens", "is not a token id"),
        ("detokenize", {"tokens": [-1]}, "tokens.0", "-1"),
    ],
)
def test_what_cannot_be_read_is_refused(
    chatty: str, route: str, asked: Any, field: str, words: str
) -> None:
    error = ask(chatty, route, **asked)["error"]
    assert error["param"] == field
    assert words in error["message"]
