"""Raw records: every format by a literal example, every fault by its reason."""

from typing import Any

import pytest
from chat_folders import TURNS

from train.data.records import parse
from train.data.types import Chat, Raw, Skip, Text, Tokens

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"messages": ASKED}, Chat("here", ASKED)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            Chat("here", ASKED),
        ),
        # SpecForge's, and either pair of names under either key.
        ({"conversations": ASKED}, Chat("here", ASKED)),
        ({"messages": [ASKED[0], {"from": "gpt", "value": "Hello"}]}, Chat("here", ASKED)),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, Chat("here", ASKED)),
        # LLaMA-Factory's turns before the last.
        (
            {"instruction": "Bye", "output": "Ciao", "history": [["Hi", "Hello"]]},
            Chat("here", [*ASKED, *TURNS[2:]]),
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "Hello"},
            Chat("here", [{"role": "user", "content": "Add.\n\n1 2"}, ASKED[1]]),
        ),
        ({"text": " as it is\n"}, Text("here", " as it is\n")),
        ({"input_ids": [5, 6], "loss_mask": [0, True]}, Tokens("here", [5, 6], [0, 1])),
        # A table has every column in every row.
        ({"text": "a", "messages": None, "input": None}, Text("here", "a")),
    ],
)
def test_every_format_is_known_by_its_keys(row: dict[str, Any], record: object) -> None:
    assert parse(Raw("here", row), None) == record


def test_what_a_turn_states_besides_is_left_to_the_template() -> None:
    turns = [{"role": "user", "content": "Hi", "name": "Ann", "tool_calls": None}, ASKED[1]]
    record = parse(Raw("here", {"messages": turns}), None)
    assert isinstance(record, Chat)
    assert record.turns[0] == {"role": "user", "content": "Hi", "name": "Ann"}


def test_a_stated_format_decides_between_several() -> None:
    row = {"instruction": "Hi", "output": "Hello", "text": "### Hi ### Hello"}
    skip = parse(Raw("here", row), None)
    assert skip == Skip(
        "here", "ambiguous format", "it has instruction and text; set the source's format"
    )
    assert parse(Raw("here", row), "alpaca") == Chat("here", ASKED, ("text",))


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": ASKED}, [SYSTEM, *ASKED]),
        ({"conversations": ASKED}, [SYSTEM, *ASKED]),
        ({"instruction": "Hi", "output": "Hello"}, [SYSTEM, *ASKED]),
        # Said once where a turn says it too.
        ({"messages": [SYSTEM, *ASKED]}, [SYSTEM, *ASKED]),
        ({"messages": ASKED, "system": " "}, ASKED),
    ],
)
def test_a_records_own_system_text_comes_first(row: dict[str, Any], turns: list[Any]) -> None:
    record = parse(Raw("here", {"system": "Be brief."} | row), None)
    assert record == Chat("here", turns)


def test_an_answer_of_weight_0_is_one_without_loss() -> None:
    # OpenAI's own example of fine-tuning on some answers of a conversation.
    turns = [
        {"role": "user", "content": "What's the capital of France?"},
        {"role": "assistant", "content": "Paris", "weight": 0},
        {"role": "user", "content": "Can you be more sarcastic?"},
        {"role": "assistant", "content": "Paris, as if everyone doesn't know.", "weight": 1},
    ]
    record = parse(Raw("here", {"system": "Be brief.", "messages": turns}), None)
    assert isinstance(record, Chat)
    assert record.without_loss == {2}
    assert all(turn.keys() == {"role", "content"} for turn in record.turns)


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": ASKED, "id": 7, "tools": [{}], "parallel_tool_calls": None}, ("id", "tools")),
        (
            {
                "id": "x",
                "conversations": [
                    {"from": "human", "value": "Hi", "markdown": None},
                    {"from": "gpt", "value": "Hello", "text": "<p>Hello"},
                ],
            },
            ("text of a turn", "id"),
        ),
        ({"instruction": "Hi", "output": "Hello", "lang": "en"}, ("lang",)),
        ({"text": "a", "meta": {}}, ("meta",)),
        ({"input_ids": [5], "loss_mask": [1], "labels": [5]}, ("labels",)),
        # What `train regenerate` states of a row asks for nothing.
        ({"seed": 0, "temperature": 0.0, "input_ids": [5, 6], "loss_mask": [0, 1]}, ()),
    ],
)
def test_every_field_that_is_not_read_is_told(row: dict[str, Any], unread: tuple[str, ...]) -> None:
    record = parse(Raw("here", row), None)
    assert not isinstance(record, Skip)
    assert record.unread == unread


NO_TURN = "a turn is not an object with role and content, or from and value"


def chat(*turns: object) -> dict[str, Any]:
    return {"messages": list(turns)}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not a JSON object"),
        ({}, "unknown format"),
        ({"messages": []}, "messages is not a list of turns"),
        (chat("Hi"), NO_TURN),
        (
            chat({"role": "assistant", "content": [{"text": "x"}]}),
            "a turn's content is not a string",
        ),
        (chat(ASKED[0]), "no assistant turn"),
        (chat(ASKED[1], ASKED[0]), "the assistant speaks first"),
        (chat(ASKED[0], {"role": "assistant", "content": " \n"}), "an assistant turn is blank"),
        (chat({"role": "user", "content": "\ud800"}, ASKED[1]), "a lone surrogate"),
        ({"conversations": [{"from": "human"}]}, "a turn's value is not a string"),
        ({"conversations": [{"value": "Hi"}]}, NO_TURN),
        (chat(ASKED[0], ASKED[1] | {"weight": 0}), "every answer has weight 0"),
        (chat(ASKED[0], ASKED[1] | {"weight": 0.5}), "a turn's weight is neither 0 nor 1"),
        (chat(ASKED[0] | {"weight": 1}, ASKED[1]), "a turn's weight is 1"),
        ({"messages": ASKED, "system": 3}, "system is not a string"),
        (chat(SYSTEM, *ASKED) | {"system": "Be long."}, "two system texts"),
        (
            {"instruction": "Hi", "output": "x", "history": ["x"]},
            "history is not a list of pairs of strings",
        ),
        ({"conversations": [{"from": "dog", "value": "x"}]}, "a turn has an unknown speaker"),
        ({"instruction": "Hi"}, "output is not a string"),
        ({"instruction": "Hi", "output": ""}, "output is blank"),
        ({"instruction": "Hi", "output": "x", "input": 3}, "input is not a string"),
        ({"text": 3}, "text is not a string"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask is not a list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": [1, 1]}, "input_ids and loss_mask differ in length"),
        ({"input_ids": [], "loss_mask": []}, "input_ids is not a list of integers"),
        ({"input_ids": [True], "loss_mask": [1]}, "input_ids is not a list of integers"),
    ],
)
def test_every_fault_has_its_reason(row: object, reason: str) -> None:
    skip = parse(Raw("here", row), None)
    assert isinstance(skip, Skip)
    assert (skip.place, skip.reason) == ("here", reason)
