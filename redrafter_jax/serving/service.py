"""The parts of a server that answer requests, as routes and jobs share them."""

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
    """The served model, as clients know it.

    Attributes:
      name: the name that clients give.
      fingerprint: digest of all that decides a text besides the request.
      format: how conversations become tokens, and what ends an answer.
      context_length: tokens that a prompt and its answer may come to.
      tools: how its answers call tools; None where that is not known.
    """

    name: str
    fingerprint: str
    format: PromptFormat
    context_length: int
    tools: ToolFormat | None = None


class Service(NamedTuple):
    """A server's parts.

    Attributes:
      worker: the thread that decodes.
      model: the model that it serves.
      limits: limits on requests.
      spell: the spelling of a token within a text.
      metrics: its counters.
      grammars: what makes grammars over the model's tokens.
      draft_depth: drafted tokens that one target call may accept; 0 where nothing is drafted.
    """

    worker: Worker
    model: ServedModel
    limits: ServeConfig
    spell: Callable[[int], Spelling]
    metrics: Metrics
    grammars: GrammarCompiler
    draft_depth: int
