"""A target's tokenizer, and what text it takes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from redrafter_jax.checkpoints.config_files import refuse_pointer
from redrafter_jax.checkpoints.download import is_gguf, locate, refuse_outer_folder
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.model import Model

_FILE = "tokenizer.json"
# What transformers makes a tokenizer of, and what may change the one of `_FILE`.
_VOCABULARIES = (_FILE, "tokenizer.model", "vocab.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


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


def load_tokenizer(source: str | Path | Model[Any, Any]) -> Any:
    """A target's tokenizer with its chat template, as transformers loads it; of a GGUF file too.

    `generate` and `stream` take it; `apply_chat_template`, `encode` and `decode` are its own.

    Args:
      source: folder, GGUF file or hub id of the target, or what `load_target` returned for it.

    Raises:
      InputError: there is none, or it cannot be loaded.
    """
    if isinstance(source, Model):
        if not source.source:
            raise InputError(
                "This target was not loaded from files; give the path of its tokenizer."
            )
        source = str(source.source)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not there
    if is_gguf(Path(source)):
        tokenizer, fields = _of_gguf(Path(source))
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)
    folder = _tokenizer_folder(source)
    from transformers import AutoTokenizer

    try:
        # A folder's own code is never run: by default transformers would ask on stdin whether to.
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many loaders raise
        if (folder / _FILE).exists():
            _parse(folder / _FILE)  # whose error says more
        raise InputError(
            f"transformers cannot load the tokenizer of {source}: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
        raise InputError(
            f"The tokenizer of {source} is one in Python alone ({type(loaded).__name__}); save it "
            f"as {_FILE}."
        )
    try:
        loaded.backend_tokenizer.encode("Hi \N{SNOWMAN}\n")
    except Exception as error:  # of a class that is not the vocabulary's
        raise InputError(
            f"The tokenizer of {source} is a {type(loaded).__name__} to transformers and makes no "
            f"tokens of a text ({error}); mend tokenizer_class in its tokenizer_config.json."
        ) from None
    return loaded


def read_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a target's texts, by transformers' rules.

    Raises:
      InputError: there is no such file, it cannot be downloaded, or it is no tokenizer.
    """
    if is_gguf(Path(name)):
        tokenizer, _ = _of_gguf(Path(name))
    else:
        folder = _tokenizer_folder(name)
        # Alone it says all there is to say, and transformers imports slowly.
        alone = (folder / _FILE).exists() and not any((folder / file).exists() for file in _BESIDE)
        tokenizer = _parse(folder / _FILE) if alone else load_tokenizer(folder).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_folder(name: str | Path) -> Path:
    """Where a tokenizer's files lie.

    Raises:
      InputError: there are none.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = locate(name)
    elif not any((folder / file).exists() for file in _VOCABULARIES):
        refuse_outer_folder(folder, _FILE)
    found = [folder / file for file in _VOCABULARIES if (folder / file).exists()]
    if not found:
        raise InputError(f"{folder / _FILE} is missing; save the target's tokenizer there.")
    for path in found:
        refuse_pointer(path)
    return folder


def _of_gguf(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    from redrafter_jax.checkpoints.gguf_header import read_header
    from redrafter_jax.checkpoints.gguf_tokenizer import gguf_tokenizer, tokenizer_fields

    header = read_header(path)
    return gguf_tokenizer(header), tokenizer_fields(header)


def _parse(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    # tokenizers raises nothing narrower, and a panic of its Rust code is no Exception.
    except BaseException as error:
        raise InputError(f"{path} is no tokenizer: {error}.") from None


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
