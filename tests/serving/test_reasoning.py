"""What a target reasons, apart from what it answers."""

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from schemas import END, end_tokenizer
from servers import HTTP, LINES, serving

from redrafter_jax.serving.reasoning import ReasoningSplit

# A text, whether the template had opened the reasoning, and the two parts.
CASES = [
    ("<think>\nWhy?\nSo.\n</think>\n\nYes.\n", False, ("Why?\nSo.", "Yes.\n")),
    ("\nWhy?\n</think>\n\nYes.", True, ("Why?", "Yes.")),
    ("\n<think></think>Yes <think> is a mark", False, ("", "Yes <think> is a mark")),
    ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
    ("  <thin ice", False, ("", "  <thin ice")),
    ("<think>cut off </thi", False, ("cut off </thi", "")),
    ("if a < b: </think>x", True, ("if a < b:", "x")),
    (" \n", False, ("", " \n")),
]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("text", "opened", "parts"), CASES)
def test_reasoning_is_told_from_the_answer_however_the_text_comes(
    text: str, opened: bool, parts: tuple[str, str], size: int
) -> None:
    split = ReasoningSplit(opened)
    pairs = [split.push(text[at : at + size]) for at in range(0, len(text), size)]
    pairs.append(split.finish())
    assert tuple(map("".join, zip(*pairs, strict=True))) == parts


def ask(base: str, content: str, **asked: Any) -> Any:
    turns = [{"role": "user", "content": content}]
    asked = {"model": "tiny", "messages": turns, "seed": 0} | asked
    return HTTP.post(f"{base}/v1/chat/completions", json=asked)


def test_a_server_tells_reasoning_whole_and_streamed() -> None:
    # The engine answers with the prompt's own tokens: here one for each byte of it.
    content = "<think>hm</think>yes"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with serving(FakeEngine(), template=LINES._replace(thinks=True)) as base:
        whole = ask(base, content, max_tokens=20, n=2).json()
        lines = ask(base, content, max_tokens=20, **options).text.split("\n\n")
        asked = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
        again = ask(base, "", max_tokens=2, messages=[asked])
        assert again.status_code == 200
        user = ask(base, "", messages=[asked | {"role": "user"}]).json()["error"]["message"]
        assert "only messages of the role 'assistant' have reasoning" in user
    # Choice 1 begins at the second token, so that its mark is none.
    assert [choice["message"] for choice in whole["choices"]] == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "refusal": None},
        {
            "role": "assistant",
            "content": content[1:] + "\n",
            "reasoning_content": None,
            "refusal": None,
        },
    ]
    reasoning = len("<think>hm</think>")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoning}
    *chunks, usage = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoning}


def test_a_template_that_opens_the_reasoning_is_seen() -> None:
    template = LINES._replace(
        thinks=True, render=lambda turns, _: f"{turns[-1]['content']}<think>\n"
    )
    with serving(FakeEngine(), template=template) as base:
        (choice,) = ask(base, "hm</think>yes", max_tokens=13).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "yes")


def test_an_answer_of_a_form_is_not_searched_for_reasoning() -> None:
    """A grammar has no room for the mark that would close what the template opens."""
    pytest.importorskip("llguidance", reason="needs the extra structured")
    template = LINES._replace(
        thinks=True, render=lambda turns, _: f"{turns[-1]['content']}<think>\n"
    )
    options: dict[str, Any] = {"tokenizer": end_tokenizer(), "stop_tokens": (END,)}
    form = {"response_format": {"type": "json_object"}}
    with serving(FakeEngine(), template=template, **options) as base:
        (choice,) = ask(base, '{"a": 1}', max_tokens=8, **form).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}', "refusal": None}


def test_without_marks_there_is_no_reasoning(base: str) -> None:
    answer = ask(base, "<think>hm</think>yes", max_tokens=20).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "<think>hm</think>yes",
        "refusal": None,
    }
    assert "completion_tokens_details" not in answer["usage"]
    turn = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    refused = ask(base, "", messages=[turn])
    assert refused.status_code == 400
    assert "does not support reasoning; leave" in refused.json()["error"]["message"]
