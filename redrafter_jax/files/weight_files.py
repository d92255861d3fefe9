"""Finds the weights in the files of a model folder, and writes safetensors files.

Files are written weight by weight, some rows at a time, and read back for comparison.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from redrafter_jax.config import WeightFormat
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import field, read_json, reading
from redrafter_jax.files.locate import SINGLE_FILE
from redrafter_jax.files.quantized import MINIMUM, SCALE, pack
from redrafter_jax.files.stored import (
    ITEM_BYTES,
    READ_DTYPES,
    TABLES,
    StoredWeight,
    dtype_of,
    pieces,
    read_table,
)
from redrafter_jax.files.torch_bin import read_torch_file
from redrafter_jax.models.quantize import compiled_quantize

INDEX = f"{SINGLE_FILE}.index.json"
TORCH_FILE = "pytorch_model.bin"
_OTHERWISE = (
    "the model folder is incomplete, or holds its weights in another format than safetensors and "
    f"{TORCH_FILE} and must be converted first"
)
# safetensors' names of the dtypes that can be written.
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_DTYPE_NAMES = {str(dtype): name for name, dtype in READ_DTYPES.items() if name != "I4"} | {
    "uint8": "U8"
}


def find_weights(folder: Path, others: Sequence[str] = ()) -> dict[str, StoredWeight]:
    """Find the weights of a model folder by name, in a single file or in the shards of an index.

    Only headers are read. If a folder holds both safetensors and PyTorch's `.bin` files, the
    safetensors are read, as in transformers. If it holds neither, the first file of `others` that
    exists is read; some drafters use such files.

    Raises:
      InputError: a file is missing or truncated, a folder has both a single file and an index, or
        index and shards disagree.
    """
    present = [
        name
        for name in (SINGLE_FILE, TORCH_FILE, *others)
        if (folder / name).exists() or (folder / f"{name}.index.json").exists()
    ]
    file = (present or [SINGLE_FILE])[0]
    read = _read_safetensors if file.endswith(".safetensors") else read_torch_file
    single, index = folder / file, folder / f"{file}.index.json"
    if not index.is_file():
        return read(single)
    if single.is_file():
        raise InputError(
            f"{folder} holds both {single.name} and {index.name}; remove the wrong one."
        )
    placed = field(read_json(index), "weight_map", index, dict)
    shards = {name: folder / field(placed, name, index, str) for name in placed}
    headers = {path: read(path) for path in sorted(set(shards.values()))}
    for name, path in shards.items():
        if name not in headers[path]:
            raise InputError(
                f"{path} holds no weight {name!r}, but {index.name} names this file for it; "
                "download both again."
            )
    for path, header in headers.items():
        # A weight may be in two shards; the index then names one of them.
        if unnamed := sorted(header.keys() - shards.keys()):
            more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
            raise InputError(
                f"{path} holds the weight {unnamed[0]!r}{more}, which {index.name} does not name; "
                "add it to the index, or remove it from the file."
            )
    return {name: headers[path][name] for name, path in shards.items()}


def _read_safetensors(path: Path) -> dict[str, StoredWeight]:
    """Find the weights of a safetensors file by name; `safe_open` checks that it is complete."""
    try:
        with (
            reading(path, _OTHERWISE),
            safe_open(path, framework="numpy"),
            path.open("rb") as file,
        ):
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
    except SafetensorError as error:
        raise InputError(
            f"{path} is truncated or not a safetensors file ({error}); download it again."
        ) from None
    entries.pop("__metadata__", None)
    return {
        name: StoredWeight(
            path, name, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        )
        for name, entry in entries.items()
    }


def write_shard(
    path: Path,
    weights: Sequence[StoredWeight],
    dtype: str | None,
    forms: Mapping[str, WeightFormat],
) -> tuple[list[str], int]:
    """Write weights to a safetensors file, some rows at a time.

    The format, https://github.com/huggingface/safetensors#format, is the header's length in 8
    bytes, the header, and the arrays.

    Args:
      path: path of the file.
      weights: the weights to write.
      dtype: dtype of unquantized weights; None keeps the dtype of each weight.
      forms: formats of the weights to quantize, by name.

    Returns:
      The names of all written arrays, and their size in bytes.

    Raises:
      InputError: a weight holds numbers that its new dtype or format cannot represent.
    """
    described = {weight: _entries(weight, dtype, forms.get(weight.name)) for weight in weights}
    entries = [entry for own in described.values() for entry in own]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Sort by falling item size, so that all arrays are aligned.
    for name, kind, shape in sorted(entries, key=lambda entry: (-ITEM_BYTES[entry[1]], entry[0])):
        start, end = end, end + math.prod(shape) * ITEM_BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        for weight, own in described.items():
            places = [begin + header[name]["data_offsets"][0] for name, _, _ in own]
            for parts in _rows(weight, dtype, forms.get(weight.name)):
                for at, part in enumerate(parts):
                    file.seek(places[at])
                    places[at] += file.write(part.tobytes())
    return [name for name, _, _ in entries], end


def same_weight(
    ours: StoredWeight, theirs: StoredWeight, dtype: str | None, form: WeightFormat | None
) -> bool:
    """Whether a written weight equals the source weight, after conversion, bit for bit.

    Args:
      ours: the written weight.
      theirs: the source weight.
      dtype: dtype of unquantized weights, as in `write_shard`.
      form: format to which the source was quantized; None if it was not quantized.
    """
    rows = zip(_rows(ours, None, None), _rows(theirs, dtype, form), strict=True)
    return all(
        new.dtype == old.dtype and new.tobytes() == old.tobytes()
        for parts in rows
        for new, old in zip(*parts, strict=True)
    )


def _entries(
    weight: StoredWeight, dtype: str | None, form: WeightFormat | None
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each array that is written for a weight."""
    if weight.scale is None and form is None:
        kept = weight.dtype if dtype is None or weight.dtype in TABLES else DTYPES[dtype]
        return [(weight.name, kept, weight.shape)]
    outputs, inputs = weight.shape
    first = next(_rows(weight, dtype, form))
    names = [weight.name + ending for ending in ("", SCALE, MINIMUM)]
    return [
        (name, _DTYPE_NAMES[str(part.dtype)], (outputs, part.shape[1]))
        for name, part in zip(names, first, strict=False)
    ]


