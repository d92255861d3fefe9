"""A weight in a file of any format, and loading it to devices."""

import math
import mmap
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from redrafter_jax.errors import InputError

# Bytes per number by safetensors' name of the dtype. I4 is not a name of safetensors: it stands for
# codes of 4 bits, each of which is unpacked to a byte.
_INTEGERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "I4": 1, "U8": 1, "BOOL": 1}
_CODES = dict.fromkeys(("I8", "I4"), np.dtype(np.int8)) | {"F8_E4M3": np.dtype(jnp.float8_e4m3fn)}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1} | _INTEGERS
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
READ_DTYPES = _DTYPES | _CODES
# The dtypes of tables, which are arrays that are not weights.
TABLES = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
# Number of elements that are read at a time.
_NUMBERS = 1 << 20
# A part of a weight: a slice for each axis.
Index = tuple[slice, ...]


class StoredWeight(NamedTuple):
    """A weight in a file: little-endian numbers in row-major order, or packed numbers.

    Attributes:
      path: path of the file.
      name: name of the weight.
      dtype: safetensors' name of the dtype, such as "BF16".
      shape: shape as stored.
      offset: byte offset of the weight in the file.
      unpack: for a packed weight, function from an index (a slice per axis) to the numbers there;
        None for other weights.
      scale: for a quantized weight, whose numbers are codes [out, in], the scales of the groups,
        [out, groups]; None for other weights.
      minimum: minima of the groups, [out, groups]; None without minima.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    unpack: Callable[[Index], np.ndarray] | None = None
    scale: "StoredWeight | None" = None
    minimum: "StoredWeight | None" = None

    @property
    def groups(self) -> "tuple[StoredWeight, ...]":
        """The scales and the minima, if the weight has them."""
        return tuple(part for part in (self.scale, self.minimum) if part is not None)

    @property
    def bytes(self) -> int:
        """Bytes of the weight on a device in its stored dtype, including scales and minima."""
        codes_in_a_byte = 2 if self.dtype == "I4" else 1
        own = math.prod(self.shape) * ITEM_BYTES[self.dtype] // codes_in_a_byte
        return own + sum(part.bytes for part in self.groups)


def check_shape(stored: StoredWeight, expected: tuple[int, ...]) -> None:
    """Refuse a weight with another shape, or with numbers that are not floating-point."""
    if stored.shape != expected:
        raise InputError(
            f"{stored.path}: weight {stored.name!r} has shape {stored.shape}, but the "
            f"configuration asks for {expected}; use files of the same model."
        )
    if stored.dtype not in _DTYPES:
        raise InputError(
            f"{stored.path}: weight {stored.name!r} is stored as {stored.dtype}; convert it to "
            f"one of the supported dtypes, {', '.join(_DTYPES)}."
        )


def dtype_of(stored: StoredWeight) -> np.dtype:
    """NumPy dtype of the numbers; codes of 4 bits are read as int8."""
    return READ_DTYPES[stored.dtype]


def same_values(first: StoredWeight, second: StoredWeight) -> bool:
    """Whether two weights hold the same numbers; floating-point dtypes may differ."""
    if first.shape != second.shape:
        return False
    numbers = zip(pieces(first), pieces(second), strict=True)
    if first.dtype == second.dtype:
        return all(one.tobytes() == other.tobytes() for one, other in numbers)
    if not {first.dtype, second.dtype} <= _DTYPES.keys():
        return False
    wide = np.float64 if "F64" in (first.dtype, second.dtype) else np.float32
    return all(
        np.array_equal(one.astype(wide), other.astype(wide), equal_nan=True)
        for one, other in numbers
    )


def is_zero(stored: StoredWeight) -> bool:
    """Whether a weight is an array of floating-point zeros."""
    if not stored.shape or stored.dtype not in _DTYPES:
        return False
    return not any(piece.any() for piece in pieces(stored))


def read_weight(
    stored: StoredWeight,
    dtype: DTypeLike,
    *,
    transpose: bool,
    sharding: NamedSharding | None = None,
) -> Shaped[Array, "..."]:
    """Load a weight to the default device or over a mesh, and wait until it is loaded.

    Host memory holds little more than the stored bytes of the weight, or its unpacked numbers in
    `dtype`. Casts and transpositions run on the device.

    Args:
      stored: the weight in its file.
      dtype: dtype of the result.
      transpose: whether to transpose the weight.
      sharding: sharding of the result over a mesh; None for the default device.

    Raises:
      InputError: the file has become shorter since its header was read.
    """
    if sharding is None:
        placed = jax.device_put(_read(stored, jnp.dtype(dtype), _full_index(stored)))
        if not transpose and placed.dtype == dtype:
            return jax.block_until_ready(placed)
    else:
        # Each shard is read separately, and only the shards of this process's devices.
        axes = (*sharding.spec, *(None,) * (len(stored.shape) - len(sharding.spec)))
        spec = PartitionSpec(*(axes[::-1] if transpose else axes))
        # Keep unpacked shards for other devices that get the same shard.
        read = partial(_read, stored, jnp.dtype(dtype))
        part = cache(read) if stored.unpack else partial(_copy, stored)
        placed = jax.make_array_from_callback(
            stored.shape, NamedSharding(sharding.mesh, spec), part
        )
    return jax.block_until_ready(_convert(placed, jnp.dtype(dtype), transpose, sharding))


def memory_map(stored: StoredWeight, dtype: DTypeLike) -> Shaped[np.ndarray, "..."]:
    """The weight as a memory map of this dtype, which reads only the parts that are used.

    Raises:
      InputError: the file has become shorter since its header was read.
    """
    try:
        return np.memmap(stored.path, np.dtype(dtype), "r", stored.offset, stored.shape)
    except ValueError:
        raise _cut_short(stored) from None


def _copy(stored: StoredWeight, index: Index | None) -> Shaped[np.ndarray, "..."]:
    """A copy of a part of a weight that is not packed.

    The copy is needed because JAX on CPUs keeps the given array itself, and a process crashes if a
    memory-mapped file is cut short.
    """
    return np.array(memory_map(stored, dtype_of(stored))[index])


def read_table(stored: StoredWeight) -> Shaped[np.ndarray, "..."]:
    """Read an array that is not a weight into host memory; its dtype must be among `TABLES`.

    Raises:
      InputError: the array has another dtype, or the file is cut short.
    """
    if stored.dtype not in TABLES:
        raise InputError(
            f"{stored.path}: {stored.name!r} is stored as {stored.dtype}; a table of whole numbers "
            f"or bools must be one of {', '.join(TABLES)}."
        )
    return np.array(memory_map(stored, TABLES[stored.dtype]))


def pieces(stored: StoredWeight) -> Iterator[Shaped[np.ndarray, "..."]]:
    """Yield the rows of a weight in its stored dtype, some rows at a time.

    Raises:
      InputError: the file has become shorter since its header was read.
    """
    for rows in _unrounded(stored, _full_index(stored)):
        yield rows.astype(dtype_of(stored), copy=False)


def _unrounded(stored: StoredWeight, index: Index) -> Iterator[Shaped[np.ndarray, "..."]]:
    """Yield rows of a part as they are unpacked, possibly with more precision than the dtype."""
    if not stored.shape:  # read a scalar as one row
        stored, index = stored._replace(shape=(1,)), (slice(None),)
    first, *others = index
    start, stop, _ = first.indices(stored.shape[0])
    step = max(_NUMBERS // max(math.prod(stored.shape[1:]), 1), 1)
    read = stored.unpack or partial(_read_rows, stored)
    for row in range(start, stop, step):
        yield read((slice(row, min(row + step, stop)), *others))


def _full_index(stored: StoredWeight) -> Index:
    return (slice(None),) * len(stored.shape)


def _read_rows(stored: StoredWeight, index: Index) -> Shaped[np.ndarray, "..."]:
    """Read whole rows of a weight that is not packed."""
    rows, dtype, columns = index[0], dtype_of(stored), math.prod(stored.shape[1:])
    start = stored.offset + rows.start * columns * dtype.itemsize
    count = (rows.stop - rows.start) * columns
    numbers = np.fromfile(stored.path, dtype, count, offset=start)
    if numbers.size != count:
        raise _cut_short(stored)
    return numbers.reshape(-1, *stored.shape[1:])


def _read(stored: StoredWeight, dtype: np.dtype, index: Index) -> Shaped[np.ndarray, "..."]:
    """Read a part of a weight; packed numbers are cast here, other numbers later on the device."""
    dtype = dtype if stored.unpack else dtype_of(stored)
    sizes = [len(range(*one.indices(size))) for one, size in zip(index, stored.shape, strict=True)]
    # An anonymous map returns its pages to the system when it is freed; heap blocks would pile up.
    content = mmap.mmap(-1, max(math.prod(sizes) * dtype.itemsize, 1))
    values = np.frombuffer(content, dtype, math.prod(sizes)).reshape(sizes or (1,))
    done = 0
    for piece in _unrounded(stored, index):
        values[done : done + len(piece)] = piece
        done += len(piece)
    return values.reshape(sizes)


def _cut_short(stored: StoredWeight) -> InputError:
    return InputError(f"{stored.path} was cut short while it was read; load it again.")


@partial(jax.jit, static_argnums=(1, 2, 3))
def _convert(
    x: Shaped[Array, "..."], dtype: np.dtype, transpose: bool, sharding: NamedSharding | None
) -> Shaped[Array, "..."]:
    converted = (x.T if transpose else x).astype(dtype)
    return converted if sharding is None else jax.lax.with_sharding_constraint(converted, sharding)
