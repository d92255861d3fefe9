"""From the engine's tokens to the text of an answer, piece by piece."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.serving.messages import Event, Token
from redrafter_jax.text.text_stream import TextStream

Finish = Literal["stop", "length"]


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
        self.ended = False

    def take(self, event: Event) -> Piece:
        """What an event adds, up to a stop string, which ends the answer.

        Raises:
          InputError: the target computes no numbers, or its tokenizer's texts change as they grow.
        """
        if event.ended == "not numbers":
            raise InputError(
                "The target's scores are NaN or infinite, so that it has no answer; the server's "
                "log says which of its weights is damaged."
            )
        tokens: list[Token] = []
        # What ends an answer is no part of it, whatever the tokenizer says of it.
        end = len(event.decided) - 1 if event.ended == "stop" else None
        for at, token in enumerate(event.decided):
            text = "" if at == end else self._without_gap(self._stream.push(token.id))
            tokens.append(token._replace(text=text))
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
