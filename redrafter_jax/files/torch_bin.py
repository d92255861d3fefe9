"""Finds the weights in PyTorch's `.bin` files without PyTorch.

Since version 1.6, `torch.save` writes a zip archive: `data.pkl` describes the tensors, and each
storage is an uncompressed record. So a weight can be read at its offset in the file, as in a
safetensors file
(https://github.com/pytorch/pytorch/blob/v2.9.0/docs/source/notes/serialization.rst).

A pickle is a program that may call any function. This unpickler runs no code of `data.pkl`. It
accepts only the instructions that torch writes, and only the names in `_CALLS` and `_STORAGES`,
which become descriptions. A limit on the size of the pickle bounds time and memory. The
instructions are listed in https://github.com/python/cpython/blob/3.12/Lib/pickletools.py, and those
that torch writes in
https://github.com/pytorch/pytorch/blob/v2.9.0/torch/_weights_only_unpickler.py.
"""

import io
import math
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import reading
from redrafter_jax.files.stored import ITEM_BYTES, StoredWeight

# Limit on the bytes of the pickle. A thousand weights take 0.1 MB; unpickling may take up to a
# hundred times the size in memory.
_LONGEST_PICKLE = 1 << 22
_LOCAL_HEADER = 30
# torch's classes of storages, and safetensors' names of their dtypes.
_STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_INSTRUCTIONS = {
    *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "BUILD", "REDUCE", "BINPERSID"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
}
_MOST_AXES = 64
# The offset in the file and the number of bytes of a record in the archive.
_Record = tuple[int, int]


class Storage(NamedTuple):
    """A storage: key of its record, safetensors' name of the dtype, and number of elements."""

    key: str
    dtype: str
    numbers: int


class Tensor(NamedTuple):
    """A view of a storage; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, StoredWeight]:
    """The weights of a file of `torch.save` by name, without reading their contents.

    Raises:
      InputError: the file is missing, truncated, written by torch before 1.6 or big-endian; the
        file does not hold a dictionary of tensors; or a tensor is not contiguous.
    """
    with reading(path, "the model folder is incomplete"), path.open("rb") as file:
        return _read(path, file)


def _read(path: Path, file: BinaryIO) -> dict[str, StoredWeight]:
    records = _records(path, file)
    described = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(described) != 1:
        raise InputError(
            f"{path} is a zip archive, but not one that torch.save wrote; save the weights again."
        )
    root = described[0].removesuffix("data.pkl")

    def content(name: str, longest: int) -> bytes:
        start, size = records[root + name]
        if size > longest:
            raise InputError(
                f"{path} has {size} bytes of {name}, above the limit of {longest}; save the model "
                "as safetensors."
            )
        file.seek(start)
        return file.read(size)

    # Files of torch before 2.1 do not state the byte order.
    if root + "byteorder" in records and content("byteorder", 16) != b"little":
        raise InputError(
            f"{path} was written by a big-endian machine; save it again on a little-endian "
            "machine, or as safetensors."
        )
    weights = _read_pickle(content("data.pkl", _LONGEST_PICKLE), path)
    if not isinstance(weights, dict):
        raise InputError(
            f"{path} holds one {type(weights).__name__}, not a dictionary of weights; save the "
            "state dictionary of the model."
        )
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path} holds {name!r:.60}, of type {type(value).__name__}, which is not a "
                "weight; save only the state dictionary of the model."
            )
    return {
        name: _place(path, name, value, records.get(f"{root}data/{value.storage.key}"))
        for name, value in weights.items()
    }


def _records(path: Path, file: BinaryIO) -> dict[str, _Record]:
    """The records of the archive by name."""
    magic = file.read(2)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
        # torch before 1.6 wrote several pickles of protocol 2, one after the other.
        if magic == b"\x80\x02":
            raise InputError(
                f"{path} is in the format of torch before 1.6; write it again where torch is "
                "installed: torch.save(torch.load(path, weights_only=True), path)."
            ) from None
        raise InputError(
            f"{path} is truncated or not a file of torch.save; download it again."
        ) from None
    end = file.seek(0, 2)
    records = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise InputError(
                f"{path} holds {entry.filename} compressed, which torch.save never writes; save "
                "the weights again."
            )
        # The local header repeats the name; torch pads the header to align the content.
        file.seek(min(max(entry.header_offset, 0), end))
        header = file.read(_LOCAL_HEADER)
        lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = entry.header_offset + _LOCAL_HEADER + sum(lengths)
        if not header.startswith(b"PK\x03\x04") or start + entry.file_size > end:
            raise InputError(
                f"{path} is truncated or damaged at {entry.filename}; download it again."
            )
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
            f"{path}: weight {name!r} ends at element {tensor.offset + size} of a storage of "
            f"{storage.numbers}; the file is damaged."
        )
    # Require row-major order without gaps; the stride of an axis of size 1 does not matter.
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    moves = zip(tensor.shape, tensor.strides, steps, strict=True)
    if size and any(count > 1 and stride != step for count, stride, step in moves):
        raise InputError(
            f"{path}: weight {name!r} of shape {tensor.shape} has the strides {tensor.strides}, so "
            "it is not contiguous; save it again after .contiguous()."
        )
    start = record[0] + (tensor.offset * ITEM_BYTES[storage.dtype] if size else 0)
    return StoredWeight(path, name, storage.dtype, tensor.shape, start)


def _read_pickle(content: bytes, path: Path) -> Any:
    """The value of a pickle, with tensors and parameters as `Tensor`.

    Args:
      content: the pickle.
      path: path of its file, for error messages.

    Raises:
      InputError: the pickle is damaged, or asks for more than tensors.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except _RefusedError as error:
        raise InputError(
            f"{path} is refused: its pickle refers to {error}, which weights do not need and which "
            "could run any code; if you trust the file, load it with torch and save its weights as "
            "safetensors."
        ) from None
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, OverflowError, struct.error),
    ) as error:
        raise InputError(f"{path} is damaged: its data.pkl cannot be read ({error}).") from None


