"""From text files to batches: documents, windows of tokens with a loss mask, a grain pipeline."""

import json
import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, TypedDict

import grain
import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from redrafter_jax.command_line import load_tokenizer
from redrafter_jax.config import TargetConfig
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
    documents, matched = [], 0
    for path in sorted({path for glob in settings.include for path in folder.glob(glob)}):
        if not path.is_file():
            continue
        matched += 1
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
        if held_out or not matched:
            kind = "held_out" if held_out else "include"
            raise InputError(f"No file below {settings.folder!r} matches data.{kind}.")
        raise InputError(
            f"All {matched} files below {settings.folder!r} that match data.include are left out "
            "by data.exclude or data.held_out; change those."
        )
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


def text_windows(settings: DataSettings, folder: Path, config: TargetConfig) -> Windows:
    """The windows of the training documents, in the tokens of the target in `folder`.

    Raises:
      InputError: tokenizer and target do not belong together, or the data cannot be read.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"{folder} has a tokenizer of {tokenizer.get_vocab_size()} tokens and a model of "
            f"{config.vocab_size}; they do not belong together."
        )
    length, positions = settings.sequence_length, config.max_position_embeddings
    if length > positions:
        raise InputError(
            f"data.sequence_length is {length}, but the target has {positions} positions; lower it."
        )
    if not config.eos_token_ids:
        raise InputError(f"{folder} states no eos_token_id to separate documents with.")
    return make_windows(read_documents(settings), tokenizer, config.eos_token_ids[0], length)


def read_token_files(
    paths: Sequence[Path], vocab_size: int, end_token: int, length: int
) -> Windows:
    """Examples that are tokens already, one JSON line each, padded to `length`.

    Raises:
      InputError: a file cannot be read, or a row is malformed, too long, outside the vocabulary,
        or counts no token; the message names the file and the line.
    """
    tokens, masks = [], []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(f"Cannot read data.token_files {path}: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise InputError(
                f"data.token_files {path} is not UTF-8 text at byte {error.start}; give a file of "
                "JSON lines."
            ) from None
        for number, line in enumerate(lines, start=1):
            ids, mask = _parse_tokens(line, f"{path}, line {number}", vocab_size, length)
            padding = length - len(ids)
            tokens.append(np.pad(ids, (0, padding), constant_values=end_token))
            masks.append(np.pad(mask, (0, padding)))
    if not tokens:
        raise InputError("data.token_files hold no rows; add some or leave them out.")
    return Windows(np.stack(tokens), np.stack(masks))


def make_batches(
    sources: Sequence[tuple[Windows, float]], batch_size: int, seed: int
) -> grain.DatasetIterator[Batch]:
    """An endless, shuffled, deterministic iterator whose position can be saved and restored.

    Args:
      sources: examples and the share of every source in the mixture; each is shuffled and
        repeated by itself.
      batch_size: examples per batch.
      seed: of the shuffling.

    Raises:
      InputError: a source has fewer windows than one batch holds.
    """
    for windows, _ in sources:
        if len(windows.tokens) < batch_size:
            raise InputError(
                f"The data gives {len(windows.tokens)} windows, fewer than a batch of "
                f"{batch_size}; lower optimizer.batch_size or data.sequence_length."
            )
    datasets = [_examples(windows, seed) for windows, _ in sources]
    mixed = grain.MapDataset.mix(datasets, weights=[share for _, share in sources])
    return iter(mixed.batch(batch_size).to_iter_dataset())


def _examples(windows: Windows, seed: int) -> grain.MapDataset[Batch]:
    return (
        grain.MapDataset.range(len(windows.tokens))
        .seed(seed)
        .shuffle()
        .repeat()
        .map(lambda i: Batch(tokens=windows.tokens[i], loss_mask=windows.loss_mask[i]))
    )


def _parse_tokens(
    line: str, place: str, vocab_size: int, length: int
) -> tuple[Int[np.ndarray, " t"], Bool[np.ndarray, " t"]]:
    try:
        row = json.loads(line)
        ids, mask = np.asarray(row["input_ids"]), np.asarray(row["loss_mask"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        raise InputError(f"{place} is no row of input_ids and loss_mask.") from None
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.shape != mask.shape:
        raise InputError(f"{place}: input_ids and loss_mask are not two equally long lists.")
    if not np.isin(mask, (0, 1)).all() or not mask.any():
        raise InputError(f"{place}: loss_mask holds other values than 0 and 1, or no 1.")
    if len(ids) > length:
        raise InputError(
            f"{place} has {len(ids)} tokens, but data.sequence_length is {length}; raise it."
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InputError(f"{place} holds a token outside the vocabulary of {vocab_size} tokens.")
    return ids.astype(np.int32), mask.astype(bool)


def _resolve_folder(folder: str) -> Path:
    if folder == "python:stdlib":
        return Path(sysconfig.get_path("stdlib"))
    return Path(folder)


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a glob fits; `*` crosses folders, and `**/` may be no folder, as in `include`."""
    return any(fnmatch(name, variant) for glob in globs for variant in _without_folders(glob))


def _without_folders(glob: str) -> list[str]:
    """The glob with and without each `**/`, which fnmatch takes for one folder at least."""
    before, folders, after = glob.partition("**/")
    if not folders:
        return [glob]
    return [before + kept + rest for rest in _without_folders(after) for kept in ("", folders)]
