"""Decoding as it happens: tokens every few steps, their text, and strings that end a row.

This is the host's side of decoding; everything it decides is decided between decode steps.
"""

import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from redrafter_jax.config import Grammar, SamplingConfig, TreeConfig
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
from redrafter_jax.text.grammars import CompiledGrammar
from redrafter_jax.text.tokenizer import Detokenize, TextStream


@dataclass(frozen=True)
class Update:
    """What a stream yields.

    Attributes:
      tokens: per row, the tokens decided since the last update.
      texts: per row, the text released since the last update; "" without `detokenize`. Bytes that
        are no whole character yet, and what may turn out to be a stop string, come later.
      stopped: per row, whether a stop string has ended it.
      pieces: per row, the new tokens with what each of them released of the text, and with who
        proposed it in which target call; empty without `detokenize`.
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
        """Everything up to this update, as `generate` returns it."""
        rows = [row[:count] for row, count in zip(self._rows, self._counts, strict=True)]
        collected = collect(self._engine, rows, self._log_probs)
        return collected._replace(texts=self._whole_texts)


class KeptCache:
    """The cache that one stream leaves to the next: a longer prompt prefills only its new suffix.

    Give the same one to every stream of a conversation, one at a time. What the new prompt and the
    decided tokens begin with in common is kept, in whole pages of 64 tokens, whatever the prompt,
    also after a stream that was closed early. One cache serves one target.

    Args:
      context_length: tokens that a text may have, prompt included; the cache is made for as many.

    Raises:
      InputError: it is no whole number, or below 1.
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
    ) -> Engine:
        """The engine of the streams before, which has their texts; a new one for other trees.

        Raises:
          InputError: it has been another target's, or too few slots or other rows.
        """
        kept = self._engine
        if kept is not None and not _same_weights(kept.target, target):
            raise InputError("kept_cache is of another target; make a new KeptCache for this one.")
        if kept is not None and kept.slots != len(requests):
            raise InputError(
                f"kept_cache has {kept.slots} rows, but there are {len(requests)} prompts; give "
                "one of as many."
            )
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        if longest > self._context_length:
            raise InputError(
                f"{longest} tokens, prompt included, do not fit the {self._context_length} of "
                "kept_cache; ask for fewer, or give KeptCache a longer context_length."
            )
        stops = max(len(request.stop_tokens or ()) for request in requests)
        made_for = (jax.tree.leaves(drafter), type(drafter), tree, adaptive, log_probs)
        fits = kept is not None and kept.intact and kept.stop_width >= stops
        if kept is None or not fits or not _same(self._made_for, made_for):
            kept = engine_of(
                target, drafter, requests, tree, adaptive, log_probs, self._context_length
            )
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
    grammars: PerRow[Grammar | CompiledGrammar | None] | None = None,
    tokenizer: Any = None,
) -> Generator[Update]:
    """Decode as `generate` does, yielding what is new every `steps_per_yield` steps.

    The first update holds the token that prefill decides. Closing the iterator frees the state.
    What ends a row is no part of its text. A row whose text meets a stop string ends there: its
    text is cut before the string, its tokens after the one that completes it; steps and counts go
    on to the next update.

    Args:
      target: from `load_target`.
      drafter: as in `generate`.
      prompts: as in `generate`.
      max_new_tokens: as in `generate`.
      tree: as in `generate`.
      adaptive: as in `generate`.
      sampling: as in `generate`.
      seeds: as in `generate`.
      eos_token_ids: as in `generate`.
      log_probs: as in `generate`.
      steps_per_yield: decode steps between two updates.
      detokenize: from token ids to text, the same for the same tokens whatever follows them (no
        cleaning up of spaces); stop strings need it.
      stop_strings: strings that end a row, one list for all rows or one per row.
      kept_cache: of the streams before this one; it keeps the cache when this one is closed.
      grammars: as in `generate`.
      tokenizer: as in `generate`; it detokenizes too.

    Raises:
      InputError: as `generate`, at the first `next`; or a stop string is empty or has no
        `detokenize`, or the kept cache has too few slots, other rows or another target.
    """
    check_size(steps_per_yield, "steps_per_yield")
    bound, _ = bind_models(target, drafter, tree)
    asked = tokenize(target.config, prompts, tokenizer, eos_token_ids)
    prompts, detokenize = asked.prompts, detokenize or asked.decode
    stops = _stop_strings(stop_strings, len(prompts), detokenize)
    if not isinstance(kept_cache, KeptCache | None):
        raise InputError(f"kept_cache is {kept_cache!r:.40}; give a KeptCache, or leave it out.")
    batch = Batch(prompts, max_new_tokens, sampling, seeds, asked.eos_token_ids)
    make = kept_cache.engine_for if kept_cache else engine_of
    requests = check_batch(target.config, batch)
    if grammars is not None:
        from redrafter_jax.engine.constrained import hold

        requests = hold(target.config, requests, grammars, tokenizer)
    engine = make(target, bound, requests, tree, adaptive, log_probs)
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
    steps = 0  # the first update is prefill's
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
    """Whether both are the same arrays: two targets that load from one folder are not."""
    ours, theirs = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether an engine was made for the same drafter and trees."""
    if not before:
        return False
    (leaves, *stated), (own_leaves, *own_stated) = before, now
    same_leaves = len(leaves) == len(own_leaves) and all(map(operator.is_, leaves, own_leaves))
    return same_leaves and stated == own_stated


class _Row:
    """What one row of a stream has given out, up to the token that completes a stop string."""

    def __init__(self, text: TextStream | None, end_tokens: Sequence[int]) -> None:
        self.tokens: list[Token] = []
        self.stopped = False
        self.shown = ""
        self._text = text
        self._end_tokens = frozenset(end_tokens)

    def push(self, decided: Sequence[Token], ended: bool) -> list[Token]:
        """Take the tokens that were decided; returns those given out, with the text they release.

        What is held back until the end is the last token's.
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
            raise InputError(f"{name} is {strings!r}; it must hold strings.")
        if "" in strings:
            raise InputError(f"{name} holds an empty string; leave it out, or no text could begin.")
        if strings and detokenize is None:
            raise InputError(
                f"{name} is given without detokenize; give the tokenizer's decode, so that tokens "
                "can be read as text."
            )
    return [strings for _, strings in own]
