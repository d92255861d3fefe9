"""From text files to batches: documents, windows of tokens with a loss mask, a grain pipeline."""

import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, TypedDict

import grain
import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from train.config import DataSettings


class Document(NamedTuple):
    """One text file: its path below the data folder and its text."""

    name: str
    text: str


class Windows(NamedTuple):
    """Examples that never cross a document.

    Attributes:
      tokens: token ids, padded at the end of a document with its end token.
      loss_mask: True where a token is real text, so that predicting it counts.
    """

    tokens: Int[np.ndarray, "n T"]
    loss_mask: Bool[np.ndarray, "n T"]


class Batch(TypedDict):
    """What one step reads; see `Windows`."""

    tokens: Int[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]


def read_documents(settings: DataSettings, *, held_out: bool = False) -> list[Document]:
    """The training documents, or the held-out ones, ordered by name.

    Raises:
      InputError: the folder is missing, no file matches, or a file is not UTF-8 text.
    """
    folder = _resolve_folder(settings.folder)
    if not folder.is_dir():
        raise InputError(f"data.folder {settings.folder!r} is not a folder.")
    documents = []
    for path in sorted({path for glob in settings.include for path in folder.glob(glob)}):
        name = path.relative_to(folder).as_posix()
        if _matches(name, settings.exclude) or _matches(name, settings.held_out) != held_out:
            continue
        try:
            documents.append(Document(name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} is not UTF-8 text at byte {error.start}; add it to data.exclude."
            ) from None
    if not documents:
        kind = "held_out" if held_out else "include"
        raise InputError(f"No file below {settings.folder!r} matches data.{kind}.")
    return documents


def make_windows(
    documents: Sequence[Document], tokenizer: Tokenizer, end_token: int, length: int
) -> Windows:
    """Cut each document into windows of `length` tokens.

    A document opens and closes with the end token; its last window is padded. Padding carries no
    loss, nor does the opening token, which nothing precedes.
    """
    tokens, masks = [], []
    for encoding in tokenizer.encode_batch_fast([document.text for document in documents]):
        ids = np.asarray([end_token, *encoding.ids, end_token], np.int32)
        count = -(-len(ids) // length)
        window = np.full(count * length, end_token, np.int32)
        window[: len(ids)] = ids
        mask = np.arange(count * length) < len(ids)
        mask[0] = False
        tokens.append(window.reshape(count, length))
        masks.append(mask.reshape(count, length))
    return Windows(np.concatenate(tokens), np.concatenate(masks))


def make_batches(windows: Windows, batch_size: int, seed: int) -> grain.DatasetIterator[Batch]:
    """An endless, shuffled, deterministic iterator whose position can be saved and restored.

    Raises:
      InputError: there are fewer windows than one batch holds.
    """
    count = len(windows.tokens)
    if count < batch_size:
        raise InputError(
            f"The data gives {count} windows, fewer than a batch of {batch_size}; lower "
            "optimizer.batch_size or data.sequence_length."
        )
    dataset = (
        grain.MapDataset.range(count)
        .seed(seed)
        .shuffle()
        .repeat()
        .map(lambda i: Batch(tokens=windows.tokens[i], loss_mask=windows.loss_mask[i]))
        .batch(batch_size)
    )
    return iter(dataset.to_iter_dataset())


def _resolve_folder(folder: str) -> Path:
    if folder == "python:stdlib":
        return Path(sysconfig.get_path("stdlib"))
    return Path(folder)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch(name, glob) for glob in globs)
