"""Features: the target's hidden states and most likely tokens, stored on disk.

A folder of features holds `index.json` and shards, `00000.safetensors` and so on. A shard holds the
n tokens of some rows, concatenated without padding: `hidden` [n, Z] and `log_probs` [n, k] in
bfloat16; `token_ids` [n, k] in uint16, or in int32 for larger vocabularies; and `starts`, the
offsets of the rows, followed by the end of the last row. Z is the target's width times the number
of stored hidden states per token, and k the number of stored tokens per token.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from redrafter_jax.config import Dtype
from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import Settings

# A function from the index of a row in its source to the features of the row.
ReadRow: TypeAlias = Callable[[int], dict[str, np.ndarray]]


class FeatureIndex(Settings):
    """The contents of a folder of features.

    Attributes:
      target: digest of the target's files, from `TargetFiles.digest`.
      target_dtype: dtype in which the target ran.
      context_layers: target layers whose outputs are stored, before the last hidden states.
      raw_layers: whether these outputs are stored unchanged; otherwise the target's final norm is
        applied to them.
      top_k: k, the number of most likely next tokens stored per position.
      rows_per_pass: number of rows that the target reads together.
      sources: index of the first row of every source, by the digest of the source's rows.
      shards: index of the first row of every shard, followed by the total number of rows.
    """

    target: str
    target_dtype: Dtype
    context_layers: tuple[int, ...]
    raw_layers: bool = False
    top_k: int
    rows_per_pass: int
    sources: dict[str, int]
    shards: list[int]

    @property
    def digest(self) -> str:
        """SHA-256 digest of all fields, in hexadecimal."""
        # Leave out defaults, so that features written before a field existed keep their digest.
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def read_index(folder: Path) -> FeatureIndex | None:
    """Read `index.json` of a folder of features; None if there is no such file.

    Raises:
      InputError: the file is not an index of features.
    """
    path = folder / "index.json"
    if not path.is_file():
        return None
    try:
        return FeatureIndex.model_validate_json(path.read_bytes())
    except ValidationError:
        raise InputError(
            f"{path} is not an index of features; set features to another folder."
        ) from None


def shard_path(folder: Path, shard: int) -> Path:
    """Path of the file of a shard, which is given by its number."""
    return folder / f"{shard:05}.safetensors"


def open_features(
    folder: Path,
    target: str,
    target_dtype: str,
    context_layers: tuple[int, ...],
    raw_layers: bool,
    sources: Mapping[str, str],
    length: int,
) -> tuple[FeatureIndex, list[ReadRow]]:
    """Open complete features; return their index, and a reader of the rows of every source.

    Args:
      folder: folder of the features.
      target: digest of the target's files.
      target_dtype: dtype of the target.
      context_layers: target layers whose outputs are read; the features may have further layers.
      raw_layers: whether these outputs are needed without the target's final norm.
      sources: digest of the rows of each source, by the source's name.
      length: T, the number of tokens of a row.

    Raises:
      InputError: the features are missing, incomplete or damaged, or were written for another
        target, other settings or other data.
    """
    index = read_index(folder)
    if index is None:
        raise InputError(
            f"{folder} holds no features; write them with `python -m train features` and the "
            "arguments of this run."
        )
    layers = index.context_layers
    how = {True: "layers as they are", False: "layers through the final norm"}
    for name, kept, needed, fits in (
        ("target", index.target[:8], target[:8], index.target == target),
        ("target_dtype", index.target_dtype, target_dtype, index.target_dtype == target_dtype),
        ("drafter.context_layers", layers, context_layers, set(context_layers) <= set(layers)),
        (
            "drafter.kind",
            how[index.raw_layers],
            how[raw_layers],
            not context_layers or index.raw_layers == raw_layers,
        ),
    ):
        if not fits:
            raise InputError(
                f"{folder} holds features of another {name} ({kept}, not {needed}); use another "
                f"folder, or the {name} that they were written with."
            )
    for name, digest in sources.items():
        if digest not in index.sources:
            raise InputError(
                f"{folder} holds no features of the rows of {name}; write them to another folder, "
                "or restore the data and its settings."
            )
    shards = len(index.shards) - 1
    written = sum(_is_whole(folder, index, shard) for shard in range(shards))
    if written < shards:
        raise InputError(
            f"{folder} holds {written} of {shards} shards; write the others with `python -m train "
            "features` and the arguments of this run."
        )
    # Indices of the layers that this run reads.
    chosen = [*map(layers.index, context_layers), len(layers)]
    return index, [
        partial(_read_row, folder, index, index.sources[digest], chosen, length)
        for digest in sources.values()
    ]


def _is_whole(folder: Path, index: FeatureIndex, shard: int) -> bool:
    path = shard_path(folder, shard)
    if not path.is_file():
        return False
    try:
        with safe_open(path, "np") as file:
            rows = file.get_slice("starts").get_shape()[0] - 1
    except SafetensorError as error:
        raise InputError(
            f"{path} cannot be read ({error}); delete it, and write it again with `python -m train "
            "features`."
        ) from None
    return rows == index.shards[shard + 1] - index.shards[shard]


def _read_row(
    folder: Path, index: FeatureIndex, first: int, chosen: list[int], length: int, row: int
) -> dict[str, np.ndarray]:
    """Read the hidden states [T, Z] and top-k tokens [T, k] of a row; zeros at padding."""
    row += first
    shard = bisect_right(index.shards, row) - 1
    place = row - index.shards[shard]
    with safe_open(shard_path(folder, shard), "np") as file:
        start, end = file.get_slice("starts")[place : place + 2]
        kept = {
            name: file.get_slice(name)[start:end] for name in ("hidden", "log_probs", "token_ids")
        }
    parts = np.split(kept["hidden"], len(index.context_layers) + 1, axis=-1)
    kept["hidden"] = np.concatenate([parts[part] for part in chosen], axis=-1)
    kept["token_ids"] = kept["token_ids"].astype(np.int32)
    padding = ((0, length - (end - start)), (0, 0))
    return {name: np.pad(values, padding) for name, values in kept.items()}
