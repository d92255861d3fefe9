"""Reads the header of a GGUF file or of a split model: its fields and the offsets of its tensors.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf`
package takes seconds for a vocabulary, because it makes several arrays for each string. It also
does not check counts against the size of the file. The reader here checks that data lies within the
file before it reads or allocates anything.
"""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import field, reading
from redrafter_jax.files.locate import GGUF_MAGIC

_VERSIONS = (2, 3)
_ALIGNMENT = 32
# Limit on the bytes of a string and on the entries of an array, far beyond any vocabulary or chat
# template.
_LONGEST = 1 << 24
_MOST_AXES = 4
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
# Numbers of GGUF's types, and struct's letters for the scalar types.
_UINT32, _FLOAT32, _STRING, _ARRAY, _UINT64 = 4, 6, 8, 9, 10
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      path: path of the file.
      kind: ggml's name of the format in which its numbers are stored, such as "Q4_K".
      shape: the shape in NumPy's order, which is the reverse of GGUF's.
      offset: byte offset of the tensor in the file.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The header of a GGUF model.

    Attributes:
      path: path of the file, or of the first part of a split model.
      values: fields by name.
      tensors: tensors of all parts, by name.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Tensor]

    def get(self, name: str, expected: type, default: Any = None) -> Any:
        """The value of a field, or the default.

        Raises:
          InputError: the field is missing and has no default, or has another type.
        """
        return field(self.values, name, self.path, expected, default)


