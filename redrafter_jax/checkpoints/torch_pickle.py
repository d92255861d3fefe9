"""What the pickle in a file of `torch.save` describes, read without running it.

A pickle is a program whose instructions may call anything. Here the few that describe tensors by
name are followed, and all they build are the values below, dictionaries, lists and tuples; no
object is made, nothing is imported and nothing called. What else a pickle asks for is refused.
The instructions: https://github.com/python/cpython/blob/3.12/Lib/pickletools.py; what torch writes
with them: https://github.com/pytorch/pytorch/blob/v2.9.0/torch/_weights_only_unpickler.py.
"""

import pickletools
from collections.abc import Sequence
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
_DICTIONARY = "collections.OrderedDict"
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_NAMES = {_DICTIONARY, _TENSOR, _PARAMETER, *_STORAGES}


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


class _Global(NamedTuple):
    name: str


def read_pickle(content: bytes, path: Path) -> Any:
    """The described value; tensors and parameters are `Tensor`s.

    Args:
      content: the pickle.
      path: the file it is from, for errors.

    Raises:
      InputError: it is damaged, or asks for something else than tensors.
    """
    try:
        return _Machine(path).run(content)
    except InputError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged: its data.pkl cannot be read ({error}).") from None


class _Machine:
    """The stack, the marks in it, and what was put aside to be used again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                break
            self._follow(opcode.name, argument)
        (value,) = self._stack
        return value

    def _follow(self, opcode: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINFLOAT":
                stack.append(argument)
            case "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = 0 if opcode == "EMPTY_TUPLE" else int(opcode[-1])
                stack.append(tuple(self._pop(count)))
            case "TUPLE":
                stack.append(tuple(self._pop_mark()))
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_mark())
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                self._extend(self._pop(1))
            case "APPENDS":
                self._extend(self._pop_mark())
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(self._named(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(self._named(".".join(self._pop(2))))
            case "BINPERSID":
                stack.append(_storage(*self._pop(1)))
            case "REDUCE":
                stack.append(self._described(*self._pop(2)))
            case "BUILD":
                # What a state dictionary says of itself beside its weights.
                self._pop(1)
                _require(stack[-1], dict)
            case _:
                raise self._refusal(f"the pickle instruction {opcode}")

    def _pop(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("it takes more than it has put down")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _pop_mark(self) -> list[Any]:
        taken = self._pop(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return taken

    def _set_items(self, taken: Sequence[Any]) -> None:
        # The hash of a deeply nested key would overflow the interpreter's own stack.
        keys = [_require(key, str) for key in taken[::2]]
        _require(self._stack[-1], dict).update(zip(keys, taken[1::2], strict=True))

    def _extend(self, taken: Sequence[Any]) -> None:
        _require(self._stack[-1], list).extend(taken)

    def _named(self, name: str) -> _Global:
        if name not in _NAMES:
            raise self._refusal(repr(name))
        return _Global(name)

    def _described(self, function: Any, arguments: Any) -> Any:
        """What torch would get from a call, described."""
        name = _require(function, _Global).name
        if name == _DICTIONARY:
            # Python 2 wrote its items here.
            (items,) = arguments or ([],)
            return {_require(key, str): value for key, value in items}
        if name == _PARAMETER:
            return _require(arguments[0], Tensor)
        if name == _TENSOR:
            return _tensor(*arguments)
        raise self._refusal(f"a call of {name!r}")

    def _refusal(self, what: str) -> InputError:
        return InputError(
            f"{self._path} asks for {what}, which describes no weight and might run anything; it "
            "is not followed. If you trust the file, save its weights as safetensors where torch "
            "is installed."
        )


def _storage(identity: Any) -> Storage:
    kind, storage, key, _, count = _require(identity, tuple)
    if kind != "storage":
        raise ValueError("something else in the place of a storage")
    dtype = _STORAGES[_require(storage, _Global).name]
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
    for size in (offset, *shape, *strides):
        if not 0 <= _require(size, int) < 1 << 63:
            raise ValueError("a tensor with a size that no tensor has")
    if len(shape) != len(strides):
        raise ValueError("a tensor with more sizes than strides, or fewer")
    return Tensor(_require(storage, Storage), offset, _require(shape, tuple), tuple(strides))


def _require(value: Any, expected: type) -> Any:
    # Not isinstance: a description is a tuple too, and True a number.
    if type(value) is not expected:
        raise TypeError(f"{type(value).__name__} in the place of {expected.__name__}")
    return value
