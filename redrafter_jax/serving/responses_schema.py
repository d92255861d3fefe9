"""Requests of OpenAI's Responses API, and the chat requests that they stand for."""

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

# What would have to be kept, or run, by the server; and what serves instead.
_REFUSED = {
    "previous_response_id": "no answer is stored here; send the earlier items in input",
    "conversation": "no conversation is stored here; send its items in input",
    "prompt": "no prompt is stored here; send its text in input",
    "background": "an answer is decoded while its client waits; leave it out, or set stream",
    "store": "no answer is stored here; leave it out, or give false",
    "include": "an answer tells no more than its items; leave it out",
}
# Which fields an item of a type has.
_HAS = {
    "message": ("role", "content"),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
# How the fields of a chat request are called here.
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


# Whether they have to be there depends on the item's type.
_Given = Annotated[Text | None, Field(validate_default=True)]
_Content = Annotated[Text | None, BeforeValidator(_as_content), Field(validate_default=True)]


class Item(Fields):
    """An item of a conversation; those that an answer had can be sent back as they are.

    A call whose status is "incomplete" may have broken JSON, and is left out.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"id", "phase"})
    off: ClassVar[Values] = {"summary": ([],)}  # of reasoning, which is told whole

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
        if (kind := info.data.get("type")) is None:  # which is refused
            return value
        if info.field_name in _HAS[kind] and value is None:
            raise missing_field()
        if info.field_name not in _HAS[kind] and value is not None:
            raise ValueError(f"an item of the type {kind!r} has none; leave it out")
        return value

    @property
    def speaker(self) -> str:
        """The role of the turn that it belongs to."""
        if self.type == "function_call_output":
            return "tool"
        return self.role or "assistant"


class FunctionName(Fields):
    """The tool that an answer must call."""

    type: Literal["function"]
    name: str


class FunctionTool(Function, FunctionName):  # in this order the type is looked at first
    """A tool that an answer may call, without a level of its own for the function."""

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, kind: Any) -> Any:
        if kind != "function":
            raise ValueError(f'{kind!r:.80} is not run here; offer tools of the type "function"')
        return kind


class TextFormat(Fields):
    """What an answer is held to, whether `strict` asks for that or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(
                'schema goes with type: "json_schema", and with it alone; give both, or neither'
            )
        return self


class TextConfig(Fields):
    """The form of an answer's text."""

    off: ClassVar[Values] = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat(type="text")


class StreamOptions(Fields):
    """Options on what a stream tells besides the answer; there are none."""

    off: ClassVar[Values] = {"include_obfuscation": (False,)}


class ResponsesRequest(DecodingFields):
    """`/v1/responses`, of which nothing is stored.

    Attributes:
      input: a text of the user, or the items of the conversation so far.
      instructions: what the system says before them.
      max_output_tokens: limit on new tokens; None for as many as there is room for.
      text: what the answer is held to.
      structured_outputs: the same as vLLM writes it. Not OpenAI's.
      tools: tools that the answer may call.
      tool_choice: as in `ChatRequest`.
      parallel_tool_calls: whether an answer tells more than one call.
      metadata: what the answer repeats.
      chat_template_kwargs: arguments of the chat template. Not OpenAI's.
      speculative_metrics: tell how many drafted tokens were accepted. Not OpenAI's.
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
        """The chat request that it stands for.

        Raises:
          ValidationError: its fields do not go together, in the words of a chat request.
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
    """The turns of a chat that the items are.

    What the assistant reasons, says and calls is one turn, as an answer has it. Reasoning begins
    another one, and so does a message right after a message. Calls that broke off are left out.
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
    # Texts are joined once: a turn may have very many messages, with calls between them.
    return [turn | {"content": "".join(turn["content"])} for turn in turns]


@contextmanager
def in_own_names() -> Generator[None]:
    """Errors about the chat request within tell of the fields as they are called here."""
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
