"""The messages and tools of OpenAI's chat requests."""

import json
from collections.abc import Sequence, Set
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from redrafter_jax.serving.openai_fields import Fields, Text, Values, whole_text

_PART_LABELS = frozenset({"cache_control", "prompt_cache_breakpoint"})


def join_parts(content: Any, kinds: Sequence[str], labels: Set[str] = frozenset()) -> Any:
    """Join the texts of a message's content if it is a list of parts; else return it unchanged.

    `kinds` are the supported types of parts. `labels` are fields of a part that are ignored.

    Raises:
      ValueError: a part has an unsupported type or field.
    """
    if not isinstance(content, list):
        return content
    names = {"type", "text", *_PART_LABELS, *labels}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            known = " and ".join(f'{{"type": "{one}", "text": ...}}' for one in kinds)
            raise ValueError(f"parts of type {kind!r:.80} are not supported; give {known}")
        for name, value in part.items():
            if name not in names and value is not None:
                raise ValueError(f"the field {name:.80} of a part is not supported; leave it out")
    return "".join(part["text"] for part in content)


def _as_text(content: Any) -> Any:
    return join_parts(content, ["text"])


def as_object(arguments: Any) -> Any:
    """Return a tool call's arguments as a mapping; requests give them as the text of a JSON object.

    Raises:
      ValueError: the text is not a JSON object.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("it must be the text of a JSON object")
    whole_text(json.dumps(given, ensure_ascii=False))
    return given


def missing_field() -> PydanticCustomError:
    """Return the error for a required field that is missing."""
    return PydanticCustomError("missing", "it is missing")


class CalledFunction(Fields):
    """The name and the arguments of a function that an earlier answer called."""

    name: Text
    arguments: Annotated[dict[str, Any], BeforeValidator(as_object)]


class ToolCall(Fields):
    """A call of a tool in an earlier answer; chat templates read its arguments as an object."""

    labels: ClassVar[frozenset[str]] = frozenset({"index"})  # from the pieces of a stream

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(Fields):
    """A function that an answer may call; `parameters` is a JSON Schema of its arguments."""

    off: ClassVar[Values] = {"strict": (False,)}

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of the function that an answer must call."""

    name: str


class NamedTool(Fields):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


class Message(Fields):
    """A message of a conversation; "developer" is OpenAI's newer name of the role "system".

    The chat template reads `name`, the name of the speaker. `reasoning_content` and `tool_calls`
    repeat the fields of an earlier answer.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    off: ClassVar[Values] = {"tool_calls": ([],), "annotations": ([],)}

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[Text | None, Field(validate_default=True)] = None
    content: Annotated[Text | None, BeforeValidator(_as_text), Field(validate_default=True)] = None
    name: Text | None = None
    reasoning_content: Text | None = None

    @field_validator("reasoning_content")
    @classmethod
    def _check_role(cls, reasoning: str, others: Any) -> str:
        if others.data.get("role") != "assistant":
            raise ValueError(
                "only messages of the role 'assistant' have reasoning; leave reasoning_content out"
            )
        return reasoning

    @field_validator("tool_calls")
    @classmethod
    def _check_caller(cls, calls: list[ToolCall], others: Any) -> list[ToolCall]:
        if others.data.get("role", "assistant") != "assistant":
            raise ValueError(
                "only messages of the role 'assistant' have tool calls; leave tool_calls out"
            )
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _check_result(cls, identifier: str | None, others: Any) -> str | None:
        if others.data.get("role") != "tool" and identifier is not None:
            raise ValueError("only messages of the role 'tool' have a tool_call_id; leave it out")
        if others.data.get("role") == "tool" and identifier is None:
            raise missing_field()
        return identifier

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: str | None, others: Any) -> str | None:
        if content is None and not others.data.get("tool_calls"):
            raise missing_field()
        return content or ""

    @property
    def turn(self) -> dict[str, Any]:
        """The message in the format of chat templates."""
        return self.model_dump(exclude_none=True)
