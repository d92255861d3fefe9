"""Streaming generation: tokens and text every few decode steps, and stop strings.

This module runs on the host, which matches stop strings between decode steps.
"""

import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from redrafter_jax.config import Grammar, MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request, Token
from redrafter_jax.engine.requests import (
    Batch,
    PerRow,
    Prompts,
    StopTokens,
    check_batch,
    check_size,
    lists_of_rows,
    stop_lists,
    tokenize,
)
from redrafter_jax.engine.trees import bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.generation import Generation, collect, engine_of, refuse_failure
from redrafter_jax.models.target import Target
from redrafter_jax.text.tokenizer import Detokenize, TextStream

if TYPE_CHECKING:
    from redrafter_jax.text.grammars import CompiledGrammar


@dataclass(frozen=True)
class Update:
    """The progress of a stream since its last update.

    Attributes:
      tokens: per row, the new tokens since the last update.
      texts: per row, the new text since the last update; "" without `tokenizer` and `detokenize`.
        Incomplete characters are held back until they are complete. Text that may begin a stop
        string is held back until this is certain.
      stopped: per row, whether a stop string has ended the row.
      pieces: per row, the new tokens as `Token` records, each with its text, its source and its
        target call; empty without `tokenizer` and `detokenize`.
    """

    tokens: list[list[int]]
    texts: list[str]
    stopped: list[bool]
    pieces: list[list[Token]]
    _engine: Engine = field(repr=False)
    _rows: Sequence[Sequence[Token]] = field(repr=False)
    _counts: Sequence[int] = field(repr=False)
    _whole_texts: list[str] | None = field(repr=False)
    _log_probs: bool = field(repr=False)

    @cached_property
    def generation(self) -> Generation:
        """The whole stream up to this update, as `generate` returns it."""
        rows = [row[:count] for row, count in zip(self._rows, self._counts, strict=True)]
        collected = collect(self._engine, rows, self._log_probs)
        return collected._replace(texts=self._whole_texts)


class KeptCache:
    """A cache that consecutive streams share, so that a longer prompt prefills only its new part.

    Pass the same `KeptCache` to every stream of a conversation, one stream at a time. A new prompt
    reuses the prefix that it shares with an earlier text, in whole pages of 64 tokens. This works
    for any prompt, and also after a stream that was closed early. A `KeptCache` serves one target
    and one number of prompts.

    Args:
      context_length: maximum number of tokens of a text, prompt included; it sets the size of the
        cache.

    Raises:
      InputError: `context_length` is not an integer, or is below 1.
    """

    def __init__(self, context_length: int) -> None:
        check_size(context_length, "context_length")
        self._context_length = context_length
        self._engine: Engine | None = None
        self._made_for: tuple[Any, ...] = ()

    def engine_for(
        self,
        target: Target,
        drafter: Drafter,
        requests: Sequence[Request],
        tree: TreeConfig | TreeTable | None,
        adaptive: bool | None,
        log_probs: bool,
        mirror: MirrorConfig | None = None,
    ) -> Engine:
        """Return the engine of earlier streams, or a new engine if a setting has changed.

        The arguments are those of `engine_of`.

        Raises:
          InputError: the cache belongs to another target, has another number of rows, or is too
            small.
        """
        kept = self._engine
        if kept is not None and not _same_weights(kept.target, target):
            raise InputError(
                "kept_cache belongs to another target; make a new KeptCache for this target."
            )
        if kept is not None and kept.slots != len(requests):
            raise InputError(
                f"kept_cache has {kept.slots} rows, but there are {len(requests)} prompts; make a "
                "new KeptCache for another number of prompts."
            )
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        if longest > self._context_length:
            raise InputError(
                f"A text may have {longest} tokens, prompt included, but kept_cache has room for "
                f"{self._context_length}; lower max_new_tokens, or give KeptCache a larger "
                "context_length."
            )
        stops = max(len(request.stop_tokens or ()) for request in requests)
        made_for = (jax.tree.leaves(drafter), type(drafter), tree, adaptive, log_probs, mirror)
        fits = kept is not None and kept.intact and kept.stop_width >= stops
        if kept is None or not fits or not _same(self._made_for, made_for):
            settings = tree, adaptive, log_probs, mirror, self._context_length
            kept = engine_of(target, drafter, requests, *settings)
        kept.cancel_all()
        self._engine, self._made_for = kept, made_for
        return kept


