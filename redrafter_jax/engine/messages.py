"""What goes into an engine and what comes out."""

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from redrafter_jax.config import SamplingConfig
from redrafter_jax.engine.gains import Gains, Scores
from redrafter_jax.text.grammars import CompiledGrammar
from redrafter_jax.types import GRAMMAR

_COMPILED = "/jax/core/compile/backend_compile_duration"
# Stop tokens, or strings, that a request may have beside the engine's.
OWN_STOPS = 4


class Request(NamedTuple):
    """What one row is asked for.

    Attributes:
      prompt: token ids.
      max_new_tokens: limit on what is decided.
      seed: of its noise.
      sampling: how its tokens are chosen.
      stop_tokens: that end it; None takes the engine's. There may be `OWN_STOPS` more than those,
        rounded up to a multiple of 8.
      deadline: seconds of the engine's clock, past which it ends; infinity for never.
      speculate: False lets every target call gain one token, as without a drafter.
      scores_prompt: whether the log-probabilities of the prompt's own tokens are told; it is then
        read whole, whatever the cache holds of it.
      grammar: what its text is held to; its end tokens must end the request. None for anything.
      priority: requests with a lower one come first, whenever they came.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    sampling: SamplingConfig = SamplingConfig()
    stop_tokens: tuple[int, ...] | None = None
    deadline: float = math.inf
    speculate: bool = True
    scores_prompt: bool = False
    grammar: CompiledGrammar | None = None
    priority: int = 0


class Token(NamedTuple):
    """A decided token.

    Attributes:
      id: number in the vocabulary.
      call: number of the target call that decided it, counted from 0, which read the prompt.
      origin: what proposed it; None for the target's own.
      log_prob: log-probability under the target at temperature 1 without filters; NaN where the
        engine was not asked for it.
      top: the most likely tokens there and their log-probabilities, best first, as many as the
        engine was asked for.
      text: that it released, once it is decoded: the texts of all tokens are the answer's.
      raw: its own bytes in the answer, which may be parts of a character: those of all tokens are
        the answer's, up to a stop string.
    """

    id: int
    call: int
    origin: str | None
    log_prob: float = math.nan
    top: Sequence[tuple[int, float]] = ()
    text: str = ""
    raw: bytes = b""


class PromptToken(NamedTuple):
    """A token of a prompt, from its second one on.

    Attributes:
      id: number in the vocabulary.
      log_prob: log-probability under the target, as a token's.
      rank: how many tokens are as likely there, itself included; 1 for the likeliest.
      top: the most likely tokens there, as a token's.
    """

    id: int
    log_prob: float
    rank: int
    top: Sequence[tuple[int, float]] = ()


def prompt_tokens(scores: Scores, at: int, tokens: Sequence[int]) -> list[PromptToken]:
    """What the scores of a chunk, at one place of a pass, say of the tokens that follow its own."""
    assert scores.ranks is not None
    leaves = (scores.chosen, scores.ranks, scores.top_tokens, scores.top)
    columns = (leaf[at][: len(tokens)].tolist() for leaf in leaves)
    return [
        PromptToken(id, log_prob, rank, list(zip(tops, log_probs, strict=True)))
        for id, log_prob, rank, tops, log_probs in zip(tokens, *columns, strict=True)
    ]


def new_tokens(gains: Gains, at: int, sources: tuple[str, ...], first: int) -> list[Token]:
    """What one place of a batch gained from call `first` on; `sources` are named as `SOURCES`."""
    kept = np.arange(gains.tokens.shape[2]) < np.asarray(gains.counts[at])[:, None]
    # A row that is done stays so: the calls that gain nothing come last.
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
    """What was proposed to one target call of a request.

    Attributes:
      call: number of the call, as `Token` counts them.
      nodes: by drafter, live nodes of the tree below its root.
    """

    call: int
    nodes: dict[str, int]


def new_drafts(gains: Gains, at: int, sources: tuple[str, ...], first: int) -> list[Draft]:
    """What was drafted for one place of a batch, as `new_tokens` counts its calls."""
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
    """What one `advance` decided for a request.

    Attributes:
      number: of the request, from `submit`.
      decided: new tokens, up to and including the stop token.
      ended: "stop", "length", "cancelled", "deadline" or, where the target's scores were not
        numbers, "not numbers", or where the grammar's library has given up, "grammar"; None while
        it goes on.
      drafted: what was proposed to the target calls that decided them; a call without proposals
        has no entry.
      prompt: with the first tokens, those of the prompt, where the request asks for their scores.
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
      steps: decode steps.
      target_calls: decode steps, each counted for every row that it decoded.
      gained: tokens that they gained; over `target_calls`, it is the acceptance length.
      drafted_calls: how many of the target calls had a draft to verify.
      drafted: by drafter, nodes that it proposed.
      accepted: by drafter, how many of its tokens were accepted.
      accepted_at: by depth in the tree, from 1 on, how many drafted tokens were accepted there.
      prompt_tokens: of the requests that were admitted.
      reused_tokens: how many of these were in the cache already.
      prefill_passes: chunks that were read.
      compiled: programs that JAX has compiled in this process since `warm_up` returned.
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
        """Count what target calls gained a request, and what was drafted for it."""
        self.target_calls += calls
        self.gained += len(decided)
        self.drafted_calls += len(drafted)
        for draft in drafted:
            for name, nodes in draft.nodes.items():
                self.drafted[name] += nodes
        call, depth = None, 0
        for token in decided:
            # What a call accepted is a path from a child of the root on.
            depth = depth + 1 if token.call == call else 1
            call = token.call
            if token.origin:
                self.accepted[token.origin] += 1
                self.accepted_at[depth] += 1

    def count_compilations(self, owner: object) -> None:
        """Count what JAX compiles in this process from now on, while the owner lives."""

        def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
            del duration_secs, kwargs
            self.compiled += event == _COMPILED

        jax.monitoring.register_event_duration_secs_listener(count)
        weakref.finalize(owner, jax.monitoring.unregister_event_duration_listener, count)


@dataclass
class MirrorCounts:
    """How often the drafter was asked, and whether a tree was ready.

    Attributes:
      steps: target calls of the whole batch.
      ahead: drafter calls beside the target's second part, one in each step.
      now: drafter calls for which the target waited.
      outcomes: steps of rows that go on after them.
      prepared: of these, those whose next tree had been drafted ahead.
    """

    steps: int = 0
    ahead: int = 0
    now: int = 0
    outcomes: int = 0
    prepared: int = 0

    @property
    def fallback_rate(self) -> float:
        """Share of the outcomes for which no tree was ready; 0 where there were none."""
        return 1 - self.prepared / self.outcomes if self.outcomes else 0.0
