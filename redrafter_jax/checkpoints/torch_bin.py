"""Weights in PyTorch's `.bin` files: where they lie, read without PyTorch.

Since version 1.6 `torch.save` writes a zip archive: `data.pkl` describes the tensors, and each
storage is a record of its own, uncompressed. So a weight can be read from its place in the file, as
one of a safetensors file
(https://github.com/pytorch/pytorch/blob/v2.9.0/docs/source/notes/serialization.rst).
"""

import math
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from redrafter_jax.checkpoints.config_files import reading
from redrafter_jax.checkpoints.stored import ITEM_BYTES, StoredWeight
from redrafter_jax.checkpoints.torch_pickle import Tensor, read_pickle
from redrafter_jax.errors import InputError

# A thousand weights take a tenth of a megabyte; any byte may take a hundred once it is read.
_LONGEST_PICKLE = 1 << 22
_LOCAL_HEADER = 30
# Where the bytes of a record of the archive begin in the file, and how many there are.
_Record = tuple[int, int]


def read_torch_file(path: Path) -> dict[str, StoredWeight]:
    """Every weight of a file of `torch.save`; of the weights themselves nothing is read.

    Raises:
      InputError: the file is missing, truncated, of torch before 1.6 or big-endian; it holds
        something else than a dictionary of tensors, or one that does not lie in one piece.
    """
    with reading(path, "the model folder is incomplete"), path.open("rb") as file:
        return _read(path, file)


def _read(path: Path, file: BinaryIO) -> dict[str, StoredWeight]:
    records = _records(path, file)
    described = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(described) != 1:
        raise InputError(f"{path} is a zip archive, but none that torch.save writes.")
    root = described[0].removesuffix("data.pkl")

    def content(name: str, longest: int) -> bytes:
        start, size = records[root + name]
        if size > longest:
            raise InputError(f"{path} has {size} bytes of {name}; the most is {longest}.")
        file.seek(start)
        return file.read(size)

    # Files of torch before 2.1 do not say.
    if root + "byteorder" in records and content("byteorder", 16) != b"little":
        raise InputError(
            f"{path} was not written by a little-endian machine; save it again on one, or as "
            "safetensors."
        )
    weights = read_pickle(content("data.pkl", _LONGEST_PICKLE), path)
    if not isinstance(weights, dict):
        raise InputError(f"{path} holds one {type(weights).__name__}, not weights by name.")
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path} holds {name!r:.60}, of type {type(value).__name__}, which is not a "
                "weight; save the state dictionary of the model alone."
            )
    return {
        name: _place(path, name, value, records.get(f"{root}data/{value.storage.key}"))
        for name, value in weights.items()
    }


def _records(path: Path, file: BinaryIO) -> dict[str, _Record]:
    """Every file of the archive by its name."""
    magic = file.read(2)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
        # Before 1.6: pickles one after the other, of protocol 2.
        if magic == b"\x80\x02":
            raise InputError(
                f"{path} is in the format of torch before 1.6; write it again where torch is "
                "installed: torch.save(torch.load(path, weights_only=True), path)."
            ) from None
        raise InputError(f"{path} is truncated or no file of torch.save.") from None
    end = file.seek(0, 2)
    records = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise InputError(
                f"{path} holds {entry.filename} compressed, which torch.save never does."
            )
        # The local header repeats the name; torch fills it up so that the content is aligned.
        file.seek(min(max(entry.header_offset, 0), end))
        header = file.read(_LOCAL_HEADER)
        lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = entry.header_offset + _LOCAL_HEADER + sum(lengths)
        if not header.startswith(b"PK\x03\x04") or start + entry.file_size > end:
            raise InputError(f"{path} is truncated or damaged at {entry.filename}.")
        records[entry.filename] = (start, entry.file_size)
    return records


def _place(path: Path, name: str, tensor: Tensor, record: _Record | None) -> StoredWeight:
    storage, size = tensor.storage, math.prod(tensor.shape)
    expected = storage.numbers * ITEM_BYTES[storage.dtype]
    if record is None or record[1] != expected:
        found = f"has {record[1]} bytes" if record else "is missing"
        raise InputError(
            f"{path}: the record {storage.key!r} of weight {name!r} {found}, not {expected} bytes; "
            "the file is damaged."
        )
    if size and tensor.offset + size > storage.numbers:
        raise InputError(
            f"{path}: weight {name!r} ends at number {tensor.offset + size} of a storage of "
            f"{storage.numbers}; the file is damaged."
        )
    # Row-major order without gaps; along an axis of one nothing moves.
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    moves = zip(tensor.shape, tensor.strides, steps, strict=True)
    if size and any(count > 1 and stride != step for count, stride, step in moves):
        raise InputError(
            f"{path}: weight {name!r} of shape {tensor.shape} has the strides {tensor.strides}, so "
            "it does not lie in one piece; save it again after .contiguous()."
        )
    start = record[0] + (tensor.offset * ITEM_BYTES[storage.dtype] if size else 0)
    return StoredWeight(path, name, storage.dtype, tensor.shape, start)