class _RefusedError(Exception):
    """A pickle asks for something other than tensors; the message names it."""


class Name(NamedTuple):
    """The object that stands for a name of `_CALLS` or `_STORAGES` in a pickle.

    It is not a function, because the pickle instruction BUILD could change a function's state.
    """

    name: str

    def __call__(self, *arguments: Any) -> Any:
        if self.name not in _CALLS:
            raise _RefusedError(f"a call of {self.name!r}")
        return _CALLS[self.name](*arguments)


class Dictionary(dict[Any, Any]):
    """What a dict or an OrderedDict of a pickle becomes."""

    __slots__ = ()

    def __init__(self) -> None:
        """Create an empty dictionary; there are no arguments, so no call can copy another one."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the state of a pickled dictionary."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an item. Only keys that are quick to hash are allowed; nested tuples are not."""
        if type(key) not in (str, int):
            raise TypeError(f"a {type(key).__name__} as a key")
        if type(key) is int and not 0 <= key < 1 << 32:  # larger ones may share a hash
            raise TypeError(f"{key} as a key")
        super().__setitem__(key, value)


class _Dispatch(dict[int, Any]):
    """The handlers of instructions; unknown instructions are errors."""

    def __missing__(self, code: int) -> Any:
        if code not in _NAMES:
            raise pickle.UnpicklingError(f"byte {code} is not an instruction")
        raise _RefusedError(f"the pickle instruction {_NAMES[code]}")


class _Unpickler(pickle._Unpickler):
    """The unpickler that is written in Python.

    The unpickler in C keeps its memo in an array whose length a file could choose.
    """

    dispatch = _Dispatch(
        {
            code: pickle._Unpickler.dispatch[code]
            for code, name in _NAMES.items()
            if name in _INSTRUCTIONS
        }
    )
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Dictionary())

    def find_class(self, module: str, name: str) -> Name:
        found = Name(f"{module}.{name}")
        if found.name not in _CALLS and found.name not in _STORAGES:
            raise _RefusedError(repr(found.name))
        return found

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, count = _require(pid, tuple)
        if kind != "storage":
            raise ValueError("something other than a storage in its place")
        dtype = _STORAGES[_require(storage, Name).name]
        return Storage(_require(key, str), dtype, _require(count, int))


def _tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any,
    _hooks: Any,
    metadata: Any = None,
) -> Tensor:
    if metadata:
        raise ValueError("a tensor that is conjugated or negated")
    if len(_require(shape, tuple)) != len(_require(strides, tuple)):
        raise ValueError("a tensor whose numbers of sizes and strides differ")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor of {len(shape)} axes")
    for size in (offset, *shape, *strides):
        if not 0 <= _require(size, int) < 1 << 63:
            raise ValueError("a tensor with an impossible size")
    return Tensor(_require(storage, Storage), offset, shape, strides)


def _parameter(tensor: Any, _requires_grad: Any, _hooks: Any) -> Tensor:
    return _require(tensor, Tensor)


_CALLS = {
    "collections.OrderedDict": Dictionary,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}


def _require(value: Any, expected: type) -> Any:
    # Not isinstance, for which a named tuple is a tuple, and True an int.
    if type(value) is not expected:
        raise TypeError(f"{type(value).__name__} in the place of {expected.__name__}")
    return value
