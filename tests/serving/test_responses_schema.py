"""Requests of the Responses API: their items as the turns of a chat, and the documented fields."""

from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from places import ROOT

from redrafter_jax.serving.responses_schema import Item, ResponsesRequest, turns_of


def test_items_are_the_turns_of_a_chat() -> None:
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"}
    result = {"type": "function_call_output", "output": [{"type": "input_text", "text": "3"}]}
    parts = [{"type": "output_text", "text": "Hm", "annotations": [], "logprobs": []}]
    request = ResponsesRequest.model_validate(
        {
            "model": "tiny",
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "So"}],
                },
                {"type": "message", "role": "assistant", "content": parts, "status": "completed"},
                call | {"call_id": "a"},
                call | {"call_id": "b"},
                {"role": "assistant", "content": "!"},
                result | {"call_id": "a"},
                result | {"call_id": "b"},
                {"role": "assistant", "content": "One."},
                {"role": "assistant", "content": "Two."},
                {"role": "developer", "content": "Go on."},
            ],
        }
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert [turn.turn for turn in request.chat().messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Hm!",
            "reasoning_content": "So",
            "tool_calls": [
                {"id": name, "type": "function", "function": function} for name in ("a", "b")
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_call_id": "b"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "system", "content": "Go on."},
    ]


class Counted(str):
    """A text that counts the characters that are copied when texts are added."""

    copied = 0

    def __add__(self, other: str) -> "Counted":
        Counted.copied += len(self) + len(other)
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        return Counted(other) + self


def test_the_texts_of_very_many_items_are_joined_once() -> None:
    """Between its calls an assistant may say something any number of times, in one turn."""
    said = Item.model_construct(type="message", role="assistant", content=Counted("x"))
    call = Item.model_construct(type="function_call", call_id="a", name="add", arguments={})
    before = Counted.copied
    assert "" + Counted("ab") + "c" == "abc"
    assert Counted.copied == before + 2 + 3
    (turn,) = turns_of([said, call] * 50_000)
    assert (turn["content"], len(turn["tool_calls"])) == ("x" * 50_000, 50_000)
    assert Counted.copied == before + 2 + 3


def test_the_documentation_names_every_field_of_openais_schema() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    _, _, section = page.partition("### Responses")
    section = section.partition("\n## ")[0].partition("\n### ")[0]
    fields = {*ResponseCreateParamsNonStreaming.__annotations__} - {"stream"}
    assert [name for name in sorted(fields) if f"`{name}" not in section] == []
