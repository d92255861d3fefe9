"""What answers requests, as its parts share it."""

from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.serving.metrics import Metrics
from redrafter_jax.serving.worker import Worker
from redrafter_jax.text.chat_template import ChatTemplate, Turn


class Model(NamedTuple):
    """What is served, besides the engine.

    Attributes:
      name: what clients call it.
      fingerprint: of all that decides a text besides the request.
      tokenizer: the target's.
      template: how conversations become text.
      opening: turns that come before those of a request without a system turn of its own.
      stop_tokens: that end every answer.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    template: ChatTemplate
    opening: list[Turn]
    stop_tokens: tuple[int, ...]


class Limits(NamedTuple):
    """On requests.

    Attributes:
      context_length: tokens that a prompt and its answer may come to.
      choices: of one request.
      log_probs: likeliest tokens that are told beside a decided one.
      body: bytes.
      deadline: seconds that a request may take; infinity for any.
      drain: seconds that running answers may take once the server shall end.
    """

    context_length: int
    choices: int
    log_probs: int
    body: int
    deadline: float
    drain: float


class Service(NamedTuple):
    """All that answers requests.

    Attributes:
      worker: that decodes.
      model: what is served.
      limits: on requests.
      read_token: how a token reads within a text.
      metrics: what is counted.
    """

    worker: Worker
    model: Model
    limits: Limits
    read_token: Callable[[int], str]
    metrics: Metrics
