"""Weights in PyTorch's `.bin` files: where they lie, read without PyTorch.

Since version 1.6 `torch.save` writes a zip archive: `data.pkl` describes the tensors, and each
storage is a record of its own, uncompressed. So a weight can be read from its place in the file, as
one of a safetensors file
(https://github.com/pytorch/pytorch/blob/v2.9.0/docs/source/notes/serialization.rst).
"""

import math
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from redrafter_jax.checkpoints.stored import ITEM_BYTES, Stored
from redrafter_jax.checkpoints.torch_pickle import Storage, Tensor, read_pickle
from redrafter_jax.errors import InputError

# The description of a thousand weights takes a tenth of a megabyte.
_LONGEST_PICKLE = 1 << 26
_LOCAL_HEADER = 30


class _Record(NamedTuple):
    """A file of the archive, by the place of its bytes."""

    offset: int
    bytes: int


def read_torch_file(path: Path) -> dict[str, Stored]:
    """Every weight of a file of `torch.save`; of the weights themselves nothing is read.

    Raises:
      InputError: the file is missing, truncated, of torch before 1.6 or big-endian; it holds
        something else than a dictionary of tensors, or one that does not lie in one piece.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; the model folder is incomplete.") from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None


def _read(path: Path, file: BinaryIO) -> dict[str, Stored]:
    records = _records(path, file)
    described = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(described) != 1:
        raise InputError(f"{path} is a zip archive, but none that torch.save writes.")
    root = described[0].removesuffix("data.pkl")

    def content(name: str, longest: int) -> bytes:
        record = records[root + name]
        if record.bytes > longest:
            raise InputError(f"{path} has {record.bytes} bytes of {name}; the most is {longest}.")
        file.seek(record.offset)
        return file.read(record.bytes)

    # Files of torch before 2.1 do not say.
    if root + "byteorder" in records and content("byteorder", 16) != b"little":
        raise InputError(
            f"{path} was not written by a little-endian machine; save it again on one, or as "
            "safetensors."
        )
    weights = read_pickle(content("data.pkl", _LONGEST_PICKLE), path)
    if not isinstance(weights, dict):
        raise InputError(f"{path} holds a {type(weights).__name__}, no dictionary of weights.")
    return {name: _place(path, name, value, root, records) for name, value in weights.items()}


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
        start = _content_start(file, entry.header_offset, end)
        if start is None or start + entry.file_size > end:
            raise InputError(f"{path} is truncated or damaged at {entry.filename}.")
        records[entry.filename] = _Record(start, entry.file_size)
    return records


def _content_start(file: BinaryIO, header: int, end: int) -> int | None:
    """The place behind a local header; None where there is no header.

    It repeats the name, and torch fills it up so that the content starts at a multiple of 64.
    """
    if not 0 <= header < end:
        return None
    file.seek(header)
    content = file.read(_LOCAL_HEADER)
    if not content.startswith(b"PK\x03\x04"):
        return None
    name, extra = (int.from_bytes(content[at : at + 2], "little") for at in (26, 28))
    return header + _LOCAL_HEADER + name + extra


def _place(
    path: Path, name: object, value: object, root: str, records: dict[str, _Record]
) -> Stored:
    if not isinstance(name, str) or not isinstance(value, Tensor):
        raise InputError(
            f"{path} holds a {type(value).__name__} under {name!r}, no weight; save the state "
            "dictionary of the model alone."
        )
    storage = value.storage
    record = _record_of(path, name, storage, records.get(f"{root}data/{storage.key}"))
    size = math.prod(value.shape)
    if not size:
        return Stored(path, name, storage.dtype, value.shape, record.offset)
    if value.offset + size > storage.numbers:
        raise InputError(
            f"{path}: weight {name!r} ends at number {value.offset + size} of a storage of "
            f"{storage.numbers}; the file is damaged."
        )
    if not _in_one_piece(value.shape, value.strides):
        raise InputError(
            f"{path}: weight {name!r} of shape {value.shape} has the strides {value.strides}, so "
            "it does not lie in one piece; save it again after .contiguous()."
        )
    offset = record.offset + value.offset * ITEM_BYTES[storage.dtype]
    return Stored(path, name, storage.dtype, value.shape, offset)


def _record_of(path: Path, name: str, storage: Storage, record: _Record | None) -> _Record:
    expected = storage.numbers * ITEM_BYTES[storage.dtype]
    if record is None or record.bytes != expected:
        found = "is missing" if record is None else f"has {record.bytes} bytes"
        raise InputError(
            f"{path}: the record {storage.key!r} of weight {name!r} {found}, not {expected} bytes; "
            "the file is damaged."
        )
    return record


def _in_one_piece(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether numbers lie in row-major order without gaps; along an axis of one nothing moves."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
