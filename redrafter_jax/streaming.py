"""Decoding as it happens: tokens every few steps, their text, and strings that end a row.

This is the host's side of decoding; everything it decides is decided between decode steps.
"""

import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from redrafter_jax.config import SamplingConfig, TreeConfig
from redrafter_jax.decoding.prefill import PrefixCache, empty_prefix
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.generation import Generation, check_models, collect, start
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place, shardings, to_host
from redrafter_jax.requests import (
    Batch,
    PerRow,
    Prompts,
    StopTokens,
    check_size,
    lists_of_rows,
    slots_for,
    stop_lists,
    tokenize,
)
from redrafter_jax.text.text_stream import Detokenize, TextStream
from redrafter_jax.types import DecodeState


@dataclass(frozen=True)
class Update:
    """What a stream yields.

    Attributes:
      tokens: per row, the tokens decided since the last update.
      texts: per row, the text released since the last update; "" without `detokenize`. Bytes that
        are no whole character yet, and what may turn out to be a stop string, come later.
      stopped: per row, whether a stop string has ended it.
    """

    tokens: list[list[int]]
    texts: list[str]
    stopped: list[bool]
    _rows: Sequence["_Row"] = field(repr=False)
    _counts: Sequence[int] = field(repr=False)
    _whole_texts: list[str] | None = field(repr=False)
    _collected: Generation = field(repr=False)

    @cached_property
    def generation(self) -> Generation:
        """Everything up to this update, as `generate` returns it."""
        rows = list(zip(self._rows, self._counts, strict=True))
        return self._collected._replace(
            tokens=[row.tokens[:count] for row, count in rows],
            texts=self._whole_texts,
            log_probs=None
            if self._collected.log_probs is None
            else [row.log_probs[:count] for row, count in rows],
        )


class KeptCache:
    """The cache that one stream leaves to the next: a longer prompt prefills only its new suffix.

    Give the same one to every stream of a conversation, one at a time. The longest common prefix
    of the new prompt and the decided tokens is kept, token by token, so that it is right whatever
    the prompt, also after a stream that was closed early. One cache serves one target.

    Args:
      context_length: tokens that a text may have, prompt included; the cache is made for as many.

    Raises:
      InputError: it is no whole number, or below 1.
    """

    def __init__(self, context_length: int) -> None:
        check_size(context_length, "context_length")
        self._context_length = context_length
        self._prefix: PrefixCache | None = None
        self._target: Target | None = None

    def take(self, target: Target, rows: int, max_path: int) -> PrefixCache:
        """What a stream begins with; empty at first, and after a step that was interrupted.

        Raises:
          InputError: it has been another target's.
        """
        kept = self._target if self._prefix is not None else None
        if kept is not None and not _same_weights(kept, target):
            raise InputError("kept_cache is of another target; make a new KeptCache for this one.")
        self._target = target
        slots = slots_for(self._context_length, max_path)
        # A step that was interrupted took the donated state along; other drafters need more slots.
        prefix = self._prefix
        if prefix is None or prefix.tokens.is_deleted() or prefix.tokens.shape[1] < slots:
            empty = partial(empty_prefix, target, rows, slots)
            # Each device of a mesh makes its own part: no one could hold the whole.
            parts = target.mesh and shardings(jax.eval_shape(empty), target.mesh)
            prefix = jax.jit(empty, out_shardings=parts)()
        return prefix

    def put(self, state: DecodeState) -> None:
        """Remember a state, until it is donated to the next step."""
        self._prefix = PrefixCache(state.tokens, state.cache)


