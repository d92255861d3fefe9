"""From the engine's tokens to the text of an answer, piece by piece."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.serving.messages import Event
from redrafter_jax.text.text_stream import TextStream

Finish = Literal["stop", "length"]


class Token(NamedTuple):
    """A decided token.

    Attributes:
      id: of the vocabulary.
      text: that it released, so that the texts of all tokens together are the answer's.
      log_prob: under the target, before temperature and filters.
      top: the likeliest tokens there and their log-probabilities, best first.
      call: the target call that decided it, counted from 0, which read the prompt.
      origin: the drafter that proposed it; None for the target's own.
    """

    id: int
    text: str
    log_prob: float
    top: Sequence[tuple[int, float]]
    call: int
    origin: str | None


class Piece(NamedTuple):
    """What one step adds to an answer.

    Attributes:
      text: that is certain by now.
      tokens: that were decided.
      finish: why the answer ends here; None while it goes on.
    """

    text: str
    tokens: list[Token]
    finish: Finish | None


class Choice:
    """One answer on its way from tokens to text.

    Args:
      tokenizer: the target's.
      prompt: token ids.
      stop: strings that end the answer.
      gap: what a chat template writes between the opening of an answer and its text, which is no
        part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], gap: str = ""
    ) -> None:
        self._stream = TextStream(tokenizer.decode, prompt, stop)
        self._gap = gap
        self._calls = 0
        self.ended = False

    def take(self, event: Event) -> Piece:
        """What an event adds, up to a stop string, which ends the answer.

        Raises:
          InputError: the target computes no numbers, or its tokenizer's texts change as they grow.
        """
        if not all(map(math.isfinite, event.log_probs)):
            raise InputError("The target's logits are not finite; check its weights and dtype.")
        gains = enumerate(event.calls, self._calls)
        calls = [call for call, gained in gains for _ in range(gained)]
        self._calls += len(event.calls)
        tokens: list[Token] = []
        for i, number in enumerate(event.tokens):
            text = self._without_gap(self._stream.push(number))
            told = event.log_probs[i], event.top_log_probs[i], calls[i], event.origins[i]
            tokens.append(Token(number, text, *told))
            if self._stream.stopped:
                break
        finish: Finish | None = "stop" if self._stream.stopped else None
        if finish is None and event.ended in ("stop", "length"):
            finish = event.ended
            held = self._without_gap(self._stream.finish())
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + held)
            if self._stream.stopped:  # by what had been held back
                finish = "stop"
        self.ended = finish is not None
        return Piece("".join(token.text for token in tokens), tokens, finish)

    def _without_gap(self, text: str) -> str:
        kept = text.removeprefix(self._gap)
        if text:
            self._gap = ""
        return kept


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """How a token reads within a text; some decoders spell it otherwise at the start of one."""

    @lru_cache(maxsize=1 << 16)
    def read(token: int) -> str:
        once, twice = (
            tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2)
        )
        return twice.removeprefix(once)

    return read
