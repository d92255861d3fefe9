"""Requests of OpenAI's Responses API, and their conversion to chat requests."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from redrafter_jax.serving.decoding_fields import DecodingFields
from redrafter_jax.serving.openai_errors import ApiError
from redrafter_jax.serving.openai_fields import Fields, Text, Values
from redrafter_jax.serving.openai_forms import StructuredOutputs
from redrafter_jax.serving.openai_messages import Function, as_object, join_parts, missing_field
from redrafter_jax.serving.openai_schema import ChatRequest

# Fields that would require the server to store or run something, each with the end of its error.
_REFUSED = {
    "previous_response_id": "no answer is stored here; send the earlier items in input",
    "conversation": "no conversation is stored here; send its items in input",
    "prompt": "no prompt is stored here; send its text in input",
    "background": "answers are only decoded while the client waits; leave it out, or set stream",
    "store": "no answer is stored here; leave it out, or give false",
    "include": "an answer holds nothing besides its items; leave it out",
}
# The fields that an item of each type has.
_HAS = {
    "message": ("role", "content"),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
# Fields of a chat request, with their names in the Responses API.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_content": "items of the type reasoning",
}
_CHAT_NAME = re.compile(rf"(?<![\w'])({'|'.join(_NAMES)})(?![\w'])")


def _as_content(content: Any) -> Any:
    kinds = ("input_text", "output_text", "reasoning_text")
    return join_parts(content, kinds, {"annotations", "logprobs"})


def _as_arguments(arguments: Any, others: Any) -> Any:
    broke_off = others.data.get("status") == "incomplete"
    return {} if broke_off and isinstance(arguments, str) else as_object(arguments)


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


# The type of an item decides whether these fields are required.
_Given = Annotated[Text | None, Field(validate_default=True)]
_Content = Annotated[Text | None, BeforeValidator(_as_content), Field(validate_default=True)]


class Item(Fields):
    """An item of a conversation; items of an earlier answer can be sent back unchanged.

    A call whose status is "incomplete" may hold broken JSON, and is left out.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"id", "phase"})
    off: ClassVar[Values] = {"summary": ([],)}  # reasoning is returned whole, not as a summary

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Annotated[
        Literal["system", "developer", "user", "assistant"] | None, Field(validate_default=True)
    ] = None
    status: Any = None
    content: _Content = None
    call_id: _Given = None
    name: _Given = None
    arguments: Annotated[
        dict[str, Any] | None, BeforeValidator(_as_arguments), Field(validate_default=True)
    ] = None
    output: _Content = None

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, kind: Any) -> Any:
        if kind == "item_reference":
            raise ValueError("no item is stored here; send the item itself")
        return kind

    @field_validator("role", "content", "call_id", "name", "arguments", "output")
    @classmethod
    def _check_has(cls, value: Any, info: Any) -> Any:
        if (kind := info.data.get("type")) is None:  # the type is refused
            return value
        if info.field_name in _HAS[kind] and value is None:
            raise missing_field()
        if info.field_name not in _HAS[kind] and value is not None:
            raise ValueError(f"items of the type {kind!r} do not have it; leave it out")
        return value

    @property
    def speaker(self) -> str:
        """The role of the chat turn to which the item belongs."""
        if self.type == "function_call_output":
            return "tool"
        return self.role or "assistant"


class FunctionName(Fields):
    """The tool that an answer must call."""

    type: Literal["function"]
    name: str


class FunctionTool(Function, FunctionName):  # in this order the type is checked first
    """A tool that an answer may call; the fields of the function are fields of the tool."""

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, kind: Any) -> Any:
        if kind != "function":
            raise ValueError(f'{kind!r:.80} is not supported; offer tools of the type "function"')
        return kind


class TextFormat(Fields):
    """The form that the text of an answer must have, whatever the value of `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(
                'schema and type: "json_schema" belong together; give both, or neither'
            )
        return self


class TextConfig(Fields):
    """The field `text`, which holds the form of an answer's text."""

    off: ClassVar[Values] = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat(type="text")


class StreamOptions(Fields):
    """Options for what a stream returns besides the answer; none is supported."""

    off: ClassVar[Values] = {"include_obfuscation": (False,)}


