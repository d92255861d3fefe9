"""The weights of a model folder: which files hold them, where each lies, and how they are written.

Safetensors are written weight by weight, some rows at a time, and read back to compare.
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
# Safetensors' names of the dtypes that can be asked for.
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_DTYPE_NAMES = {str(dtype): name for name, dtype in READ_DTYPES.items() if name != "I4"} | {
    "uint8": "U8"
}


def find_weights(folder: Path, others: Sequence[str] = ()) -> dict[str, StoredWeight]:
    """Every weight of a model folder: of its one file, or of the shards that its index names.

    Only headers are read. Of a folder that holds both, safetensors are taken and PyTorch's `.bin`
    files are not looked at: they are the same weights again, as transformers has it. The `others`,
    as some drafters' files are called, are read where there are neither.

    Raises:
      InputError: a file is missing or truncated, there are two sources, or index and shards
        disagree.
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
            f"{folder} holds both {single.name} and {index.name}; remove the one that is not meant."
        )
    placed = field(read_json(index), "weight_map", index, dict)
    shards = {name: folder / field(placed, name, index, str) for name in placed}
    headers = {path: read(path) for path in sorted(set(shards.values()))}
    for name, path in shards.items():
        if name not in headers[path]:
            raise InputError(f"{path} holds no weight {name!r}, which the index places there.")
    for path, header in headers.items():
        # A weight may lie in two shards, of which the index means one.
        if unnamed := sorted(header.keys() - shards.keys()):
            more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
            raise InputError(
                f"{path} holds the weight {unnamed[0]!r}{more}, which {index.name} does not name; "
                "add it to the index, or take it out of the file."
            )
    return {name: headers[path][name] for name, path in shards.items()}


def _read_safetensors(path: Path) -> dict[str, StoredWeight]:
    """What a safetensors file says it holds; the library makes sure that the file is whole."""
    try:
        with (
            reading(path, _OTHERWISE),
            safe_open(path, framework="numpy"),
            path.open("rb") as file,
        ):
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error}).") from None
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
    """One safetensors file: the length of its header in 8 bytes, the header, the weights.

    https://github.com/huggingface/safetensors#format.

    Args:
      path: of the file.
      weights: to write.
      dtype: of plain weights; None is their own.
      forms: of the weights that are quantized on the way, by name.

    Returns:
      The names of all that was written, and its bytes.

    Raises:
      InputError: a weight holds numbers that its new dtype or format cannot stand for.
    """
    described = {weight: _entries(weight, dtype, forms.get(weight.name)) for weight in weights}
    entries = [entry for own in described.values() for entry in own]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The widest numbers first: then all lie at multiples of their own size.
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
    """Whether what was written is what is read of the source, bit for bit.

    Args:
      ours: as it was written.
      theirs: its source.
      dtype: as in `write_shard`.
      form: that it was quantized to, if it was.
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
    """Name, dtype and shape of all that is written of a weight, as `_rows` hands it out."""
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
    """Rows of a weight as they are written, some at a time: numbers, or codes and scales."""
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
                f"{form} cannot stand for."
            )
        codes, *groups = jax.device_get(compiled_quantize(jnp.asarray(numbers), form, 1))
        packed = pack(codes) if form == "int4" else codes
        yield packed, *(part for part in groups if part is not None)


def _cast(weight: StoredWeight, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = numbers.astype(dtype)
    if (np.isinf(cast) & ~np.isinf(numbers)).any():
        raise InputError(
            f"{weight.path}: weight {weight.name!r} holds numbers beyond the range of {dtype}."
        )
    return cast
