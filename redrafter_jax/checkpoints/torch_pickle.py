"""What the pickle in a file of `torch.save` describes; no code of the file is run.

A pickle is a program that may call anything. This unpickler knows only the names in `_CALLS` and
`_STORAGES`, and for each it builds a description. The instructions are looked through first:
those that torch writes suffice, and some combinations of them take time or memory without bounds.
Instructions: https://github.com/python/cpython/blob/3.12/Lib/pickletools.py; what torch writes:
https://github.com/pytorch/pytorch/blob/v2.9.0/torch/_weights_only_unpickler.py.
"""

import io
import pickle
import pickletools
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
_WHOLE = {"BININT", "BININT1", "BININT2", "LONG1"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}
_PUT, _GET = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
_CONSUME = {"REDUCE", "BINPERSID"}
_INSTRUCTIONS = {
    *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "BUILD"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *(*_WHOLE, *_TUPLES, *_PUT, *_GET, *_CONSUME),
}
# A weight takes about 40.
_MOST_INSTRUCTIONS = 1 << 20
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
        _check_instructions(content)
        return _Unpickler(io.BytesIO(content)).load()
    except _RefusedError as error:
        raise InputError(
            f"{path} asks for {error}, which describes no weight and might run anything; it "
            "is not followed. If you trust the file, save its weights as safetensors where torch "
            "is installed."
        ) from None
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, OverflowError),
    ) as error:
        raise InputError(f"{path} is damaged: its data.pkl cannot be read ({error}).") from None


class _RefusedError(Exception):
    """What a pickle asks for beyond tensors."""


def _check_instructions(content: bytes) -> None:
    """Refuse instructions that torch does not write, and those that cost more than they describe.

    Dictionaries hash their keys, and the hash of a tuple of tuples of ... takes the interpreter's
    own stack, and exponential time where each holds the next one twice. So a tuple may hold
    something else than whole numbers only where the next instruction consumes it.
    """
    whole, below = 0, ""  # whole numbers on top of the stack, and what is below them
    nested = False  # the value on top is a tuple of something else
    memo: dict[int, bool] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if name not in _INSTRUCTIONS:
            raise _RefusedError(f"the pickle instruction {name}")
        if count >= _MOST_INSTRUCTIONS:
            raise ValueError(f"it has more than {_MOST_INSTRUCTIONS} instructions")
        if name in _PUT:
            key = len(memo) if name == "MEMOIZE" else argument
            if key > count:  # the memo is an array
                raise ValueError(f"instruction {count} puts a value aside as number {key}")
            memo[key] = nested
        elif name in _WHOLE and not nested:
            whole += 1
        elif name != "FRAME":
            if (nested and name not in _CONSUME) or (name in _GET and memo.get(argument)):
                raise ValueError("a tuple that holds more than whole numbers, kept as a value")
            length = _TUPLES.get(name)
            nested = name in _TUPLES and (below != "MARK" if length is None else whole < length)
            whole, below = 0, name


class _Name(NamedTuple):
    """A name of `_CALLS` or `_STORAGES`. A function would keep what BUILD puts into it."""

    name: str

    def __call__(self, *arguments: Any) -> Any:
        if self.name not in _CALLS:
            raise _RefusedError(f"a call of {self.name!r}")
        return _CALLS[self.name](*arguments)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Name:
        found = _Name(f"{module}.{name}")
        if found.name not in _CALLS and found.name not in _STORAGES:
            raise _RefusedError(repr(found.name))
        return found

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, count = _require(pid, tuple)
        if kind != "storage":
            raise ValueError("something else in the place of a storage")
        dtype = _STORAGES[_require(storage, _Name).name]
        return Storage(_require(key, str), dtype, _require(count, int))


class _Dictionary(dict[Any, Any]):
    __slots__ = ()

    def __init__(self) -> None:
        """An empty one: it is filled later, so that no call copies what the file holds once."""

    def __setstate__(self, state: Any) -> None:
        """What a state dictionary says of itself beside its weights is not kept."""


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
    "collections.OrderedDict": _Dictionary,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}


def _require(value: Any, expected: type) -> Any:
    # Not isinstance: a description is a tuple too, and True a number.
    if type(value) is not expected:
        raise TypeError(f"{type(value).__name__} in the place of {expected.__name__}")
    return value
