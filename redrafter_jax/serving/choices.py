"""Turns the engine's tokens into the text of an answer, piece by piece."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.engine.messages import Event, PromptToken, Token
from redrafter_jax.errors import InputError
from redrafter_jax.serving.speculation import Speculation
from redrafter_jax.text.tokenizer import UNDECODABLE, TextStream, special_tokens

Finish = Literal["stop", "length"]


class Spelling(NamedTuple):
    """The spelling of a token within a text.

    Attributes:
      text: the token's text, with U+FFFD in place of incomplete characters.
      raw: the token's bytes; empty for special tokens and end tokens.
    """

    text: str
    raw: bytes

    @property
    def escaped(self) -> str:
        """The text, or OpenAI's `bytes:` notation of the bytes if a character is incomplete."""
        if UNDECODABLE not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw)


class Piece(NamedTuple):
    """The part of an answer that one event of the engine adds.

    Attributes:
      text: new text of the answer, which later tokens cannot change.
      tokens: new tokens of the answer.
      finish: "stop" or "length" if the answer ends with this piece; None otherwise.
      speculation: counts of drafts over the whole answer, if the answer ends with this piece; None
        otherwise.
      prompt: the prompt's tokens with their log-probabilities, from the second token on. Empty
        unless this is the first piece and the request asks for `prompt_logprobs`.
    """

    text: str
    tokens: list[Token]
    finish: Finish | None
    speculation: Speculation | None = None
    prompt: Sequence[PromptToken] = ()


class Choice:
    """Converts the tokens of one answer to text.

    Args:
      tokenizer: the target's tokenizer.
      prompt: token ids of the prompt.
      stop: strings that end the answer.
      gap: text that the chat template puts between the generation prompt and the answer; it is
        removed from the start of the answer.
      spell: function from a token id to the token's spelling; by default
        `token_spellings(tokenizer)`.
      min_tokens: number of first tokens whose text is not searched for stop strings.

    Attributes:
      ended: whether the answer has ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        gap: str = "",
        spell: Callable[[int], Spelling] | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer.decode, prompt, stop, min_tokens)
        self._decode = tokenizer.decode
        self._spell = spell or token_spellings(tokenizer)
        self._gap, self._raw_gap = gap, gap.encode()
        self._at_start = not self._stream.follows_text
        self._speculation = Speculation()
        self.ended = False

    def take(self, event: Event) -> Piece:
        """Return the piece that an event adds to the answer; a stop string ends the answer.

        Raises:
          InputError: the target's scores are not finite, the grammar has failed, or later tokens
            change text that was already decoded.
        """
        if event.ended == "not numbers":
            raise InputError(
                "The target's scores are NaN or infinite, so no token can be chosen; the server's "
                "log has the details."
            )
        if event.ended == "grammar":
            raise InputError("The grammar is too complex for llguidance; give a simpler one.")
        tokens: list[Token] = []
        # The token that ends an answer is not part of its text, even if it is not special.
        end = len(event.decided) - 1 if event.ended == "stop" else None
        for at, token in enumerate(event.decided):
            text, raw = "", b""
            if at != end:
                text, raw = self._without_gap(self._stream.push(token.id)), self._raw(token.id)
            tokens.append(token._replace(text=text, raw=raw))
            if self._stream.stopped:
                break
        finish: Finish | None = "stop" if self._stream.stopped else None
        if finish is None and event.ended in ("stop", "length"):
            finish = event.ended
            held = self._without_gap(self._stream.finish())
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + held)
            if self._stream.stopped:  # a stop string in the text that was held back
                finish = "stop"
        self.ended = finish is not None
        if tokens:
            self._speculation.add(event, tokens[-1].call)
        text = "".join(token.text for token in tokens)
        speculation = self._speculation if self.ended else None
        return Piece(text, tokens, finish, speculation, event.prompt)

    def _without_gap(self, text: str) -> str:
        kept = text.removeprefix(self._gap)
        if text:
            self._gap = ""
        return kept

    def _raw(self, token: int) -> bytes:
        """Return the bytes that a token adds to the answer."""
        raw = self._spell(token).raw
        if raw and self._at_start:  # decoders may drop a space at the start of a text
            alone = self._decode([token])
            raw = raw if UNDECODABLE in alone else alone.encode()
            self._at_start = False
        kept = raw.removeprefix(self._raw_gap)
        if raw:
            self._raw_gap = b""
        return kept


def token_spellings(tokenizer: Tokenizer, ends: Sequence[int] = ()) -> Callable[[int], Spelling]:
    """Return a function from a token id to the token's spelling within a text.

    Some decoders spell the first token of a text differently, so a token is spelled after a copy of
    itself. Special tokens and the end tokens `ends` have a text but no bytes.
    """
    silent = {*special_tokens(tokenizer), *ends}

    @lru_cache(maxsize=1 << 16)
    def spell(token: int) -> Spelling:
        once, twice = (
            tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2)
        )
        text = twice.removeprefix(once)
        raw = text.encode()
        if UNDECODABLE in text:
            raw = _raw_bytes(tokenizer.id_to_token(token) or "") or raw
            text = raw.decode(errors="replace")
        return Spelling(text, b"" if token in silent else raw)

    return spell


def _raw_bytes(entry: str) -> bytes | None:
    """Return the bytes that a vocabulary entry stands for; None if it has neither notation.

    SentencePiece writes a byte as `<0xE2>`. GPT-2 writes one character for each byte.
    """
    if named := re.fullmatch("<0x([0-9A-Fa-f]{2})>", entry):
        return bytes.fromhex(named[1])
    if set(entry) <= _BYTES.keys():
        return bytes(_BYTES[character] for character in entry)
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes, mapped to the bytes.

    Printable characters of Latin-1 stand for themselves; other bytes get the characters from U+0100
    on, in order.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()
