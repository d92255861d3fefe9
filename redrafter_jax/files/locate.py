"""Finds a model's files, in a folder or in the local copy of a hub repository.

The hub's client takes half a second to import, so it is imported where it is used.
"""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_json

# Weight files to download; other files of a repository repeat the same weights in other formats.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# The tree table in a drafter's folder; see `redrafter_jax.files.tree_table`.
TREE_TABLE = "draft.yaml"
SINGLE_FILE = "model.safetensors"
# A file in folders of adapters, in the format of the package peft.
_ADAPTER = "adapter_config.json"
# Names with these suffixes are files, not hub ids.
_FILES = (".safetensors", ".bin", ".pt", ".json")
# Files that describe a model and its tokenizer.
_DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", TREE_TABLE)
# The first bytes of a GGUF file.
GGUF_MAGIC = b"GGUF"


def resolve(name: str | Path) -> Path:
    """The path of a folder or GGUF file, or of the files that describe a model on the hub.

    Raises:
      InputError: the name is neither a path nor an accessible hub repository.
    """
    if not str(name):
        raise InputError("The name of a model is empty; give a folder, a GGUF file or a hub id.")
    path = Path(name)
    return path if is_gguf(path) or path.is_dir() else _download(str(name), *_DESCRIPTION)


def locate(name: str | Path) -> Path:
    """Return the path of a model, which `resolve` finds, after checking the folder.

    Raises:
      InputError: the errors of `resolve`, or the folder holds an adapter or a subfolder with a
        model.
    """
    path = resolve(name)
    if not is_gguf(path):
        check_model_folder(path)
    return path


def check_model_folder(folder: Path) -> None:
    """Refuse a folder of an adapter, or one that only contains a model's folder or GGUF file."""
    _refuse_adapter(folder, "config.json")
    refuse_outer_folder(folder, "config.json")


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or has the suffix .gguf, even if it does not exist."""
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:  # an unreadable file counts by its name
        return False


def refuse_outer_folder(folder: Path, needed: str) -> None:
    """Refuse a folder that lacks the needed file, if its subfolders or GGUF files are models."""
    if (folder / needed).exists():
        return
    paths = [*(path.parent for path in folder.glob(f"*/{needed}")), *folder.glob("*.gguf")]
    inner = sorted(repr(str(path)) for path in paths)
    if inner:
        others = f" or one of {len(inner) - 3} others" if len(inner) > 3 else ""
        raise InputError(
            f"{folder} holds no {needed}; did you mean {' or '.join(inner[:3])}{others}?"
        )


def locate_weights(name: str | Path, folder: Path, others: Sequence[str] = ()) -> Path:
    """The folder with the weights of a model; weights on the hub are downloaded.

    Args:
      name: the name that the user gave.
      folder: the folder that `locate` returned for the name.
      others: further names of weight files, which some drafters use.

    Raises:
      InputError: the weights cannot be downloaded.
    """
    files = (*_WEIGHTS, *others)
    if Path(name).is_dir():
        _refuse_adapter(folder, *files)
        return folder
    # The folder is named after the commit; use the same commit for the weights.
    for pattern in files:
        folder = _download(str(name), pattern, revision=folder.name)
        if any(folder.glob(pattern)):
            return folder
    _refuse_adapter(folder, *files)
    raise InputError(
        f"{str(name)!r} on the hub has no weights as safetensors or .bin; if it has GGUF files, "
        f"download one with `hf download {name} FILE.gguf`, and give its path."
    )


def _refuse_adapter(folder: Path, *needed: str) -> None:
    """Refuse a folder that holds an adapter and none of a model's files."""
    path = folder / _ADAPTER
    if not path.is_file() or any(any(folder.glob(pattern)) for pattern in needed):
        return
    stated = read_json(path)
    kind, base = (stated.get(name) for name in ("peft_type", "base_model_name_or_path"))
    raise InputError(
        f"{folder} is an adapter ({kind or 'PEFT'!s:.20}) for the model {base!r:.200}, not a "
        "model; merge the two with the package peft: PeftModel.from_pretrained(model, adapter)"
        ".merge_and_unload().save_pretrained(FOLDER), and give that folder."
    )


def _download(repository: str, *patterns: str, revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, revision=revision, allow_patterns=list(patterns))
    return from_hub(fetch, repository, "config.json and model.safetensors")


def from_hub(fetch: Callable[[str], str], repository: str, needed: str) -> Path:
    """The path of files that `fetch` downloads from a repository on the Hugging Face hub.

    Args:
      fetch: a download function of huggingface_hub, which takes the repository's id.
      repository: the folder or id that the user gave.
      needed: words for the files that a local folder must hold, for errors.

    Raises:
      InputError: the download failed, for any reason.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id

    folder = f"give the path of a folder with {needed}"
    if Path(repository).is_file():
        raise InputError(f"{repository!r} is a file; {folder}.")
    try:
        validate_repo_id(repository)
        if repository.endswith(_FILES):
            raise HFValidationError
    except HFValidationError:  # a path, for which the hub is not asked
        raise InputError(
            f"{repository!r} does not exist, and is not an id on the Hugging Face hub, such as "
            f"ORGANISATION/NAME; {folder}{_hint(repository)}."
        ) from None
    try:
        return Path(fetch(repository))
    except GatedRepoError:
        raise InputError(
            f"{repository!r} is gated on the Hugging Face hub, and you have no access; accept the "
            "licence on its page and log in with `hf auth login`."
        ) from None
    except RemoteEntryNotFoundError:
        raise InputError(
            f"{repository!r} on the Hugging Face hub has no {needed}; {folder}."
        ) from None
    # The errors of httpx, hf_xet and the file system have no common base class.
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            place = f" ({error.filename})" if error.filename else ""
            raise InputError(
                f"{repository!r} was not downloaded from the Hugging Face hub: "
                f"{error.strerror}{place}; fix that, or {folder}."
            ) from None
        cause = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        raise InputError(
            f"{repository!r} is neither a folder nor an accessible repository on the Hugging Face "
            f"hub ({cause}); {folder}{_hint(repository)}."
        ) from None


def _hint(name: str) -> str:
    """A hint " (did you mean ...?)" with a model folder of a similar name; "" if there is none."""
    if name.startswith("~") and (home := Path(name).expanduser()).exists():
        return f" (did you mean {str(home)!r}?)"  # the shell did not expand it
    wanted = Path(name)
    try:
        names = [path.parent.name for path in wanted.parent.glob("*/config.json")]
    except OSError:  # the folder cannot be read
        return ""
    near = difflib.get_close_matches(wanted.name, names, n=1)
    return f" (did you mean {str(wanted.parent / near[0])!r}?)" if near else ""