class ResponsesRequest(DecodingFields):
    """The body of `/v1/responses`. Nothing is stored. Extensions are not in OpenAI's API.

    Attributes:
      input: text of the user, or the items of the conversation so far.
      instructions: text of a system message before the items.
      max_output_tokens: limit on new tokens; None for all tokens that fit.
      text: form that the answer must have.
      structured_outputs: form that the answer must have, as in vLLM. An extension.
      tools: tools that the answer may call.
      tool_choice: which tools the answer may or must call, as in `ChatRequest`.
      parallel_tool_calls: whether an answer may hold more than one call.
      metadata: values that the answer repeats.
      chat_template_kwargs: arguments of the chat template. An extension.
      speculative_metrics: whether to return how many drafted tokens were accepted. An extension.
    """

    labels: ClassVar[frozenset[str]] = DecodingFields.labels - {"metadata"}
    off: ClassVar[Values] = {
        **DecodingFields.off,
        "background": (False,),
        "include": ([],),
        "instructions": ("",),
        "reasoning": ({},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(_as_items)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig = TextConfig()
    structured_outputs: StructuredOutputs | None = None
    tools: list[FunctionTool] = []
    tool_choice: Literal["auto", "none", "required"] | FunctionName = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, Text] = {}
    chat_template_kwargs: dict[str, Any] = {}
    stream_options: StreamOptions = StreamOptions()
    speculative_metrics: bool = False

    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    store: Any = None
    include: Any = None

    @field_validator(*_REFUSED)
    @classmethod
    def _refuse(cls, value: Any, info: Any) -> None:
        del value
        raise ValueError(_REFUSED[info.field_name])

    def chat(self) -> ChatRequest:
        """Convert the request to a chat request.

        Raises:
          ValidationError: fields contradict each other; the error uses the names of a chat request.
        """
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, FunctionName):
            choice = {"type": "function", "function": {"name": choice.name}}
        form: dict[str, Any] = {"type": self.text.format.type}
        if self.text.format.schema_ is not None:
            form["json_schema"] = {"schema": self.text.format.schema_}
        return ChatRequest.model_validate(
            self.model_dump(include={*DecodingFields.model_fields})
            | {
                "messages": [*turns, *turns_of(self.input)],
                "max_tokens": self.max_output_tokens,
                "response_format": form,
                "structured_outputs": self.structured_outputs,
                "tools": [{"type": "function", "function": tool} for tool in tools],
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "chat_template_kwargs": self.chat_template_kwargs,
                "stream_options": {"include_usage": True} if self.stream else None,
                "speculative_metrics": self.speculative_metrics,
            }
        )


def turns_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert items to the turns of a chat.

    Consecutive items of the assistant (reasoning, messages and calls) form one turn, up to the next
    reasoning item or to the second of two adjacent messages. Incomplete calls are left out.
    """
    turns: list[dict[str, Any]] = []
    before: Item | None = None
    for item in items:
        if item.type == "function_call" and item.status == "incomplete":
            continue
        goes_on = before is not None and before.speaker == item.speaker == "assistant"
        twice = before is not None and before.type == item.type == "message"
        if not goes_on or twice or item.type == "reasoning":
            turns.append({"role": item.speaker, "content": []})
        turn = turns[-1]
        match item.type:
            case "reasoning":
                turn["reasoning_content"] = item.content
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                calls = turn.setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "function": function})
            case "function_call_output":
                turn |= {"content": [item.output], "tool_call_id": item.call_id}
            case "message":
                turn["content"].append(item.content)
        before = item
    # Texts are joined only once, because a turn may have very many messages with calls in between.
    return [turn | {"content": "".join(turn["content"])} for turn in turns]


@contextmanager
def in_own_names() -> Generator[None]:
    """Open a block in which errors about the chat request use the names of the Responses API."""
    try:
        yield
    except ValidationError as error:
        errors = [
            {**one, "loc": ("body", *map(_renamed, one["loc"])), "msg": _renamed(one["msg"])}
            for one in error.errors()
        ]
        raise RequestValidationError(errors) from None
    except ApiError as error:
        raise ApiError(
            error.status_code,
            _renamed(error.detail),
            field=error.field and _renamed(error.field),
            code=error.code,
            headers=error.headers,
        ) from None


def _renamed(words: Any) -> Any:
    if not isinstance(words, str):
        return words
    return _CHAT_NAME.sub(lambda found: _NAMES[found[0]], words)
