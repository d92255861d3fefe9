"""Calls of tools, told from the text of an answer however it comes."""

import json
from typing import Any

import pytest
from places import ROOT

from redrafter_jax.serving.tool_split import ToolSplit
from redrafter_jax.text.tool_styles import STYLES

GOLDEN = json.loads((ROOT / "tests" / "goldens" / "tool_calls.json").read_text())
NAMES = GOLDEN["names"]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(
    style: str, text: str, size: int = 1000, streams: bool = True, single: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer and its calls, put together as a client does."""
    split = ToolSplit(STYLES[style], NAMES, streams=streams, single=single)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [*map(split.push, pieces), split.finish()]
    calls: list[list[str]] = []
    for piece in (piece for part in parts for piece in part.calls):
        if piece.name is not None:
            assert piece.id is not None
            assert len(piece.id) == 9
            assert piece.id.isalnum()
            calls.append([piece.name, ""])
        assert piece.index == len(calls) - 1
        calls[piece.index][1] += piece.arguments
    return "".join(part.text for part in parts), [(name, text) for name, text in calls]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("style", STYLES)
def test_recorded_answers_are_read_as_their_authors_parsers_read_them(
    style: str, size: int
) -> None:
    cases = GOLDEN["styles"][style]
    assert len(cases) == 50
    for case in cases:
        _, calls = read(style, case["text"], size, streams=False)
        told = [[name, json.loads(arguments)] for name, arguments in calls]
        # Where vLLM and SGLang differ, the golden has both.
        expected = case["calls"]
        either = list(expected.values()) if isinstance(expected, dict) else [expected]
        assert told in either, case["text"]
