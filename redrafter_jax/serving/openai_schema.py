"""Requests of OpenAI's API: fields that are not declared here are refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from redrafter_jax.config import Grammar
from redrafter_jax.engine.messages import OWN_STOPS
from redrafter_jax.text.tokenizer import require_text

Values = Mapping[str, tuple[Any, ...]]

_LABELS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "parallel_tool_calls",  # of tools, which there are none of
        # Hints to providers who charge for caches; here they are reused unasked.
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "cache_control",
    }
)
_PART_LABELS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_OFF: Values = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "service_tier": ("auto", "default"),
    "store": (False,),
    # Of other servers' APIs.
    "top_k": (0, -1),
    "length_penalty": (1,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "priority": (0,),
}


class _Fields(BaseModel):
    """JSON's own types, known names; null is as if the field was not given.

    Attributes:
      labels: fields that change nothing, whatever their value.
      off: fields that are not supported, with the values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    labels: ClassVar[frozenset[str]] = frozenset()
    off: ClassVar[Values] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in cls.labels and value not in cls.off.get(name, ())
        }


def _whole(text: str) -> str:
    require_text(text, "the text")
    return text


Text = Annotated[str, AfterValidator(_whole)]


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty; leave it out")
    return text


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_biases(value: Any) -> Any:
    """Biases by token, whose numbers JSON spells as texts."""
    if not isinstance(value, dict):
        return value
    if wrong := next((name for name in value if not (str(name).isdecimal())), None):
        raise ValueError(f"{wrong!r:.80} is no token; give the number of one as a string")
    return {int(name): bias for name, bias in value.items()}


