"""The grammar of an answer that must call a tool."""

from collections.abc import Sequence
from typing import Any

from redrafter_jax.config import Grammar
from redrafter_jax.serving.openai_messages import Tool
from redrafter_jax.text.tool_styles import STYLES

# A required call is a JSON object without a mark, whatever style of calls the target has.
CALL_STYLE = STYLES["llama3"]


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """Return the grammar of an answer that is exactly one call of one of the tools."""
    calls = [_call_schema(tool, f"anyOf/{place}/") for place, tool in enumerate(tools)]
    return Grammar({"anyOf": calls})


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    """Return the schema of a call; `place` is its JSON pointer in the whole schema."""
    # Without a schema any object is allowed; a schema without a type would allow other values too.
    parameters = {"type": "object"} | (tool.function.parameters or {})
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "parameters": _moved(parameters, f"#/{place}properties/parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """Return the schema with `root` in place of the `#` with which its local references begin."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
