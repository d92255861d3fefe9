"""Text into tokens, and what text a tokenizer takes."""

from collections.abc import Sequence

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