def read_header(path: Path) -> Header:
    """The header of a GGUF file, or of all parts of a split model if the file is one of them.

    Raises:
      InputError: a file is missing, damaged, cut short or in another format, or the parts do not
        belong together.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        header = _read_file(path)
        if (count := header.get("split.count", int, 1)) > 1:
            raise InputError(
                f"{path} is one of {count} parts; put all parts into one folder, with names that "
                f"end in -00001-of-{count:05}.gguf and so on."
            )
        return header
    stem, _, total, suffix = named.groups()
    count = int(total)
    paths = [path.with_name(f"{stem}-{part:05}-of-{total}{suffix}") for part in range(1, count + 1)]
    missing = [part for part in paths if not part.is_file()]
    if missing or not paths:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{(missing or [path])[0]}{more} is missing; the model has {count} parts, so download "
            "all of them into one folder."
        )
    headers = [_read_file(part) for part in paths]
    tensors: dict[str, Tensor] = {}
    for number, header in enumerate(headers):
        stated = header.get("split.no", int), header.get("split.count", int)
        if stated != (number, count):
            raise InputError(
                f"{header.path} states that it is part {stated[0] + 1} of {stated[1]}; the file "
                "was renamed or belongs to another model, so download all parts again."
            )
        if repeated := sorted(tensors.keys() & header.tensors.keys()):
            raise InputError(
                f"{header.path} holds the tensor {repeated[0]!r}, which an earlier part holds too; "
                "use the parts of one model."
            )
        tensors |= header.tensors
    expected = headers[0].get("split.tensors.count", int, len(tensors))
    if expected != len(tensors):
        raise InputError(
            f"{paths[0]} states {expected} tensors in all, but the {count} parts hold "
            f"{len(tensors)}; download them again."
        )
    return Header(paths[0], headers[0].values, tensors)


class _Reader:
    """Reads values one after the other and refuses to read past the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.position = 0

    def take(self, size: int) -> int:
        """Skip `size` bytes; return the offset of the first skipped byte."""
        start, self.position = self.position, self.position + size
        if self.position > len(self.content):
            raise cut_short(self.path, self.position, len(self.content))
        return start

    def numbers(self, kind: int, count: int = 1) -> tuple[Any, ...]:
        """Read `count` numbers of a type."""
        if kind not in _SCALARS:
            raise InputError(
                f"{self.path} holds a value of type {kind} at byte {self.position}, which GGUF "
                "does not define; the file is damaged."
            )
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        return layout.unpack_from(self.content, self.take(layout.size))

    def number(self, kind: int) -> Any:
        """Read one number of a type."""
        return self.numbers(kind)[0]

    def size(self, what: str) -> int:
        """Read a number of bytes or of entries."""
        size = self.number(_UINT64)
        if size > _LONGEST:
            raise InputError(
                f"{self.path} states {what} of length {size}, above the limit of {_LONGEST}; the "
                "file is damaged."
            )
        return size

    def string(self) -> str:
        """Read a string: its length in bytes, followed by UTF-8."""
        size = self.size("a string")
        start = self.take(size)
        try:
            return self.content[start : start + size].decode()
        except UnicodeDecodeError:
            raise InputError(
                f"{self.path} holds a string at byte {start} that is not UTF-8; the file is "
                "damaged."
            ) from None

    def value(self, kind: int) -> Any:
        """Read a value of a type; arrays become lists."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, size = self.number(_UINT32), self.size("an array")
            if kind == _STRING:
                return [self.string() for _ in range(size)]
            return list(self.numbers(kind, size))
        number = self.number(kind)
        # Return the shortest decimal: 1e-05 and not 9.999999747378752e-06.
        return float(str(np.float32(number))) if kind == _FLOAT32 else number


def _read_file(path: Path) -> Header:
    try:
        with (
            reading(path, "give the path of a GGUF file"),
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _read(_Reader(path, content))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is empty; download it again.") from None


def _read(reader: _Reader) -> Header:
    path = reader.path
    start = reader.content[: len(GGUF_MAGIC)]
    if start != GGUF_MAGIC:
        raise InputError(
            f"{path} is not a GGUF file: it begins with {start!r}, not {GGUF_MAGIC!r}; download it "
            "again."
        )
    reader.take(len(GGUF_MAGIC))
    version = reader.number(_UINT32)
    if version not in _VERSIONS:
        raise InputError(
            f"{path} is GGUF version {version}, or big-endian; supported are little-endian files "
            f"of version {' and '.join(map(str, _VERSIONS))}."
        )
    tensor_count, value_count = reader.number(_UINT64), reader.number(_UINT64)
    values: dict[str, Any] = {}
    for _ in range(value_count):
        name = reader.string()
        if name in values:
            raise InputError(f"{path} states the field {name!r} twice; the file is damaged.")
        values[name] = reader.value(reader.number(_UINT32))
    alignment = field(values, "general.alignment", path, int, _ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise InputError(f"{path} states general.alignment={alignment}; it must be a power of two.")
    described = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in described:
            raise InputError(f"{path} holds the tensor {name!r} twice; the file is damaged.")
        described[name] = _describe_tensor(reader, name)
    data = -(-reader.position // alignment) * alignment
    tensors = {
        name: tensor._replace(offset=data + tensor.offset) for name, tensor in described.items()
    }
    ends = [one.offset + stored_bytes(one.kind, one.shape) for one in tensors.values()]
    if max(ends, default=0) > len(reader.content):
        raise cut_short(path, max(ends), len(reader.content))
    return Header(path, values, tensors)


def _describe_tensor(reader: _Reader, name: str) -> Tensor:
    """Read the description of the next tensor; its offset counts from the start of the data."""
    path, axes = reader.path, reader.number(_UINT32)
    if axes > _MOST_AXES:
        raise InputError(
            f"{path}: tensor {name!r} has {axes} axes, above the limit of {_MOST_AXES}; the file "
            "is damaged."
        )
    shape = tuple(reader.number(_UINT64) for _ in range(axes))[::-1]
    number, offset = reader.number(_UINT32), reader.number(_UINT64)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise InputError(
            f"{path}: tensor {name!r} is stored in type {number}, which this version does not "
            "know; convert the model to another quantization."
        ) from None
    block, _ = GGML_QUANT_SIZES[kind]
    if 0 in shape or (shape or (1,))[-1] % block:
        raise InputError(
            f"{path}: tensor {name!r} has the shape {shape}, which cannot be stored in blocks of "
            f"{block} numbers as {kind.name}; the file is damaged."
        )
    return Tensor(path, kind.name, shape, offset)


def stored_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """The size in bytes of a tensor."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return math.prod(shape) // block * size


def cut_short(path: Path, needed: int, present: int) -> InputError:
    """The error for a file that is shorter than its header says."""
    return InputError(
        f"{path} is cut short: it should have {needed:,} bytes or more and has {present:,}; "
        "download it again."
    )
