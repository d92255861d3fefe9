"""A target's tokenizer, and what text it takes."""

from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from redrafter_jax.checkpoints.download import from_hub, refuse_outer_folder
from redrafter_jax.errors import InputError


def require_text(text: str, name: str) -> None:
    """Refuse lone surrogates, which no tokenizer takes.

    JSON can spell them, and bytes of the command line that are not UTF-8 become them.

    Raises:
      InputError: there is one; the sentence calls the text by `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds {text[error.start]!r} at character {error.start}, a lone surrogate; "
            "write it in valid UTF-8."
        ) from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a target: `tokenizer.json` of its folder or hub repository.

    Raises:
      InputError: there is no such file, it cannot be downloaded, or it is no tokenizer.
    """
    path = Path(name) / "tokenizer.json"
    if not path.parent.is_dir():
        from huggingface_hub import hf_hub_download  # slow, and most targets are in a folder

        fetch = partial(hf_hub_download, filename="tokenizer.json")
        path = from_hub(fetch, str(name), "tokenizer.json")
    else:
        refuse_outer_folder(path.parent, path.name)
    if not path.is_file():
        raise InputError(f"{path} is missing; save the target's tokenizer there.")
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