def stream(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: PerRow[int],
    tree: TreeConfig | None = None,
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
    steps_per_yield: int = 1,
    detokenize: Detokenize | None = None,
    stop_strings: Sequence[str] | Sequence[Sequence[str]] = (),
    kept_cache: KeptCache | None = None,
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
      sampling: as in `generate`.
      seeds: as in `generate`.
      eos_token_ids: as in `generate`.
      log_probs: as in `generate`.
      steps_per_yield: decode steps between two updates.
      detokenize: from token ids to text, the same for the same tokens whatever follows them (no
        cleaning up of spaces); stop strings need it.
      stop_strings: strings that end a row, one list for all rows or one per row.
      kept_cache: of the streams before this one; it keeps the cache when this one is closed.
      tokenizer: as in `generate`; it detokenizes too.

    Raises:
      InputError: as `generate`, at the first `next`; or a stop string is empty or has no
        `detokenize`, or the kept cache has too few slots, other rows or another target.
    """
    check_size(steps_per_yield, "steps_per_yield")
    bound = bind_drafter(drafter, tree)
    check_models(target, bound)
    bound = bound.prepare(Lender(target))
    asked = tokenize(target.config, prompts, tokenizer, eos_token_ids)
    prompts, detokenize = asked.prompts, detokenize or asked.decode
    stops = _stop_strings(stop_strings, len(prompts), detokenize)
    if not isinstance(kept_cache, KeptCache | None):
        raise InputError(f"kept_cache is {kept_cache!r:.40}; give a KeptCache, or leave it out.")
    prefix = kept_cache.take(target, len(prompts), bound.max_path) if kept_cache else None
    batch = Batch(prompts, max_new_tokens, sampling, seeds, asked.eos_token_ids)
    state, _ = start(target, bound, batch, log_probs=log_probs, prefix=prefix)
    ends = stop_lists(target.config, asked.eos_token_ids, len(prompts))
    rows = [
        _Row(TextStream(detokenize, prompt, stop) if detokenize else None, end_tokens)
        for prompt, stop, (_, end_tokens) in zip(prompts, stops, ends, strict=True)
    ]
    starts = np.asarray([len(prompt) for prompt in prompts], np.int32)
    while True:
        if kept_cache:
            kept_cache.put(state)
        new = _collect_new(target, state, bound, starts, steps_per_yield * bound.max_path)
        done = to_host(state.done)
        starts = starts + np.asarray([len(tokens) for tokens in new.tokens], np.int32)
        fresh, texts = [], []
        for row, ended in enumerate(done):
            scores = new.log_probs[row] if new.log_probs else []
            tokens, text = rows[row].push(new.tokens[row], scores, bool(ended))
            fresh.append(tokens)
            texts.append(text)
        stopped = [row.stopped for row in rows]
        counts, whole = [len(row.tokens) for row in rows], [row.shown for row in rows]
        yield Update(fresh, texts, stopped, rows, counts, whole if detokenize else None, new)
        if (done | stopped).all():
            return
        state = state._replace(done=place(done | stopped, target.mesh))
        state = decode(target, bound, state, steps_per_yield)


def _collect_new(
    target: Target,
    state: DecodeState,
    drafter: Drafter,
    starts: Int[np.ndarray, " B"],
    most: int,
) -> Generation:
    """The tokens decided from `starts` on, `most` per row at most; counts are the state's."""
    tokens, log_probs, lengths = _newest(
        state.tokens, state.log_probs, state.cache.lengths, starts, min(most, state.tokens.shape[1])
    )
    window = state._replace(
        tokens=tokens, log_probs=log_probs, cache=state.cache._replace(lengths=lengths)
    )
    return collect(target, window, [0] * len(starts), drafter)


@partial(jax.jit, static_argnums=4)
def _newest(
    tokens: Int[Array, "B S"],
    log_probs: Float[Array, "B S"] | None,
    lengths: Int[Array, " B"],
    starts: Int[Array, " B"],
    count: int,
) -> tuple[Int[Array, "B count"], Float[Array, "B count"] | None, Int[Array, " B"]]:
    slots = jnp.minimum(starts[:, None] + jnp.arange(count), tokens.shape[1] - 1)

    def window(values: Array) -> Array:
        return jnp.take_along_axis(values, slots, axis=1)

    return (
        window(tokens),
        None if log_probs is None else window(log_probs),
        lengths - starts,
    )


def _same_weights(one: Target, other: Target) -> bool:
    """Whether both are the same arrays: two targets that load from one folder are not."""
    ours, theirs = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


class _Row:
    """What one row of a stream has given out, up to the token that completes a stop string."""

    def __init__(self, text: TextStream | None, end_tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.stopped = False
        self.shown = ""
        self._text = text
        self._end_tokens = frozenset(end_tokens)

    def push(self, tokens: list[int], log_probs: list[float], ended: bool) -> tuple[list[int], str]:
        """Take the tokens that were decided; returns those given out, and the text released."""
        if self.stopped:
            return [], ""
        text, used = "", len(tokens)
        if self._text:
            for i, token in enumerate(tokens):
                text += "" if token in self._end_tokens else self._text.push(token)
                if self._text.stopped:
                    used = i + 1
                    break
            if ended and not self._text.stopped:
                text += self._text.finish()
            self.stopped = self._text.stopped
        self.shown += text
        self.tokens += tokens[:used]
        self.log_probs += log_probs[:used]
        return tokens[:used], text


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
