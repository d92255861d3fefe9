"""Where a model's files lie: in a folder, or in this machine's copy of a hub repository.

The hub's client, which takes half a second to import, is imported where it is used.
"""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_json

# Other files of a repository hold the same weights again, in other formats.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# Beside a drafter's `config.json`; see `redrafter_jax.files.tree_table`.
TREE_TABLE = "draft.yaml"
SINGLE_FILE = "model.safetensors"
# Of a folder that holds changes to a model, in the format of the package peft.
_ADAPTER = "adapter_config.json"
# A name that ends so is meant as a file's.
_FILES = (".safetensors", ".bin", ".pt", ".json")
# What describes a model, its tokenizer with it.
_DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", TREE_TABLE)
# The first bytes of a GGUF file.
GGUF_MAGIC = b"GGUF"


def resolve(name: str | Path) -> Path:
    """The folder or GGUF file itself, or the hub's copy of what describes the model.

    Raises:
      InputError: it is neither a path nor a repository that the hub gives.
    """
    if not str(name):
        raise InputError("The name of a model is empty; give a folder, a GGUF file or a hub id.")
    path = Path(name)
    return path if is_gguf(path) or path.is_dir() else _download(str(name), *_DESCRIPTION)


def locate(name: str | Path) -> Path:
    """The same, for a folder or file that must hold a model.

    Raises:
      InputError: as `resolve`, or it is a folder around the one of a model, or one of an adapter.
    """
    path = resolve(name)
    if not is_gguf(path):
        check_model_folder(path)
    return path


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that is an adapter's, or that lies around the one of a model."""
    _refuse_adapter(folder, "config.json")
    refuse_outer_folder(folder, "config.json")


def is_gguf(path: Path) -> bool:
    """Whether the path is named like a GGUF file, there or not, or is a file that begins as one."""
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:  # one that may not be read is what its name says
        return False


def refuse_outer_folder(folder: Path, needed: str) -> None:
    """Refuse a folder that lacks the needed file, but whose subfolders or GGUF files are models."""
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
    """The folder with the weights; the hub's are downloaded now, after their description is read.

    Args:
      name: what the user wrote.
      folder: where `locate` found its description.
      others: names of files that may hold the weights too, as some drafters' are called.

    Raises:
      InputError: the hub does not give the weights.
    """
    files = (*_WEIGHTS, *others)
    if Path(name).is_dir():
        _refuse_adapter(folder, *files)
        return folder
    # The folder is named after the commit, so that description and weights are of one.
    for pattern in files:
        folder = _download(str(name), pattern, revision=folder.name)
        if any(folder.glob(pattern)):
            return folder
    _refuse_adapter(folder, *files)
    raise InputError(
        f"The hub's {str(name)!r} has no weights as safetensors or .bin; of a repository of GGUF "
        f"files download one by `hf download {name} FILE.gguf`, and give its path."
    )


def _refuse_adapter(folder: Path, *needed: str) -> None:
    """Refuse a folder that holds an adapter and none of the files needed for a model."""
    path = folder / _ADAPTER
    if not path.is_file() or any(any(folder.glob(pattern)) for pattern in needed):
        return
    stated = read_json(path)
    kind, base = (stated.get(name) for name in ("peft_type", "base_model_name_or_path"))
    raise InputError(
        f"{folder} is an adapter ({kind or 'PEFT'!s:.20}) for the model {base!r:.200}, not a "
        "model; merge the two with the package peft, by PeftModel.from_pretrained(model, adapter)"
        ".merge_and_unload().save_pretrained(FOLDER), and give that folder."
    )


def _download(repository: str, *patterns: str, revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, revision=revision, allow_patterns=list(patterns))
    return from_hub(fetch, repository, "config.json and model.safetensors")


def from_hub(fetch: Callable[[str], str], repository: str, needed: str) -> Path:
    """Where `fetch` puts what it downloads of a repository on the Hugging Face hub.

    Args:
      fetch: one of huggingface_hub's downloads, of the repository's id.
      repository: what the user wrote for a folder or an id.
      needed: the files that a folder in its place must hold.

    Raises:
      InputError: it could not be downloaded, for whatever reason.
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
    except HFValidationError:  # a path, which the hub is not asked for
        raise InputError(
            f"{repository!r} does not exist, and is no id of the Hugging Face hub, such as "
            f"ORGANISATION/NAME; {folder}{_hint(repository)}."
        ) from None
    try:
        return Path(fetch(repository))
    except GatedRepoError:
        raise InputError(
            f"{repository!r} is gated, and the Hugging Face hub does not give it to you; accept "
            "the licence on its page there and log in with `hf auth login`."
        ) from None
    except RemoteEntryNotFoundError:
        raise InputError(
            f"{repository!r} on the Hugging Face hub has no {needed}; {folder}."
        ) from None
    # httpx, hf_xet and the file system raise errors of their own, which have no base in common.
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            place = f" ({error.filename})" if error.filename else ""
            raise InputError(
                f"{repository!r} was not downloaded from the Hugging Face hub: "
                f"{error.strerror}{place}; mend that, or {folder}."
            ) from None
        cause = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        raise InputError(
            f"{repository!r} is neither a folder nor a repository that the Hugging Face hub gave "
            f"({cause}); {folder}{_hint(repository)}."
        ) from None


def _hint(name: str) -> str:
    """A question that names a model's folder of a similar name beside the missing one; or ""."""
    if name.startswith("~") and (home := Path(name).expanduser()).exists():
        return f" (did you mean {str(home)!r}?)"  # the shell did not see it
    wanted = Path(name)
    try:
        names = [path.parent.name for path in wanted.parent.glob("*/config.json")]
    except OSError:  # a folder that cannot be read
        return ""
    near = difflib.get_close_matches(wanted.name, names, n=1)
    return f" (did you mean {str(wanted.parent / near[0])!r}?)" if near else ""
