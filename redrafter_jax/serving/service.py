"""What answers requests, as its parts share it."""

from collections.abc import Callable
from typing import NamedTuple

from redrafter_jax.config import ServeConfig
from redrafter_jax.serving.choices import Spelling
from redrafter_jax.serving.metrics import Metrics
from redrafter_jax.serving.worker import Worker
from redrafter_jax.text.chat_template import PromptFormat


class ServedModel(NamedTuple):
    """What is served, besides the engine.

    Attributes:
      name: what clients call it.
      fingerprint: of all that decides a text besides the request.
      format: how conversations become tokens, and what ends an answer.
      context_length: tokens that a prompt and its answer may come to.
    """

    name: str
    fingerprint: str
    format: PromptFormat
    context_length: int


class Service(NamedTuple):
    """All that answers requests.

    Attributes:
      worker: that decodes.
      model: what is served.
      limits: on requests.
      spell: how a token reads within a text.
      metrics: what is counted.
    """

    worker: Worker
    model: ServedModel
    limits: ServeConfig
    spell: Callable[[int], Spelling]
    metrics: Metrics
