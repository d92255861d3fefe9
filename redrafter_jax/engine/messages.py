"""The requests that an engine takes, and the events that it returns."""

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from redrafter_jax.config import SamplingConfig
from redrafter_jax.engine.gains import Gains, Scores
from redrafter_jax.types import GRAMMAR

if TYPE_CHECKING:
    from redrafter_jax.text.grammars import CompiledGrammar

_COMPILED = "/jax/core/compile/backend_compile_duration"
# Number of stop tokens, or of stop strings, that a request may add to the defaults of the engine.
OWN_STOPS = 4


class Request(NamedTuple):
    """A request to continue one prompt, for `Engine.submit`.

    Attributes:
      prompt: token ids.
      max_new_tokens: maximum number of new tokens.
      seed: random seed of the row.
      sampling: sampling settings.
      stop_tokens: tokens that end the row; None uses the engine's stop tokens. A request may have
        up to `Engine.stop_width` stop tokens: at least `OWN_STOPS` more than the engine.
      deadline: time in seconds on the engine's clock at which the request ends; infinity for no
        deadline.
      speculate: whether to draft; if False, every target call gains one token.
      scores_prompt: whether to report the log-probabilities of the prompt's tokens. If True, the
        whole prompt is read, even the part that the cache already holds.
      grammar: constraint on the text; None for no constraint. The grammar's `end_tokens` must be
        among the stop tokens.
      priority: requests with a lower number get slots first, whatever the order of submission.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    sampling: SamplingConfig = SamplingConfig()
    stop_tokens: tuple[int, ...] | None = None
    deadline: float = math.inf
    speculate: bool = True
    scores_prompt: bool = False
    grammar: "CompiledGrammar | None" = None
    priority: int = 0


class Token(NamedTuple):
    """A new token of a request.

    Attributes:
      id: token id.
      call: index of the target call that chose the token; call 0 reads the end of the prompt.
      origin: name of the source that proposed the token, such as "recurrent" or "lookup"; None for
        the last token of each call, which counts as the target's.
      log_prob: log-probability under the target at temperature 1 without filters; NaN if the engine
        reports none.
      top: the most likely tokens at this position and their log-probabilities, best first; their
        number is the engine's `top_log_probs`.
      text: text that this token adds to the answer; "" if tokens are not decoded, or until a
        character is complete.
      raw: bytes that this token adds to the answer, possibly a part of a character. The bytes of
        all tokens together are the answer up to a stop string.
    """

    id: int
    call: int
    origin: str | None
    log_prob: float = math.nan
    top: Sequence[tuple[int, float]] = ()
    text: str = ""
    raw: bytes = b""


class PromptToken(NamedTuple):
    """A token of a prompt, other than the first.

    Attributes:
      id: token id.
      log_prob: log-probability under the target, as in `Token`.
      rank: number of tokens that are at least as likely at this position, this token included: 1
        for the most likely token.
      top: the most likely tokens at this position, as in `Token`.
    """

    id: int
    log_prob: float
    rank: int
    top: Sequence[tuple[int, float]] = ()


def prompt_tokens(scores: Scores, at: int, tokens: Sequence[int]) -> list[PromptToken]:
    """Build the `PromptToken`s of a chunk of a prompt.

    Args:
      scores: log-probabilities from a prefill pass.
      at: index of the chunk in the pass.
      tokens: the tokens that follow the tokens of the chunk.
    """
    assert scores.ranks is not None
    leaves = (scores.chosen, scores.ranks, scores.top_tokens, scores.top)
    columns = (leaf[at][: len(tokens)].tolist() for leaf in leaves)
    return [
        PromptToken(id, log_prob, rank, list(zip(tops, log_probs, strict=True)))
        for id, log_prob, rank, tops, log_probs in zip(tokens, *columns, strict=True)
    ]


def new_tokens(gains: Gains, at: int, sources: tuple[str, ...], first: int) -> list[Token]:
    """Build the `Token`s that one row of a batch gained.

    Args:
      gains: gains of all rows of the batch.
      at: index of the row in the batch.
      sources: names of the sources, in the order of `SOURCES`.
      first: index of the first of these target calls in the request, from 0.
    """
    kept = np.arange(gains.tokens.shape[2]) < np.asarray(gains.counts[at])[:, None]
    # A done row stays done, so the calls that gain nothing come last.
    calls = (first + np.nonzero(kept)[0]).tolist()
    origins: list[str | None] = [
        (*sources, GRAMMAR)[by] if by >= 0 else None for by in gains.origins[at][kept].tolist()
    ]
    tokens = gains.tokens[at][kept].tolist()
    if gains.scores is None:
        return list(map(Token, tokens, calls, origins))
    chosen, top_tokens, top = (leaf[at][kept].tolist() for leaf in gains.scores[:3])
    return [
        Token(id, call, origin, log_prob, list(zip(tops, scores, strict=True)))
        for id, call, origin, log_prob, tops, scores in zip(
            tokens, calls, origins, chosen, top_tokens, top, strict=True
        )
    ]


class Draft(NamedTuple):
    """Counts of drafted nodes for one target call of a request.

    Attributes:
      call: index of the call, as in `Token`.
      nodes: number of proposed nodes by source, without root and padding.
    """

    call: int
    nodes: dict[str, int]


def new_drafts(gains: Gains, at: int, sources: tuple[str, ...], first: int) -> list[Draft]:
    """Count the drafted nodes of one row of a batch, by target call; see `new_tokens`."""
    calls = np.count_nonzero(gains.counts[at])  # the first ones, as in `new_tokens`
    drafts = []
    for call, counts in enumerate(gains.drafted[at][:calls].tolist()):
        if any(counts):
            names = (*sources, GRAMMAR)[: len(counts)]
            nodes = dict.fromkeys(names, 0)
            for name, count in zip(names, counts, strict=True):
                nodes[name] += count  # two sources may have one name
            drafts.append(Draft(first + call, nodes))
    return drafts


class Event(NamedTuple):
    """The results of one `advance` for a request.

    Attributes:
      number: the request's number, from `submit`.
      decided: new tokens, up to and including the stop token.
      ended: the reason why the request ended: "stop", "length", "cancelled", "deadline", "not
        numbers" (the target's scores are NaN or infinite) or "grammar" (the grammar's library
        failed). None while the request goes on.
      drafted: counts of drafted nodes, one entry per target call; calls without drafts have no
        entry.
      prompt: the prompt's tokens with their log-probabilities, if these were requested. They come
        with the first new tokens.
    """

    number: int
    decided: list[Token]
    ended: str | None = None
    drafted: Sequence[Draft] = ()
    prompt: Sequence[PromptToken] = ()

    @property
    def tokens(self) -> list[int]:
        """Ids of the new tokens."""
        return [token.id for token in self.decided]


class QueueFull(Exception):  # noqa: N818
    """The error for a request that is refused because the queue is full.

    Args:
      message: the text of the error.
      seconds: estimated seconds until the queue has room: the mean time between the ends of recent
        requests.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass
