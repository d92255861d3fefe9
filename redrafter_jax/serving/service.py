"""The parts of a server that routes and jobs share."""

from collections.abc import Callable
from typing import NamedTuple

from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.serving.choices import Spelling
from redrafter_jax.serving.metrics import Metrics
from redrafter_jax.serving.worker import Worker
from redrafter_jax.text.chat_template import PromptFormat
from redrafter_jax.text.grammars import GrammarCompiler
from redrafter_jax.text.tool_styles import ToolFormat


class ServedModel(NamedTuple):
    """The served model, as clients see it.

    Attributes:
      name: name by which clients ask for the model.
      fingerprint: digest of everything, besides the request, that affects the text.
      format: the tokenizer, the chat template, and what ends an answer.
      context_length: limit on the tokens of a prompt and its answer.
      tools: the format of tool calls in answers; None if it is unknown.
    """

    name: str
    fingerprint: str
    format: PromptFormat
    context_length: int
    tools: ToolFormat | None = None


class Service(NamedTuple):
    """The parts of a server.

    Attributes:
      worker: thread that runs the engine.
      model: the served model.
      limits: limits on requests.
      spell: the function from a token id to its spelling within a text.
      metrics: the server's metrics.
      grammars: the compiler of grammars for the model's tokens.
      draft_depth: maximum number of drafted tokens that a target call can accept; 0 without a
        drafter.
    """

    worker: Worker
    model: ServedModel
    limits: ServeConfig
    spell: Callable[[int], Spelling]
    metrics: Metrics
    grammars: GrammarCompiler
    draft_depth: int
