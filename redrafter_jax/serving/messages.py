"""What goes into an engine and what comes out."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from redrafter_jax.config import SamplingConfig
from redrafter_jax.serving.slots import Gains


class Request(NamedTuple):
    """What one row is asked for.

    Attributes:
      prompt: token ids.
      max_new_tokens: limit on what is decided.
      seed: of its noise.
      sampling: how its tokens are chosen.
      stop_tokens: that end it; None takes the engine's.
      deadline: seconds of the engine's clock, past which it ends; infinity for never.
      speculate: False lets every target call gain one token, as without a drafter.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    sampling: SamplingConfig = SamplingConfig()
    stop_tokens: tuple[int, ...] | None = None
    deadline: float = math.inf
    speculate: bool = True


class Event(NamedTuple):
    """What one `advance` decided for a request.

    Attributes:
      number: of the request, from `submit`.
      tokens: new ones, up to and including the stop token.
      log_probs: of each under the target at temperature 1 without filters.
      top_log_probs: for each the most likely tokens there, with their log-probabilities, as many as
        the engine was asked for.
      calls: how many of the tokens each target call gained, in order; prefill gains the first.
      origins: for each the name of the drafter that proposed it, None for the target's own.
      ended: "stop", "length", "cancelled" or "deadline"; None while it goes on.
    """

    number: int
    tokens: list[int]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]
    calls: list[int]
    origins: list[str | None]
    ended: str | None

    @classmethod
    def empty(cls, number: int, ended: str | None = None) -> "Event":
        """Without tokens."""
        return cls(number, [], [], [], [], [], ended)

    @classmethod
    def gained(cls, number: int, gains: Gains, at: int, names: tuple[str, ...]) -> "Event":
        """What one place of a batch gained; `names` are those of the drafter that proposed."""
        counts = np.asarray(gains.counts[at])
        kept = np.arange(gains.tokens.shape[2]) < counts[:, None]
        origins = gains.origins[at][kept].tolist()
        tops = zip(gains.top_tokens[at][kept], gains.top_log_probs[at][kept], strict=True)
        return cls(
            number,
            gains.tokens[at][kept].tolist(),
            gains.log_probs[at][kept].tolist(),
            [list(zip(*(each.tolist() for each in top), strict=True)) for top in tops],
            counts[counts > 0].tolist(),
            [None if origin < 0 else names[origin] for origin in origins],
            None,
        )

    def followed_by(self, later: "Event") -> "Event":
        """Both as one; of the later one is how it ended."""
        return Event(
            self.number,
            self.tokens + later.tokens,
            self.log_probs + later.log_probs,
            self.top_log_probs + later.top_log_probs,
            self.calls + later.calls,
            self.origins + later.origins,
            later.ended,
        )


class QueueFull(Exception):  # noqa: N818
    """As many requests wait as may.

    Args:
      message: that says so.
      seconds: until another may, at the pace at which requests have ended lately.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass
class Counters:
    """Sums over all requests since the start.

    Attributes:
      target_calls: decode steps, each counted for every row that it decoded.
      gained: tokens that they gained; over `target_calls`, it is the acceptance length.
      drafted: by drafter, nodes that it proposed.
      accepted: by drafter, how many of its tokens were accepted.
      prompt_tokens: of the requests that were admitted.
      reused_tokens: how many of these were in the cache already.
      prefill_passes: chunks that were read.
      compiled: programs that JAX has compiled in this process since `warm_up` returned.
    """

    target_calls: int = 0
    gained: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_passes: int = 0
    compiled: int = 0

    def admit(self, prompt_tokens: int, reused_tokens: int) -> None:
        """Count a request that has got its slot."""
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused_tokens

    def add(self, event: Event, drafted: dict[str, int]) -> None:
        """Count what a decode call gained a request."""
        self.target_calls += len(event.calls)
        self.gained += len(event.tokens)
        self.accepted.update(name for name in event.origins if name)
        self.drafted.update(drafted)