class Counters:
    """Totals over all requests since the engine was made.

    Attributes:
      steps: number of decode steps.
      target_calls: number of rows decoded by each step, summed over all steps.
      gained: number of tokens gained in these steps; `gained / target_calls` is the acceptance
        length.
      drafted_calls: number of these target calls that had drafted tokens to verify.
      drafted: number of proposed nodes by source.
      accepted: number of accepted tokens by source.
      accepted_at: number of accepted drafted tokens by depth in the tree, from 1 on.
      prompt_tokens: number of prompt tokens of all requests that have got a slot.
      reused_tokens: number of the `prompt_tokens` that were already in the cache.
      prefill_passes: number of prefill passes; a pass reads one chunk of each of its prompts.
      compiled: number of programs that JAX has compiled in this process since `warm_up`; 0 without
        a call of `warm_up`.
    """

    steps: int = 0
    target_calls: int = 0
    gained: int = 0
    drafted_calls: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_passes: int = 0
    compiled: int = 0

    def add(self, decided: Sequence[Token], calls: int, drafted: Sequence[Draft]) -> None:
        """Add the results of some target calls of one request.

        Args:
          decided: the new tokens.
          calls: number of target calls.
          drafted: the drafts of these calls.
        """
        self.target_calls += calls
        self.gained += len(decided)
        self.drafted_calls += len(drafted)
        for draft in drafted:
            for name, nodes in draft.nodes.items():
                self.drafted[name] += nodes
        call, depth = None, 0
        for token in decided:
            # The tokens of a call are a path that starts at a child of the root.
            depth = depth + 1 if token.call == call else 1
            call = token.call
            if token.origin:
                self.accepted[token.origin] += 1
                self.accepted_at[depth] += 1

    def count_compilations(self, owner: object) -> None:
        """Count JAX's compilations in this process from now on, until `owner` is deleted."""

        def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
            del duration_secs, kwargs
            self.compiled += event == _COMPILED

        jax.monitoring.register_event_duration_secs_listener(count)
        weakref.finalize(owner, jax.monitoring.unregister_event_duration_listener, count)


@dataclass
class MirrorCounts:
    """Counts of mirror decoding: calls of the drafter, and how often a tree was ready in time.

    Attributes:
      steps: number of target calls of the whole batch; the drafter drafts ahead once during each.
      now: number of drafter calls that the target had to wait for.
      outcomes: number of (step, row) pairs in which the row needs a tree for the next step.
      ranks: number of `outcomes` whose next tree had been drafted ahead, by rank: the place, from
        0, of the target's choice among the guesses after the last accepted node.
    """

    steps: int = 0
    now: int = 0
    outcomes: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    @property
    def prepared(self) -> int:
        """Number of `outcomes` whose next tree had been drafted ahead."""
        return self.ranks.total()

    @property
    def fallback_rate(self) -> float:
        """Fraction of `outcomes` for which no tree was ready; 0 if there were none."""
        return 1 - self.prepared / self.outcomes if self.outcomes else 0.0