def stream(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: PerRow[int],
    tree: TreeConfig | TreeTable | None = None,
    adaptive: bool | None = None,
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
    steps_per_yield: int = 1,
    detokenize: Detokenize | None = None,
    stop_strings: Sequence[str] | Sequence[Sequence[str]] = (),
    kept_cache: KeptCache | None = None,
    grammars: "PerRow[Grammar | CompiledGrammar | None] | None" = None,
    tokenizer: Any = None,
    mirror: MirrorConfig | None = None,
) -> Generator[Update]:
    """Decode as `generate` does, and yield an `Update` every `steps_per_yield` decode steps.

    The first update holds the first new token of each row, which prefill chooses. Closing the
    iterator frees the memory of the stream. Stop tokens and stop strings are not part of a row's
    text. A row ends when its text contains a stop string: the text is cut before the string. Tokens
    after the token that completes the string are dropped, and are not counted.

    Args:
      target: target, as in `generate`.
      drafter: drafter, as in `generate`.
      prompts: prompts, as in `generate`.
      max_new_tokens: maximum number of new tokens, as in `generate`.
      tree: shape of the drafted trees, as in `generate`.
      adaptive: whether to decode without drafting while drafting makes decoding slower, as in
        `generate`.
      sampling: sampling settings, as in `generate`.
      seeds: random seeds, as in `generate`.
      eos_token_ids: stop tokens, as in `generate`.
      log_probs: whether to return log-probabilities, as in `generate`.
      steps_per_yield: number of decode steps between two updates.
      detokenize: function from token ids to text; the text of a token must not depend on the
        tokens after it (no clean-up of spaces). None uses the tokenizer's `decode`.
      stop_strings: strings that end a row: one list for all rows, or one per row. They need
        `tokenizer` or `detokenize`.
      kept_cache: cache to share with earlier and later streams; None uses a new cache.
      grammars: constraint on the new text, as in `generate`.
      tokenizer: tokenizer, as in `generate`.
      mirror: settings of mirror decoding, as in `generate`.

    Raises:
      InputError: the errors of `generate`; a stop string is empty, or is given without `tokenizer`
        and `detokenize`; the kept cache is too small, or is for another target or another number of
        prompts. Errors are raised by the first `next`, not by the call.
    """
    check_size(steps_per_yield, "steps_per_yield")
    bound, _ = bind_models(target, drafter, tree)
    asked = tokenize(target.config, prompts, tokenizer, eos_token_ids)
    prompts, detokenize = asked.prompts, detokenize or asked.decode
    stops = _stop_strings(stop_strings, len(prompts), detokenize)
    if not isinstance(kept_cache, KeptCache | None):
        raise InputError(
            f"kept_cache is {kept_cache!r:.40}; give a KeptCache, or leave kept_cache out."
        )
    batch = Batch(prompts, max_new_tokens, sampling, seeds, asked.eos_token_ids)
    make = kept_cache.engine_for if kept_cache else engine_of
    requests = check_batch(target.config, batch)
    if grammars is not None:
        from redrafter_jax.engine.constrained import hold

        requests = hold(target.config, requests, grammars, tokenizer)
    engine = make(target, bound, requests, tree, adaptive, log_probs, mirror)
    ends = stop_lists(target.config, asked.eos_token_ids, len(prompts))
    rows = [
        _Row(
            TextStream(detokenize, one.prompt, stop, one.sampling.min_tokens)
            if detokenize
            else None,
            end_tokens,
        )
        for one, stop, (_, end_tokens) in zip(requests, stops, ends, strict=True)
    ]
    engine.steps_per_call = steps_per_yield
    places = {engine.submit(request): row for row, request in enumerate(requests)}
    steps = 0  # the first update is that of prefill
    try:
        while engine.busy:
            fresh, texts = [list[int]() for _ in rows], [""] * len(rows)
            pieces = [list[Token]() for _ in rows]
            for event in engine.advance(passes=None, steps=steps):
                refuse_failure(target, event)
                row = places[event.number]
                pieces[row] = rows[row].push(event.decided, event.ended is not None)
                fresh[row] = [token.id for token in pieces[row]]
                texts[row] = "".join(token.text for token in pieces[row])
                if rows[row].stopped:
                    engine.cancel(event.number)
            steps = steps_per_yield
            yield Update(
                fresh,
                texts,
                [row.stopped for row in rows],
                pieces if detokenize else [[] for _ in rows],
                engine,
                [row.tokens for row in rows],
                [len(row.tokens) for row in rows],
                [row.shown for row in rows] if detokenize else None,
                log_probs,
            )
    finally:
        engine.cancel_all()


def _same_weights(one: Target, other: Target) -> bool:
    """Whether two targets share their arrays; two loads of the same folder do not."""
    ours, theirs = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether an engine that was made with the settings `before` fits the settings `now`.

    The first entry of each holds the drafter's arrays, which must be the same objects. All other
    entries must be equal.
    """
    if not before:
        return False
    (leaves, *stated), (own_leaves, *own_stated) = before, now
    same_leaves = len(leaves) == len(own_leaves) and all(map(operator.is_, leaves, own_leaves))
    return same_leaves and stated == own_stated


class _Row:
    """The tokens and text that a row has released, up to the token that completes a stop string."""

    def __init__(self, text: TextStream | None, end_tokens: Sequence[int]) -> None:
        self.tokens: list[Token] = []
        self.stopped = False
        self.shown = ""
        self._text = text
        self._end_tokens = frozenset(end_tokens)

    def push(self, decided: Sequence[Token], ended: bool) -> list[Token]:
        """Add decided tokens, and return those that belong to the row, each with its new text.

        Text that is held back until the end of the row belongs to the row's last token.
        """
        if self.stopped:
            return []
        pieces = [token._replace(text="") for token in decided]
        if self._text:
            for i, token in enumerate(decided):
                if token.id not in self._end_tokens:
                    pieces[i] = token._replace(text=self._text.push(token.id))
                if self._text.stopped:
                    del pieces[i + 1 :]
                    break
            if pieces and ended and not self._text.stopped:
                held = self._text.finish()
                pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + held)
            self.stopped = self._text.stopped
        self.shown += "".join(token.text for token in pieces)
        self.tokens += pieces
        return pieces


def _stop_strings(
    stop_strings: Sequence[str] | Sequence[Sequence[str]],
    rows: int,
    detokenize: Detokenize | None,
) -> list[list[str]]:
    own = lists_of_rows(stop_strings, rows, "stop_strings", "strings")
    for name, strings in own:
        if any(not isinstance(one, str) for one in strings):
            raise InputError(f"{name} is {strings!r}; it must hold strings only.")
        if "" in strings:
            raise InputError(f"{name} holds an empty string, which ends every text; leave it out.")
        if strings and detokenize is None:
            raise InputError(
                f"{name} is given without detokenize, so tokens cannot be read as text; give "
                "tokenizer=load_tokenizer(target), or detokenize."
            )
    return [strings for _, strings in own]