def _rows(
    weight: StoredWeight, dtype: str | None, form: WeightFormat | None
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield rows of the arrays to write, some rows at a time, in the order of `_entries`.

    The arrays are the numbers of a weight, or its codes, scales and minima.
    """
    if weight.dtype in TABLES and weight.scale is None:
        yield (read_table(weight),)
        return
    if weight.scale is not None:
        groups = [np.concatenate(list(pieces(part))) for part in weight.groups]
        done = 0
        for codes in pieces(weight):
            rows = slice(done, done + len(codes))
            done += len(codes)
            packed = pack(codes) if weight.dtype == "I4" else codes
            yield packed, *(part[rows] for part in groups)
        return
    for numbers in pieces(weight):
        if form is None:
            yield (_cast(weight, numbers, jnp.dtype(dtype) if dtype else dtype_of(weight)),)
            continue
        if not np.isfinite(numbers).all():
            raise InputError(
                f"{weight.path}: weight {weight.name!r} holds numbers that are not finite, which "
                f"{form} cannot represent; use a model with finite weights."
            )
        codes, *groups = jax.device_get(compiled_quantize(jnp.asarray(numbers), form, 1))
        packed = pack(codes) if form == "int4" else codes
        yield packed, *(part for part in groups if part is not None)


def _cast(weight: StoredWeight, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = numbers.astype(dtype)
    if (np.isinf(cast) & ~np.isinf(numbers)).any():
        raise InputError(
            f"{weight.path}: weight {weight.name!r} holds numbers beyond the range of {dtype}; "
            "give another dtype."
        )
    return cast
