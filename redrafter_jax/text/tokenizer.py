"""Tokenization of text, and incremental detokenization."""

import json
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError


def require_text(text: str, name: str) -> None:
    """Refuse text with lone surrogates, which no tokenizer accepts.

    Lone surrogates come from JSON escapes, and from command-line bytes that are not UTF-8. `name`
    is the name of the text in the error.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds {text[error.start]!r} at character {error.start}, a lone surrogate; "
            "write the text in valid UTF-8."
        ) from None


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokenize a text; unlike `Tokenizer.encode`, this does not block other threads."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The special tokens as text, by id."""
    added = tokenizer.get_added_tokens_decoder()
    return {token: spelt.content for token, spelt in added.items() if spelt.special}


def with_visible(tokenizer: Tokenizer, spellings: Sequence[str]) -> Tokenizer:
    """Return the tokenizer, or a copy whose decoded texts show these special tokens."""
    if not set(spellings) & set(special_tokens(tokenizer).values()):
        return tokenizer
    stated = json.loads(tokenizer.to_str())
    for added in stated["added_tokens"]:
        added["special"] = added["special"] and added["content"] not in spellings
    return Tokenizer.from_str(json.dumps(stated))


def split_stops(tokenizer: Tokenizer, strings: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """Split stop strings into the ids of special tokens and the other strings.

    A stop string that spells a special token becomes its id: decoded text leaves special tokens
    out, so it would never contain the string.

    Raises:
      InputError: a string holds a special token together with other text.
    """
    tokens, others = [], []
    special = special_tokens(tokenizer)
    for string in strings:
        held = {spelt: token for token, spelt in special.items() if spelt in string}
        if not held:
            others.append(string)
        elif string in held:
            tokens.append(held[string])
        else:
            raise InputError(
                f"The stop string {string!r} holds the special token {next(iter(held))!r}, which "
                "decoded text leaves out; give the token alone."
            )
    return tuple(tokens), others


Detokenize = Callable[[list[int]], str]
"""A function from token ids to text, such as a tokenizer's `decode`."""

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so only the last three undecodable bytes can still become a
# character.
_MOST_PENDING = 3
# Number of the prompt's last tokens that are first decoded together with new tokens.
_CONTEXT = 16


class TextStream:
    """Incremental detokenizer that releases text when its characters are complete.

    Text that may begin a stop string is held back. All released pieces together are the text of the
    tokens after the prompt, up to the stop string that is completed first. The result does not
    depend on how the text is split into tokens.

    Decoders with byte fallback (Llama 2, Mistral) decode a run of bytes as a whole: while the run's
    last character is incomplete, its earlier characters are undecodable too. Characters that have
    been released stay as they were. Bytes that never form a character become replacement
    characters.

    Args:
      detokenize: function from token ids to text.
      prompt: token ids before the first new token.
      stop_strings: strings that end the text.
      min_tokens: number of new tokens in whose text no stop string is looked for.

    Attributes:
      stopped: whether a stop string has ended the text.
      follows_text: whether the prompt has any text.
    """

    def __init__(
        self,
        detokenize: Detokenize,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self.stopped = False
        self._waits = min_tokens  # number of tokens left before stop strings are looked for
        self._detokenize = detokenize
        self._stop_strings = stop_strings
        self._pending = ""  # text that may begin a stop string
        # A tokenizer may spell a token differently at the start of a text, so new tokens are
        # decoded together with some before them. `_base` is the text of the first `_base_count`
        # tokens; `_shown` is the part of the text of all tokens that has been released.
        self._tokens = _context(detokenize, prompt)
        self._base_count = _complete_count(detokenize, self._tokens)
        self._base = self._shown = detokenize(self._tokens[: self._base_count])
        # Do not release the part of a character that the prompt already holds.
        text, _ = self._decode()
        self.follows_text = bool(text)
        self._shown += text[len(self._shown) :].rstrip(UNDECODABLE)
        self._in_prompt = text[len(self._shown) :]

    def push(self, token: int) -> str:
        """Return the text that this token releases; it may be empty."""
        self._tokens.append(token)
        self._waits -= 1
        return self._release(self._advance())

    def finish(self) -> str:
        """Release the text that was held back; incomplete characters become replacement characters.

        A second call returns "".
        """
        text = self._release(self._advance(final=True)) + self._pending
        self._pending = ""
        return text

    def _advance(self, *, final: bool = False) -> str:
        """The next characters that later tokens cannot change."""
        text, broken = self._decode()
        certain = text if final else _certain(text)
        piece = certain[len(self._shown) :]
        if piece:
            self._shown = certain
            piece = piece[shared_length(piece, self._in_prompt) :]
            self._in_prompt = ""
        if certain == text:
            self._rebase(text, broken)
        return piece

    def _decode(self) -> tuple[str, bool]:
        """The text of all tokens, and whether new tokens make earlier bytes undecodable."""
        text = self._detokenize(self._tokens)
        if text.startswith(self._shown):
            return text, False
        same = shared_length(text, self._base)
        if text[same:].startswith(UNDECODABLE):
            return self._base + self._detokenize(self._tokens[self._base_count :]), True
        if self._base[same:].startswith(UNDECODABLE):  # the prompt ends in broken characters
            self._base = self._shown = text[:same]
            return text, False
        raise InputError(
            f"detokenize changes the text {self._shown[-20:]!r} when further tokens follow, so the "
            "text cannot be shown early; give a function that does not clean up spaces."
        )

    def _rebase(self, text: str, broken: bool) -> None:
        """Forget the tokens that are not needed to decode later tokens."""
        if text and text == self._base:  # the new tokens are special and have no text
            del self._tokens[self._base_count :]
            return
        new = self._tokens[self._base_count :]
        alone = self._detokenize(new)
        # New tokens that begin within a character still need the tokens before them.
        if broken or (alone and not alone.startswith(UNDECODABLE)):
            self._tokens, text = new, alone
        self._base_count, self._base, self._shown = len(self._tokens), text, text

    def _release(self, piece: str) -> str:
        if self._waits >= 0:
            return piece
        text = self._pending + piece
        found = [(text.index(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            first, _ = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.stopped, self._pending = True, ""
            return text[:first]
        keep = max((overlap(text, stop) for stop in self._stop_strings), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]


def _context(detokenize: Detokenize, prompt: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, enough to have text that does not begin within a character."""
    length = _CONTEXT
    while length < len(prompt):
        text = detokenize(list(prompt[-length:]))
        if text and not text.startswith(UNDECODABLE):
            break
        length *= 2
    return list(prompt[-length:])


def _complete_count(detokenize: Detokenize, tokens: list[int]) -> int:
    """The length of the longest prefix of tokens that ends on a complete character."""
    fewest = max(0, len(tokens) - _MOST_PENDING)
    for count in range(len(tokens), fewest, -1):
        if not detokenize(tokens[:count]).endswith(UNDECODABLE):
            return count
    return fewest


def _certain(text: str) -> str:
    pending = len(text) - len(text.rstrip(UNDECODABLE))
    return text[: len(text) - min(pending, _MOST_PENDING)]


def shared_length[Item](one: Sequence[Item], other: Sequence[Item]) -> int:
    """The length of the longest common prefix of two texts or of two lists of tokens."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a proper prefix of the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
