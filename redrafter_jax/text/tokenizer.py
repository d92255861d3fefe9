"""A target's tokenizer, and what text it takes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from redrafter_jax.checkpoints.config_files import refuse_pointer
from redrafter_jax.checkpoints.download import from_hub, is_gguf, refuse_outer_folder
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


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a target: `tokenizer.json` of its folder or hub repository, or GGUF's own.

    Raises:
      InputError: there is no such file, it cannot be downloaded, or it is no tokenizer.
    """
    if is_gguf(Path(name)):
        from redrafter_jax.checkpoints.gguf_header import read_header
        from redrafter_jax.checkpoints.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(read_header(Path(name)))
    path = Path(name) / "tokenizer.json"
    if not path.parent.is_dir():
        from huggingface_hub import hf_hub_download  # slow, and most targets are in a folder

        fetch = partial(hf_hub_download, filename="tokenizer.json")
        path = from_hub(fetch, str(name), "tokenizer.json")
    else:
        refuse_outer_folder(path.parent, path.name)
    if not path.is_file():
        raise InputError(f"{path} is missing; save the target's tokenizer there.")
    refuse_pointer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    # tokenizers raises nothing narrower, and a panic of its Rust code is no Exception.
    except BaseException as error:
        raise InputError(f"{path} is no tokenizer: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text; other threads go on meanwhile, unlike with `Tokenizer.encode`."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """By id, how the special tokens are spelt."""
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