def _as_prompts(value: Any) -> list[Any]:
    """One prompt or several, each a text or token ids."""
    prompts = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not (isinstance(prompts, list) and prompts) or not all(
        isinstance(prompt, str) or _are_tokens(prompt) for prompt in prompts
    ):
        raise ValueError("give a text, a list of token ids, or a list of either, none empty")
    return [_whole(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _are_tokens(value: Any) -> bool:
    tokens = isinstance(value, list) and bool(value)
    return tokens and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _as_text(content: Any) -> Any:
    """The text of a message that is given in parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'only parts {{"type": "text", "text": ...}} are supported, not {kind!r:.80}'
            )
        for name, value in part.items():
            if name not in {"type", "text"} | _PART_LABELS and value is not None:
                raise ValueError(f"{name:.80} of a part is not supported; leave it out")
    return "".join(part["text"] for part in content)


class Message(_Fields):
    """A turn of a conversation; "developer" is OpenAI's later name of the system.

    `name`, of who speaks, is for the chat template to read; `reasoning_content` is what an answer
    of this server had under that name.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    off: ClassVar[Values] = {"tool_calls": ([],), "annotations": ([],)}

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[Text, BeforeValidator(_as_text)]
    name: Text | None = None
    reasoning_content: Text | None = None

    @field_validator("reasoning_content")
    @classmethod
    def _check_role(cls, reasoning: str, others: Any) -> str:
        if others.data.get("role") != "assistant":
            raise ValueError("the assistant alone reasons; leave it out")
        return reasoning


class StreamOptions(_Fields):
    """Options on what a stream tells besides the answer."""

    off: ClassVar[Values] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class NamedSchema(_Fields):
    """The `json_schema` of a `response_format`; its name and description are for people to read.

    It is kept to whether `strict` asks for that or not.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(_Fields):
    """What an answer is held to, as OpenAI's API writes it."""

    type: Literal["json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                'json_schema goes with type: "json_schema", and with it alone; give both'
            )
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that it stands for."""
        return Grammar(self.json_schema.schema_ if self.json_schema else {"type": "object"})


class StructuredOutputs(_Fields):
    """The same as vLLM's API writes it: one of its fields."""

    # "json" and "regex" are methods of pydantic's own.
    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1:
            raise ValueError("give one of json, regex and json_object")
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that it stands for."""
        if self.regex is not None:
            return Grammar(regex=self.regex)
        return Grammar(self.json_ if self.json_ is not None else {"type": "object"})


class BaseRequest(_Fields):
    """The fields that both kinds of request share.

    Attributes:
      prompt_field: name of the field that holds the prompts, for messages.
      model: the name that /v1/models gives.
      temperature: temperature and filters of `SamplingConfig`; 1 by default, as in OpenAI's API.
      seed: seed of the first choice's noise; choice i is drawn with seed + i. Random by default.
      presence_penalty: penalties, biases and `min_tokens` of `SamplingConfig`; the last one and
        `repetition_penalty` are not OpenAI's.
      ignore_eos: let `stop` alone end an answer, and not what ends the target's texts. Not
        OpenAI's.
      prompt_logprobs: tell the log-probability of every token of the prompt, and of so many others
        at its place. Not OpenAI's.
      response_format: what the answer is held to.
      structured_outputs: the same as vLLM writes it. Not OpenAI's.
      stop: texts that end an answer; one that is a special token ends it too.
      n: choices for each prompt.
      max_tokens: limit on new tokens; None for as many as there is room for.
      stream: send the answer as it is decided, by server-sent events.
      speculation: False decodes without a drafter; the text is the same. Not OpenAI's.
      draft_trace: tell of every token which target call it came from, and who proposed it. Not
        OpenAI's.
      speculative_metrics: tell how many drafted tokens were accepted. Not OpenAI's.
    """

    labels: ClassVar[frozenset[str]] = _LABELS
    off: ClassVar[Values] = _OFF
    prompt_field: ClassVar[str]

    model: str
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_biases)] = {}
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Annotated[
        list[Annotated[str, AfterValidator(_whole), AfterValidator(_not_empty)]],
        Field(max_length=OWN_STOPS, fail_fast=True),
        BeforeValidator(_as_list),
    ] = []
    n: Annotated[int, Field(ge=1, le=16)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    speculation: bool = True
    draft_trace: bool = False
    speculative_metrics: bool = False

    # Called for a field that is given. The fields above it are in `others.data`, a ValidationInfo,
    # whose protocol cannot be checked at run time.
    @field_validator("stream_options")
    @classmethod
    def _check_stream(cls, options: StreamOptions, others: Any) -> StreamOptions:
        if options.include_usage and not others.data.get("stream"):
            raise ValueError("it needs stream: true; give it too, or leave both out")
        return options

    @field_validator("response_format", "structured_outputs")
    @classmethod
    def _check_end(cls, held: Any, others: Any) -> Any:
        for name in ("ignore_eos", "min_tokens"):
            if others.data.get(name):
                raise ValueError(f"the form says where an answer ends; leave {name} out")
        return held

    @field_validator("structured_outputs")
    @classmethod
    def _check_form(cls, held: Any, others: Any) -> Any:
        if others.data.get("response_format"):
            raise ValueError("response_format means the same; give one of them")
        return held

    @field_validator("prompt_logprobs")
    @classmethod
    def _check_whole(cls, top: int, others: Any) -> int:
        if others.data.get("stream"):
            raise ValueError("a stream does not tell them; leave stream out, or prompt_logprobs")
        return top

    @field_validator("speculative_metrics")
    @classmethod
    def _check_place(cls, asked: bool, others: Any) -> bool:
        options = others.data.get("stream_options", StreamOptions())
        if asked and others.data.get("stream") and not options.include_usage:
            raise ValueError(
                'a stream tells them beside its usage; give stream_options: {"include_usage": '
                "true} too, or leave it out"
            )
        return asked

    @property
    def form(self) -> tuple[str, Grammar] | None:
        """What the answer is held to, after the field that says so; None for nothing."""
        for name in ("response_format", "structured_outputs"):
            if (held := getattr(self, name)) is not None:
                return name, held.grammar
        return None

    @property
    def top(self) -> int | None:
        """Number of the likeliest tokens to report; None for no log-probabilities at all."""
        return None


class ChatRequest(BaseRequest):
    """`/v1/chat/completions`.

    Attributes:
      messages: the conversation so far.
      max_completion_tokens: the later name of `max_tokens`.
      logprobs: tell the log-probability of every new token.
      top_logprobs: number of likeliest other tokens whose log-probabilities are told too.
      chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`.
        Not OpenAI's.
    """

    prompt_field = "messages"
    off: ClassVar[Values] = _OFF | {
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("max_completion_tokens")
    @classmethod
    def _check_limit(cls, limit: int, others: Any) -> int:
        if others.data.get("max_tokens") is not None:
            raise ValueError("max_tokens means the same; give one of them")
        return limit

    @field_validator("top_logprobs")
    @classmethod
    def _check_top(cls, top: int, others: Any) -> int:
        if top and not others.data.get("logprobs"):
            raise ValueError("it needs logprobs: true; give it too, or leave both out")
        return top

    @model_validator(mode="after")
    def _take_later_name(self) -> "ChatRequest":
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(BaseRequest):
    """`/v1/completions`.

    Attributes:
      prompt: a text, or a list of token ids, or several of either.
      max_tokens: 16 by default, as in OpenAI's API.
      echo: begin each answer with its prompt.
      logprobs: tell the log-probability of every new token, and of so many others.
    """

    prompt_field = "prompt"
    off: ClassVar[Values] = _OFF | {"add_special_tokens": (True,)}

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @field_validator("logprobs")
    @classmethod
    def _check_echo(cls, log_probs: int, others: Any) -> int:
        if others.data.get("echo"):
            raise ValueError("those of the prompt are not computed; give either echo or logprobs")
        return log_probs

    @property
    def top(self) -> int | None:
        return self.logprobs
