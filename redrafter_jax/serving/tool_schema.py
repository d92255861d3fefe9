"""The JSON schema of a call that an answer must make."""

from collections.abc import Sequence
from typing import Any

from redrafter_jax.serving.openai_messages import Tool


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of an answer that is one call of one of the tools, and nothing else.

    The answer is the object that the style "llama3" of `tool_styles.STYLES` reads without a mark,
    whatever the style in which the target calls tools unasked: so vLLM does it too.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                # Without a schema any object will do.
                "parameters": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
