"""Safetensors files written weight by weight, some rows at a time, and read back to compare."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redrafter_jax.checkpoints.quantized import MINIMUM, SCALE, pack
from redrafter_jax.checkpoints.stored import ITEM_BYTES, READ_DTYPES, StoredWeight, dtype_of, pieces
from redrafter_jax.config import WeightFormat
from redrafter_jax.errors import InputError
from redrafter_jax.models.quantize import compiled_quantize

# Safetensors' names of the dtypes that can be asked for.
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_DTYPE_NAMES = {str(dtype): name for name, dtype in READ_DTYPES.items() if name != "I4"} | {
    "uint8": "U8"
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
        return [(weight.name, DTYPES[dtype] if dtype else weight.dtype, weight.shape)]
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
