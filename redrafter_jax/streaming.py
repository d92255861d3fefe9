"""Decoding as it happens: tokens every few steps, their text, and strings that end a row.

This is the host's side of decoding; everything it decides is decided between decode steps.
"""

import operator
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decoding.prefill import Memory, empty_memory
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.recurrent import Drafter, context_layers_of
from redrafter_jax.errors import InputError
from redrafter_jax.generate import Generation, collect, start
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import common_mesh, place, shardings, to_host
from redrafter_jax.requests import PerRow, StopTokens, check_pair, check_whole, of_row, slots_for
from redrafter_jax.types import DecodeState

# From token ids to the text they spell, such as a tokenizer's `decode`.
Detokenize = Callable[[list[int]], str]

_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


class Update(NamedTuple):
    """What a stream yields.

    Attributes:
      tokens: per row, the tokens decided since the last update.
      texts: per row, the text released since the last update; "" without `detokenize`. Bytes that
        are no whole character yet, and what may turn out to be a stop string, come later.
      generation: everything so far, as `generate` returns it.
    """

    tokens: list[list[int]]
    texts: list[str]
    generation: Generation


class KeptCache:
    """What one stream leaves to the next: of a prompt that goes on from it, only the rest is read.

    Give the same one to every stream of a conversation, one at a time. The longest common
    beginning of the new prompt and of what was decided is kept, token by token, so that it is
    right whatever the prompt, also after a stream that was closed early. It is of one target.

    Args:
      context_length: tokens that a text may have, prompt included; the cache is made for as many.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._memory: Memory | None = None
        self._target: Target | None = None

    def take(self, target: Target, rows: int, max_path: int) -> Memory:
        """The memory to begin with; an empty one at first, or after a step was interrupted.

        Raises:
          InputError: it has been another target's.
        """
        if self._target is not None and not _same_weights(self._target, target):
            raise InputError("kept_cache is of another target; make a new KeptCache for this one.")
        self._target = target
        # A step that was interrupted has taken its state along.
        if self._memory is None or self._memory.tokens.is_deleted():
            slots = slots_for(self._context_length, max_path)

            def empty() -> Memory:
                return empty_memory(target, rows, slots)

            if target.mesh is None:
                return empty()
            # Each device makes its own part: no one could hold the whole.
            parts = shardings(jax.eval_shape(empty), target.mesh)
            return jax.jit(empty, out_shardings=parts)()
        return self._memory

    def put(self, state: DecodeState) -> None:
        """Remember a state, until it is donated to the next step."""
        self._memory = Memory(state.tokens, state.cache)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: PerRow[int],
    draft: DraftConfig | None = None,
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
    steps_per_yield: int = 1,
    detokenize: Detokenize | None = None,
    stop_strings: Sequence[str] | Sequence[Sequence[str]] = (),
    kept_cache: KeptCache | None = None,
) -> Generator[Update]:
    """Decode as `generate` does, yielding what is new every `steps_per_yield` steps.

    The first update holds the token that prefill decides. Closing the iterator frees the state.
    A row whose text meets a stop string ends there: its text is cut before the string, its tokens
    after the one that completes it; steps and counts go on to the next update.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`; None is plain decoding.
      prompts: token ids, ragged.
      max_new_tokens: as in `generate`.
      draft: as in `generate`; not without a drafter.
      sampling: as in `generate`.
      seeds: as in `generate`.
      eos_token_ids: as in `generate`.
      log_probs: as in `generate`.
      steps_per_yield: decode steps between two updates.
      detokenize: from token ids to text, the same for the same tokens whatever follows them (no
        cleaning up of spaces); stop strings need it.
      stop_strings: strings that end a row, one list for all rows or one per row.
      kept_cache: of the streams before this one; it keeps the cache when this one is closed.

    Raises:
      InputError: as `generate`, at the first `next`; or a stop string is empty or has no
        `detokenize`, or the kept cache has too few slots, other rows or another target.
    """
    check_whole(steps_per_yield, "steps_per_yield")
    if steps_per_yield < 1:
        raise InputError(f"steps_per_yield is {steps_per_yield}; it must be 1 or more.")
    if drafter is None:
        if draft is not None:
            raise InputError(f"draft is {draft}, but there is no drafter; give one, or no draft.")
    else:
        draft = draft or DraftConfig()
        check_pair(target.config, drafter.config, draft)
    common_mesh(target, drafter)
    max_path = draft.max_path if draft else 1
    stops = _stop_strings(stop_strings, len(prompts), detokenize)
    state, _ = start(
        target,
        prompts,
        max_new_tokens,
        sampling,
        seeds,
        eos_token_ids,
        max_path=max_path,
        log_probs=log_probs,
        context_layers=context_layers_of(drafter),
        memory=kept_cache.take(target, len(prompts), max_path) if kept_cache else None,
    )
    rows = [
        _Row(TextStream(detokenize, prompt, stop) if detokenize else None)
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    while True:
        if kept_cache:
            kept_cache.put(state)
        decided, done = collect(state, prompts), to_host(state.done)
        new = [
            row.push(tokens, bool(ended))
            for row, tokens, ended in zip(rows, decided.tokens, done, strict=True)
        ]
        stopped = np.asarray([row.stopped for row in rows])
        yield Update([tokens for tokens, _ in new], [text for _, text in new], _cut(decided, rows))
        if (done | stopped).all():
            return
        state = state._replace(done=place(done | stopped, target.mesh))
        state = decode(target, drafter, state, steps_per_yield, draft=draft)


def _same_weights(one: Target, other: Target) -> bool:
    """Whether both are the same arrays: two targets that load from one folder are not."""
    ours, theirs = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


class TextStream:
    """Tokens in, text out as soon as its characters are complete and no stop string begins there.

    The pieces together are the text that the tokens spell after the prompt, up to the stop string
    that is completed first; how the text falls into tokens makes no difference.
    """

    def __init__(
        self, detokenize: Detokenize, prompt: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        self.stopped = False
        self._detokenize = detokenize
        self._stop_strings = stop_strings
        # A tokenizer may spell a token differently at the start of a text, so it is never given
        # fresh tokens without the ones before them: the piece is what they add.
        self._shown = list(prompt)
        self._held: list[int] = []
        self._pending = ""

    def push(self, token: int) -> str:
        """The text that this token releases, maybe none."""
        self._held.append(token)
        piece = self._piece()
        if not piece.endswith(_UNDECODABLE):
            return self._release(piece)
        # A stop string may end where the first bytes of the next character already follow.
        whole = self._pending + piece.rstrip(_UNDECODABLE)
        return self._release(piece) if any(stop in whole for stop in self._stop_strings) else ""

    def finish(self) -> str:
        """What was held back, with replacement characters for bytes that are no character."""
        text = self._release(self._piece()) + self._pending
        self._pending = ""
        return text

    def _piece(self) -> str:
        before = self._detokenize(self._shown)
        after = self._detokenize(self._shown + self._held)
        if not after.startswith(before):
            # A prompt may end in half a character, which these tokens complete.
            before = before.rstrip(_UNDECODABLE)
        if not after.startswith(before):
            raise InputError(
                f"detokenize spells {before[-20:]!r} otherwise once more tokens follow; give one "
                "that does not clean up spaces, so that text can be shown before the next token."
            )
        return after[len(before) :]

    def _release(self, piece: str) -> str:
        # Held tokens of no text stay: alone, the next piece's start could not be told.
        if piece:
            whole = not self._detokenize(self._held).startswith(_UNDECODABLE)
            self._shown = self._held if whole else self._shown + self._held
            self._held = []
        text = self._pending + piece
        found = [(text.index(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            first, _ = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.stopped, self._pending = True, ""
            return text[:first]
        keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Row:
    """One row of a stream: how many of its tokens have been given out."""

    def __init__(self, text: TextStream | None) -> None:
        self.count = 0
        self.stopped = False
        self._finished = False
        self._text = text

    def push(self, tokens: Sequence[int], ended: bool) -> tuple[list[int], str]:
        """The new ones of a row's tokens, up to the one that completes a stop string; the text."""
        fresh = [] if self.stopped else list(tokens[self.count :])
        if self._text is None:
            self.count += len(fresh)
            return fresh, ""
        released = ""
        for used, token in enumerate(fresh, start=1):
            released += self._text.push(token)
            if self._text.stopped:
                fresh, self.stopped = fresh[:used], True
                break
        self.count += len(fresh)
        if ended and not self.stopped and not self._finished:
            self._finished = True
            released += self._text.finish()
            self.stopped = self._text.stopped
        return fresh, released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def _cut(decided: Generation, rows: Sequence[_Row]) -> Generation:
    """The generation without what the rows decided after their stop strings."""
    log_probs = decided.log_probs
    if log_probs is not None:
        log_probs = [one[: row.count] for one, row in zip(log_probs, rows, strict=True)]
    tokens = [one[: row.count] for one, row in zip(decided.tokens, rows, strict=True)]
    return decided._replace(tokens=tokens, log_probs=log_probs)


def _stop_strings(
    stop_strings: Sequence[str] | Sequence[Sequence[str]],
    rows: int,
    detokenize: Detokenize | None,
) -> list[list[str]]:
    if isinstance(stop_strings, str) or not isinstance(stop_strings, Sequence):
        raise InputError(
            f"stop_strings is {stop_strings!r}; give a list of strings, or such a list per row."
        )
    if all(isinstance(one, str) for one in stop_strings):
        own = [[str(one) for one in stop_strings]] * rows
    elif any(isinstance(one, str) for one in stop_strings) or len(stop_strings) != rows:
        raise InputError(
            f"stop_strings has {len(stop_strings)} entries for {rows} prompts; give one list of "
            "strings, or one such list per prompt."
        )
    else:
        own = [list(one or ()) for one in stop_strings]
    for row, strings in enumerate(own):
        name = of_row("stop_strings", row, rows)
        if any(not isinstance(one, str) for one in strings):
            raise InputError(f"{name} is {strings!r}; it must hold strings.")
        if "" in strings:
            raise InputError(f"{name} holds an empty string; leave it out, or no text could begin.")
    if any(own) and detokenize is None:
        raise InputError(
            "stop_strings are given without detokenize; give the tokenizer's decode, so that "
            "tokens can be read as text."
        )
    return own
