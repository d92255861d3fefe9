"""Calls of tools, told from the text of an answer however it comes."""

import json
import re
import time
from collections.abc import Sequence

import pytest
from places import ROOT

from redrafter_jax.serving.tool_split import CallPiece, Part, ToolSplit
from redrafter_jax.text.tool_styles import STYLES

GOLDEN = json.loads((ROOT / "tests" / "goldens" / "tool_calls.json").read_text())
NAMES = GOLDEN["names"]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def calls_of(parts: Sequence[Part]) -> list[CallPiece]:
    return [part for part in parts if isinstance(part, CallPiece)]


def read(
    style: str, text: str, size: int = 1000, streams: bool = True, single: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer and its calls, put together as a client does."""
    split = ToolSplit(STYLES[style], NAMES, streams=streams, single=single)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for parts in (*map(split.push, pieces), split.finish()) for part in parts]
    calls: list[list[str]] = []
    for piece in calls_of(parts):
        if piece.name is not None:
            assert piece.id is not None
            assert len(piece.id) == 9
            assert piece.id.isalnum()
            calls.append([piece.name, ""])
        assert piece.number == len(calls) - 1
        calls[piece.number][1] += piece.arguments
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [(name, text) for name, text in calls]


@pytest.mark.parametrize("style", STYLES)
def test_recorded_answers_are_read_as_their_authors_parsers_read_them(style: str) -> None:
    cases = GOLDEN["styles"][style]
    assert len(cases) == 50
    for case in cases:
        _, calls = read(style, case["text"], streams=False)
        told = [[name, json.loads(arguments)] for name, arguments in calls]
        # Where vLLM and SGLang differ, the golden has both.
        expected = case["calls"]
        either = list(expected.values()) if isinstance(expected, dict) else [expected]
        assert told in either, case["text"]


@pytest.mark.parametrize(
    ("style", "text", "said", "calls"),
    [
        # Text around calls stays, but for the spaces before a call.
        ("hermes", f"Well. \n{HERMES}\n\nSo.\n", "Well.\n\nSo.\n", [("add", '{"a": 1}')]),
        ("hermes", "a <tool_box> \n", "a <tool_box> \n", []),
        ("llama3", ' {"name": "now", "parameters": {}} ; ', "", [("now", "{}")]),
        ("llama3", 'It is {"name": "now", "parameters": {}}', "", []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', "", "both"),
        ("mistral", "[TOOL_CALLS]add me", "[TOOL_CALLS]add me", []),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", "", [("now", "{}")]),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]{}", "[TOOL_CALLS]now[CALL_ID]{}", []),
        # What breaks a call may begin the next one.
        ("hermes", f" <tool_call>{HERMES}", " <tool_call>", [("add", '{"a": 1}')]),
        ("hermes", f'<tool_call>{{"name": "add",{HERMES}', '<tool_call>{"name": "add",', "one"),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]now{}", "[TOOL_CALLS]", [("now", "{}")]),
        ("mistral", "[TOOL_CALLS]add[TOOL_CALLS]now{}", "[TOOL_CALLS]add", [("now", "{}")]),
        # A key that is spelt with escapes is not seen while it comes.
        ("hermes", '<tool_call>{"n\\u0061me": "add", "arguments": {}}', None, []),
        # The arguments are the target's own text, and may come before the name.
        ("hermes", '<tool_call>{"arguments" : {"b":  [ ]} ,"name":"add"}', "", "swapped"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 7}', None, []),
        ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}', None, []),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "x", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', None, []),
        ("hermes", '<tool_call> \n{"name": "add", "argu', None, []),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_is_no_call_of_an_offered_tool_stays_text(
    style: str, text: str, said: str | None, calls: object, size: int
) -> None:
    told = read(style, text, size, streams=False)
    match calls:
        case "both":
            assert told == ("", [("add", '{"a": 1}'), ("now", "{}")])
        case "one":
            assert told == (said, [("add", '{"a": 1}')])
        case "swapped":
            assert told == ("", [("add", '{"b":  [ ]}')])
        case _:
            unchanged = text if said is None or "It is" in text else said
            assert told == (unchanged, calls)


@pytest.mark.parametrize("style", STYLES)
def test_a_stream_tells_the_same_calls(style: str) -> None:
    for case in GOLDEN["styles"][style]:
        whole = read(style, case["text"], streams=False)
        if whole[1]:
            assert read(style, case["text"], 3) == whole


def test_a_stream_tells_arguments_as_they_come() -> None:
    split = ToolSplit(STYLES["hermes"], NAMES, streams=True)
    begun = split.push('<tool_call>{"name": "add", "arguments": {"a": 1')
    ((piece,), (more,)) = calls_of(begun), calls_of(split.push("2}"))
    assert (piece.number, piece.name, piece.arguments) == (0, "add", '{"a": 1')
    assert (more.number, more.id, more.name, more.arguments) == (0, None, None, "2}")
    assert split.push("}</tool_call>") == []


def test_a_call_that_breaks_off_in_a_stream_ends_there_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, oh no</tool_call>'
    assert read("hermes", text, 1) == ("oh no</tool_call>", [("add", '{"a": 1, ')])


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (HERMES, True),
        (HERMES.replace("}}", "} oh no"), False),
        (HERMES.replace("1}}", "1"), False),
        (HERMES.replace("1}}", "}}"), False),
    ],
)
def test_calls_that_break_off_do_not_count(text: str, called: bool) -> None:
    split = ToolSplit(STYLES["hermes"], NAMES, streams=True)
    begun = [calls_of(split.push(character)) for character in text]
    split.finish()
    assert any(begun)
    assert split.called is called


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_texts_and_calls_are_told_in_their_order(size: int, streams: bool) -> None:
    text = f"Hm. {HERMES}{HERMES}Done. Bye{HERMES}"
    split = ToolSplit(STYLES["hermes"], NAMES, streams=streams)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for parts in (*map(split.push, pieces), split.finish()) for part in parts]
    kinds = [part if isinstance(part, str) else f"<{part.number}>" for part in parts]
    told = re.sub(r"(<\d>)\1+", r"\1", "".join(kinds))
    assert told == "Hm.<0><1>Done. Bye<2>"


def seconds(style: str, text: str, size: int) -> float:
    """Time of this process alone that it takes to read an answer; the least of three."""
    times = []
    for _ in range(3):
        split, begin = ToolSplit(STYLES[style], NAMES, streams=True), time.process_time()
        for at in range(0, len(text), size):
            split.push(text[at : at + size])
        split.finish()
        times.append(time.process_time() - begin)
    return min(times)


@pytest.mark.parametrize(
    ("style", "begin", "repeated", "size"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "', "x", 1),
        ("hermes", '<tool_call>{"name": "', "x", 1),
        ("hermes", "", " ", 1),
        ("hermes", "<tool_call>", " ", 1),
        ("hermes", "", "<tool_call>x", 10**6),
        ("hermes", "", HERMES, 10**6),
        ("llama3", "", '{"a": ', 1),
        ("mistral", "[TOOL_CALLS]", "a", 1),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_the_work_grows_as_the_answer(style: str, begin: str, repeated: str, size: int) -> None:
    """Where it grew as the square, an answer 16 times as long took 256 times as long."""
    once = 1_000 // len(repeated)
    short, long = (seconds(style, begin + repeated * (once * times), size) for times in (1, 16))
    assert long < 100 * max(short, 1e-4)


def test_one_call_alone_is_told_where_one_alone_is_asked_for() -> None:
    text = f"{HERMES}\n{HERMES}"
    assert [len(read("hermes", text, single=one)[1]) for one in (False, True)] == [2, 1]
