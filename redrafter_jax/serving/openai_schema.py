"""Requests of OpenAI's API; an undeclared field is refused, and the error names the field."""

from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from redrafter_jax.config import Grammar
from redrafter_jax.serving.decoding_fields import DecodingFields
from redrafter_jax.serving.openai_fields import Fields, Values, whole_text
from redrafter_jax.serving.openai_forms import ResponseFormat, StructuredOutputs
from redrafter_jax.serving.openai_messages import Message, NamedTool, Tool
from redrafter_jax.serving.required_call import call_grammar

_OFF: Values = {
    **DecodingFields.off,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


def _as_prompts(value: Any) -> list[Any]:
    """Return a list of prompts, each a text or token ids, from one prompt or several."""
    prompts = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not (isinstance(prompts, list) and prompts) or not all(
        isinstance(prompt, str) or _are_tokens(prompt) for prompt in prompts
    ):
        raise ValueError(
            "give a text, a list of token ids, or a list of several texts or lists of token ids; "
            "none may be empty"
        )
    return [whole_text(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _are_tokens(value: Any) -> bool:
    tokens = isinstance(value, list) and bool(value)
    return tokens and all(type(token) is int and 0 <= token < 2**31 for token in value)


class StreamOptions(Fields):
    """Options for what a stream returns besides the answer.

    Attributes:
      include_usage: whether the last chunk holds the counts of tokens.
    """

    off: ClassVar[Values] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class BaseRequest(DecodingFields):
    """The fields that chat and completion requests share. Extensions are not in OpenAI's API.

    Attributes:
      prompt_field: name of the field that holds the prompts, for errors.
      response_format: form that the answer must have.
      structured_outputs: form that the answer must have, as in vLLM. An extension.
      prompt_logprobs: number of likeliest tokens to return at every position of the prompt. Their
        log-probabilities and that of the prompt's own token are returned; None returns none. An
        extension.
      n: number of choices (answers) for each prompt.
      max_tokens: limit on new tokens; None for all tokens that fit.
      stream_options: what a stream returns besides the answer.
      draft_trace: whether to return, for every token, the target call that decided it and the
        drafter that proposed it. An extension.
      speculative_metrics: whether to return how many drafted tokens were accepted. An extension.
    """

    off: ClassVar[Values] = _OFF
    prompt_field: ClassVar[str]

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    draft_trace: bool = False
    speculative_metrics: bool = False

    # Called for a field that is given. The fields above it are in `others.data`, a ValidationInfo,
    # whose protocol cannot be checked at run time.
    @field_validator("stream_options")
    @classmethod
    def _check_stream(cls, options: StreamOptions, others: Any) -> StreamOptions:
        if options.include_usage and not others.data.get("stream"):
            raise ValueError("include_usage needs stream: true; give both, or leave both out")
        return options

    @field_validator("response_format", "structured_outputs")
    @classmethod
    def _check_end(cls, held: Any, others: Any) -> Any:
        for name in ("ignore_eos", "min_tokens"):
            if others.data.get(name):
                raise ValueError(f"the form decides where an answer ends; leave {name} out")
        return held

    @field_validator("structured_outputs")
    @classmethod
    def _check_form(cls, held: Any, others: Any) -> Any:
        if others.data.get("response_format"):
            raise ValueError(
                "response_format also sets the form of the answer; give only one of the two"
            )
        return held

    @field_validator("prompt_logprobs")
    @classmethod
    def _check_whole(cls, top: int, others: Any) -> int:
        if others.data.get("stream"):
            raise ValueError("a stream cannot hold them; leave out stream or prompt_logprobs")
        return top

    @field_validator("speculative_metrics")
    @classmethod
    def _check_place(cls, asked: bool, others: Any) -> bool:
        options = others.data.get("stream_options", StreamOptions())
        if asked and others.data.get("stream") and not options.include_usage:
            raise ValueError(
                'in a stream they come with the usage; give stream_options: {"include_usage": '
                "true} too, or leave speculative_metrics out"
            )
        return asked

    @property
    def form(self) -> tuple[str, Grammar] | None:
        """The name and the grammar of the field that constrains the answer; None without one."""
        for name in ("response_format", "structured_outputs"):
            if (held := getattr(self, name)) is not None:
                return name, held.grammar
        return None

    @property
    def top(self) -> int | None:
        """The number of likeliest tokens to report; None if no log-probabilities are requested."""
        return None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        return []


class ChatRequest(BaseRequest):
    """The body of `/v1/chat/completions`.

    Attributes:
      messages: the conversation so far.
      max_completion_tokens: newer name of `max_tokens` in OpenAI's API.
      logprobs: whether to return the log-probability of every new token.
      top_logprobs: number of likeliest tokens whose log-probabilities are returned with every new
        token.
      chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`. An
        extension.
      tools: tools that the answer may call.
      tool_choice: "auto" lets the target choose, "none" hides the tools, "required" makes the
        target call one of the tools, and a `NamedTool` makes the target call that tool.
      parallel_tool_calls: whether an answer may hold more than one call.
    """

    prompt_field = "messages"
    off: ClassVar[Values] = {
        **_OFF,
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
    tools: list[Tool] = []
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool, Field(validate_default=True)
    ] = "auto"
    parallel_tool_calls: bool = True

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: list[Tool]) -> list[Tool]:
        counts = Counter(tool.function.name for tool in tools)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two tools have the name {twice[0]!r}; give each tool its own name")
        for function in (tool.function for tool in tools):
            kind = (function.parameters or {}).get("type", "object")
            if kind != "object":
                raise ValueError(
                    f"the parameters of {function.name!r} have the type {kind!r:.80}; arguments "
                    'are an object, so give "type": "object"'
                )
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: Any, others: Any) -> Any:
        names = [tool.function.name for tool in others.data.get("tools", [])]
        if choice == "required" and not names:
            raise ValueError("it needs tools; give them too, or leave it out")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(
                f"{choice.function.name!r:.80} is not among the tools; name one of the tools"
            )
        for name in ("response_format", "structured_outputs", "ignore_eos", "min_tokens"):
            if choice not in ("auto", "none") and others.data.get(name):
                raise ValueError(f"the answer must be a call of a tool; leave {name} out")
        for name in ("response_format", "structured_outputs"):
            if choice == "auto" and names and others.data.get(name):
                raise ValueError(
                    f"the answer must have the form of {name}, so it cannot call a tool; give "
                    f'tool_choice: "none", or leave {name} out'
                )
        return choice

    @field_validator("max_completion_tokens")
    @classmethod
    def _check_limit(cls, limit: int, others: Any) -> int:
        if others.data.get("max_tokens") is not None:
            raise ValueError("max_tokens sets the same limit; give only one of the two")
        return limit

    @field_validator("top_logprobs")
    @classmethod
    def _check_top(cls, top: int, others: Any) -> int:
        if top and not others.data.get("logprobs"):
            raise ValueError("it needs logprobs: true; give both, or leave both out")
        return top

    @property
    def offered(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def required(self) -> list[Tool]:
        """The tools of which the answer must call one; empty if no call is required."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return self.tools if choice == "required" else []

    @property
    def form(self) -> tuple[str, Grammar] | None:
        return ("tool_choice", call_grammar(self.required)) if self.required else super().form

    @model_validator(mode="after")
    def _take_later_name(self) -> "ChatRequest":
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(BaseRequest):
    """The body of `/v1/completions`.

    Attributes:
      prompt: a text or a list of token ids, or a list of several of these.
      max_tokens: limit on new tokens; 16 by default, as in OpenAI's API.
      echo: whether each answer begins with its prompt.
      logprobs: number of likeliest tokens whose log-probabilities are returned with every new
        token.
    """

    prompt_field = "prompt"
    labels: ClassVar[frozenset[str]] = DecodingFields.labels | {"parallel_tool_calls"}
    off: ClassVar[Values] = {
        **_OFF,
        "add_special_tokens": (True,),
        "tool_choice": ("none", "auto"),
    }

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @field_validator("logprobs")
    @classmethod
    def _check_echo(cls, log_probs: int, others: Any) -> int:
        if others.data.get("echo"):
            raise ValueError(
                "with echo, an answer would need the log-probabilities of the prompt, and these "
                "are not computed; give either echo or logprobs"
            )
        return log_probs

    @property
    def top(self) -> int | None:
        return self.logprobs
