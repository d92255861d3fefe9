"""Text into tokens, and tokens into text, while they come."""

import json
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError


def require_text(text: str, name: str) -> None:
    """Refuse lone surrogates, which no tokenizer takes; the sentence calls the text by `name`.

    JSON can spell them, and bytes of the command line that are not UTF-8 become them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds {text[error.start]!r} at character {error.start}, a lone surrogate; "
            "write it in valid UTF-8."
        ) from None


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text; other threads go on meanwhile, unlike with `Tokenizer.encode`."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The spellings of the special tokens, by id."""
    added = tokenizer.get_added_tokens_decoder()
    return {token: spelt.content for token, spelt in added.items() if spelt.special}


def with_visible(tokenizer: Tokenizer, spellings: Sequence[str]) -> Tokenizer:
    """The tokenizer, or a copy of it whose decoded texts hold these special tokens too."""
    if not set(spellings) & set(special_tokens(tokenizer).values()):
        return tokenizer
    stated = json.loads(tokenizer.to_str())
    for added in stated["added_tokens"]:
        added["special"] = added["special"] and added["content"] not in spellings
    return Tokenizer.from_str(json.dumps(stated))


def split_stops(tokenizer: Tokenizer, strings: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """Strings that end a text: those that are special tokens, as tokens, and the others.

    Decoded text leaves special tokens out, so that no stop string would meet them there.

    Raises:
      InputError: a string holds a special token and more.
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
"""From token ids to the text they spell, such as a tokenizer's `decode`."""

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
# A character has four bytes at most: of more bytes that are undecodable the first stay so.
_MOST_PENDING = 3
# Tokens of the prompt to begin with.
_CONTEXT = 16


class TextStream:
    """Tokens in, text out as soon as its characters are complete and no stop string begins there.

    The pieces together are the text that the tokens spell after the prompt, up to the stop string
    that is completed first; how the text falls into tokens makes no difference.

    Decoders with byte fallback (Llama 2, Mistral) decode a run of bytes as one: while its last
    character is incomplete, the characters before it are undecodable too. They have been shown
    when they were complete, and stay as they were; bytes that are no character at last become
    replacement characters on their own.

    Stop strings begin after the text of the first `min_tokens` tokens.

    Attributes:
      stopped: whether a stop string has ended the text.
      follows_text: whether the prompt spells any text.
    """

    def __init__(
        self,
        detokenize: Detokenize,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self.stopped = False
        self._waits = min_tokens  # tokens in whose text no stop string is looked for
        self._detokenize = detokenize
        self._stop_strings = stop_strings
        self._pending = ""  # text that may begin a stop string
        # A tokenizer may spell a token differently at the start of a text, so it gets new tokens
        # together with some before them. The text of the first `_base_count` is `_base`;
        # `_shown` is what has been given out of the text of all.
        self._tokens = _context(detokenize, prompt)
        self._base_count = _complete_count(detokenize, self._tokens)
        self._base = self._shown = detokenize(self._tokens[: self._base_count])
        # A character that begins in the prompt is undecodable there, and is not shown once more.
        text, _ = self._decode()
        self.follows_text = bool(text)
        self._shown += text[len(self._shown) :].rstrip(UNDECODABLE)
        self._in_prompt = text[len(self._shown) :]

    def push(self, token: int) -> str:
        """The text that this token releases, maybe none."""
        self._tokens.append(token)
        self._waits -= 1
        return self._release(self._advance())

    def finish(self) -> str:
        """The text that was held back; bytes that are no character become replacement characters.

        Once more it is "".
        """
        text = self._release(self._advance(final=True)) + self._pending
        self._pending = ""
        return text

    def _advance(self, *, final: bool = False) -> str:
        """The next characters that are certain."""
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
        """The text of all tokens, and whether new ones break the bytes that come before them."""
        text = self._detokenize(self._tokens)
        if text.startswith(self._shown):
            return text, False
        same = shared_length(text, self._base)
        if text[same:].startswith(UNDECODABLE):
            return self._base + self._detokenize(self._tokens[self._base_count :]), True
        if self._base[same:].startswith(UNDECODABLE):  # of a prompt of broken characters
            self._base = self._shown = text[:same]
            return text, False
        raise InputError(
            f"detokenize changes {self._shown[-20:]!r} when further tokens follow; give one "
            "that does not clean up spaces, so that text can be shown before the next token."
        )

    def _rebase(self, text: str, broken: bool) -> None:
        """Forget the tokens that later ones need not be decoded with."""
        if text and text == self._base:  # special tokens, which spell nothing
            del self._tokens[self._base_count :]
            return
        new = self._tokens[self._base_count :]
        alone = self._detokenize(new)
        # New tokens that begin within a character still need those before it.
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
    """The last tokens of the prompt, enough to begin with some text and not within a character."""
    length = _CONTEXT
    while length < len(prompt):
        text = detokenize(list(prompt[-length:]))
        if text and not text.startswith(UNDECODABLE):
            break
        length *= 2
    return list(prompt[-length:])


def _complete_count(detokenize: Detokenize, tokens: list[int]) -> int:
    """The length of the longest beginning that ends on a complete character."""
    fewest = max(0, len(tokens) - _MOST_PENDING)
    for count in range(len(tokens), fewest, -1):
        if not detokenize(tokens[:count]).endswith(UNDECODABLE):
            return count
    return fewest


def _certain(text: str) -> str:
    pending = len(text) - len(text.rstrip(UNDECODABLE))
    return text[: len(text) - min(pending, _MOST_PENDING)]


def shared_length[Item](one: Sequence[Item], other: Sequence[Item]) -> int:
    """The length of the longest beginning that two texts, or two rows of tokens, share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
