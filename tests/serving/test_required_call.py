"""Which answers may be a required call, by the package jsonschema."""

import json
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from redrafter_jax.serving.openai_messages import Tool
from redrafter_jax.serving.required_call import CALL_STYLE, call_grammar
from redrafter_jax.serving.tool_split import CallPiece, ToolSplit

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
# As pydantic writes the schema of a field that is an object itself.
TRIP = {
    "type": "object",
    "$defs": {"City": CITY},
    "properties": {"to": {"$ref": "#/$defs/City"}},
    "required": ["to"],
}
TRAVEL = {"type": "function", "function": {"name": "travel", "parameters": TRIP}}
NOW = {"type": "function", "function": {"name": "now"}}


def schema_of(*tools: Any) -> Any:
    return call_grammar(TypeAdapter(list[Tool]).validate_python(list(tools))).json_schema


@pytest.mark.parametrize(
    ("answer", "of_both", "of_one"),
    [
        ({"name": "weather", "parameters": {"city": "Lisbon"}}, True, True),
        ({"name": "now", "parameters": {}}, True, False),
        ({"name": "weather", "parameters": {}}, False, False),
        ({"name": "other", "parameters": {}}, False, False),
        ({"name": "weather", "parameters": {"city": "Lisbon"}, "more": 1}, False, False),
        ({"parameters": {"city": "Lisbon"}}, False, False),
        ("weather", False, False),
    ],
)
def test_an_answer_is_a_call_of_one_of_the_tools(answer: Any, of_both: bool, of_one: bool) -> None:
    for tools, fits in (((WEATHER, NOW), of_both), ((WEATHER,), of_one)):
        validator = jsonschema.Draft202012Validator(schema_of(*tools))
        assert validator.is_valid(answer) == fits


def test_such_an_answer_is_read_as_a_call() -> None:
    answer = json.dumps({"name": "weather", "parameters": {"city": "Lisbon"}})
    (call,) = ToolSplit(CALL_STYLE, ["weather"], streams=False).push(answer)
    assert isinstance(call, CallPiece)
    assert (call.name, call.arguments) == ("weather", '{"city": "Lisbon"}')


def test_arguments_are_an_object_where_a_schema_names_no_type() -> None:
    bare = {"type": "function", "function": {"name": "f", "parameters": {"minProperties": 1}}}
    validator = jsonschema.Draft202012Validator(schema_of(bare))
    for parameters, fits in (({"a": 1}, True), ({}, False), (3, False)):
        assert validator.is_valid({"name": "f", "parameters": parameters}) == fits


@pytest.mark.parametrize("tools", [(TRAVEL,), (NOW, TRAVEL)])
def test_references_within_a_tools_own_schema_are_kept(tools: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema_of(*tools))
    for city, fits in (({"city": "Lisbon"}, True), ({}, False)):
        assert validator.is_valid({"name": "travel", "parameters": {"to": city}}) == fits
