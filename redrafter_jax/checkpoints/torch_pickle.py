"""What the pickle in a file of `torch.save` describes; no code of the file is run.

A pickle is a program that may call anything. This unpickler knows only the names in `_CALLS` and
`_STORAGES`, and for each it builds a description. It follows only the instructions that torch
writes; what may be read of a pickle (`torch_bin`) bounds their time and memory.
Instructions: https://github.com/python/cpython/blob/3.12/Lib/pickletools.py; what torch writes:
https://github.com/pytorch/pytorch/blob/v2.9.0/torch/_weights_only_unpickler.py.
"""

import io
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_jax.errors import InputError

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


class Storage(NamedTuple):
    """Numbers in a record of their own: its key, safetensors' name of the dtype, how many."""

    key: str
    dtype: str
    numbers: int


class Tensor(NamedTuple):
    """A view of a storage; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickle(content: bytes, path: Path) -> Any:
    """The described value; tensors and parameters are `Tensor`s.

    Args:
      content: the pickle.
      path: the file it is from, for errors.

    Raises:
      InputError: it is damaged, or asks for something else than tensors.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except _RefusedError as error:
        raise InputError(
            f"{path} asks for {error}, which describes no weight and might run anything; it "
            "is not followed. If you trust the file, save its weights as safetensors where torch "
            "is installed."
        ) from None
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, OverflowError, struct.error),
    ) as error:
        raise InputError(f"{path} is damaged: its data.pkl cannot be read ({error}).") from None


class _RefusedError(Exception):
    """What a pickle asks for beyond tensors."""


class Name(NamedTuple):
    """A name of `_CALLS` or `_STORAGES`. A function would keep what BUILD puts into it."""

    name: str

    def __call__(self, *arguments: Any) -> Any:
        if self.name not in _CALLS:
            raise _RefusedError(f"a call of {self.name!r}")
        return _CALLS[self.name](*arguments)


class Dictionary(dict[Any, Any]):
    """For dictionaries of either kind."""

    __slots__ = ()

    def __init__(self) -> None:
        """An empty one: it is filled later, so that no call copies what the file holds once."""

    def __setstate__(self, state: Any) -> None:
        """What a state dictionary says of itself beside its weights is not kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Other keys are not hashed: of nested tuples that may take exponential time."""
        if type(key) not in (str, int):
            raise TypeError(f"a {type(key).__name__} as a key")
        if type(key) is int and not 0 <= key < 1 << 32:  # many may have one hash
            raise TypeError(f"{key} as a key")
        super().__setitem__(key, value)


class _Dispatch(dict[int, Any]):
    """What each instruction does."""

    def __missing__(self, code: int) -> Any:
        if code not in _NAMES:
            raise pickle.UnpicklingError(f"byte {code} is no instruction")
        raise _RefusedError(f"the pickle instruction {_NAMES[code]}")


class _Unpickler(pickle._Unpickler):
    """Python's own, not C's: its memo is no array, whose length the file would state."""

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
            raise ValueError("something else in the place of a storage")
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
        raise ValueError("a tensor with more sizes than strides, or fewer")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor of {len(shape)} axes")
    for size in (offset, *shape, *strides):
        if not 0 <= _require(size, int) < 1 << 63:
            raise ValueError("a tensor with a size that no tensor has")
    return Tensor(_require(storage, Storage), offset, shape, strides)


def _parameter(tensor: Any, _requires_grad: Any, _hooks: Any) -> Tensor:
    return _require(tensor, Tensor)


_CALLS = {
    "collections.OrderedDict": Dictionary,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}


def _require(value: Any, expected: type) -> Any:
    # Not isinstance: a description is a tuple too, and True a number.
    if type(value) is not expected:
        raise TypeError(f"{type(value).__name__} in the place of {expected.__name__}")
    return value
