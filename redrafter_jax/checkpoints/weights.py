"""Weights of model folders: where they lie, and onto a device one at a time."""

import json
import math
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open

from redrafter_jax.checkpoints.config_files import field, read_json
from redrafter_jax.checkpoints.stored import Stored
from redrafter_jax.checkpoints.torch_bin import read_torch_file
from redrafter_jax.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
# Bytes of a weight that are compared at a time.
_PIECE = 1 << 22
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


class _Format(NamedTuple):
    """Names of one file and of the index of several, and what reads the header of each."""

    single: str
    listing: str
    header: Callable[[Path], dict[str, Stored]]


def find_weights(folder: Path) -> dict[str, Stored]:
    """Every weight of a model folder: of its one file, or of the shards that its index names.

    Only headers are read. Of a folder that holds both, safetensors are taken and PyTorch's `.bin`
    files are not looked at: they are the same weights again, as transformers has it.

    Raises:
      InputError: a file is missing or truncated, there are two sources, or index and shards
        disagree.
    """
    first, other = (
        _Format(SINGLE_FILE, INDEX, _header),
        _Format(TORCH_FILE, f"{TORCH_FILE}.index.json", read_torch_file),
    )
    has_first, has_other = (
        any((folder / name).exists() for name in (form.single, form.listing))
        for form in (first, other)
    )
    return _find(folder, other if has_other and not has_first else first)


def _find(folder: Path, form: _Format) -> dict[str, Stored]:
    single, index = folder / form.single, folder / form.listing
    if not index.is_file():
        return form.header(single)
    if single.is_file():
        raise InputError(
            f"{folder} holds both {form.single} and {form.listing}; remove the one that is not "
            "meant."
        )
    placed = field(read_json(index), "weight_map", index, dict)
    shards = {name: folder / field(placed, name, index, str) for name in placed}
    headers = {path: form.header(path) for path in sorted(set(shards.values()))}
    for name, path in shards.items():
        if name not in headers[path]:
            raise InputError(f"{path} holds no weight {name!r}, which the index places there.")
    for path, header in headers.items():
        # A weight may lie in two shards, of which the index means one.
        if others := sorted(header.keys() - shards.keys()):
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise InputError(
                f"{path} holds the weight {others[0]!r}{more}, which {form.listing} does not name; "
                "add it to the index, or take it out of the file."
            )
    return {name: headers[path][name] for name, path in shards.items()}


def check_shape(stored: Stored, expected: tuple[int, ...]) -> None:
    """Refuse a weight that is no number of the kind or shape that the configuration asks for.

    Raises:
      InputError: the shape differs, or the dtype is not one of floating-point numbers.
    """
    if stored.shape != expected:
        raise InputError(
            f"{stored.path}: weight {stored.name!r} has shape {stored.shape}, config.json asks "
            f"for {expected}."
        )
    if stored.dtype not in _DTYPES:
        raise InputError(
            f"{stored.path}: weight {stored.name!r} is stored as {stored.dtype}; supported are "
            f"{', '.join(_DTYPES)}, convert it first."
        )


def dtype_of(stored: Stored) -> np.dtype:
    """Of its numbers; it must be one of floating-point numbers."""
    return _DTYPES[stored.dtype]


def same_bytes(first: Stored, second: Stored) -> bool:
    """Whether two weights are the same numbers, stored alike."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        left = first.bytes
        while left:
            size = min(left, _PIECE)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def read_weight(
    stored: Stored, dtype: DTypeLike, *, transpose: bool, sharding: NamedSharding | None = None
) -> Float[Array, "..."]:
    """The weight on the default device, or each part of it on its own; complete when this returns.

    The host holds its stored bytes and nothing else meanwhile; it is cast and transposed on the
    device.

    Args:
      stored: where it is.
      dtype: that it gets.
      transpose: whether it is turned on the way.
      sharding: of the result, over a mesh; None is the default device.

    Raises:
      InputError: the file has become shorter since its header was read.
    """
    if sharding is not None:
        return _read_parts(stored, dtype, transpose, sharding)
    # Pages of its own, returned whole: freed blocks of a heap add up to several weights.
    content = mmap.mmap(-1, max(stored.bytes, 1))
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        count = file.readinto(memoryview(content)[: stored.bytes])
    if count != stored.bytes:
        raise InputError(f"{stored.path} was cut short while it was read; load it again.")
    values = np.frombuffer(content, _DTYPES[stored.dtype], math.prod(stored.shape))
    placed = jax.device_put(values.reshape(stored.shape))
    if transpose or placed.dtype != dtype:
        placed = _convert(placed, jnp.dtype(dtype), transpose)
    return jax.block_until_ready(placed)


def _read_parts(
    stored: Stored, dtype: DTypeLike, transpose: bool, sharding: NamedSharding
) -> Float[Array, "..."]:
    """Every device's part, read from the file by itself; only this process's devices' parts."""
    try:
        values = np.memmap(stored.path, _DTYPES[stored.dtype], "r", stored.offset, stored.shape)
    except ValueError:
        raise InputError(f"{stored.path} was cut short while it was read; load it again.") from None
    axes = (*sharding.spec, *(None,) * (len(stored.shape) - len(sharding.spec)))
    as_stored = NamedSharding(sharding.mesh, PartitionSpec(*(axes[::-1] if transpose else axes)))
    placed = jax.make_array_from_callback(
        stored.shape, as_stored, lambda index: np.asarray(values[index])
    )
    return jax.block_until_ready(_convert(placed, jnp.dtype(dtype), transpose, sharding))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _convert(
    x: Float[Array, "..."],
    dtype: np.dtype,
    transpose: bool,
    sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    converted = (x.T if transpose else x).astype(dtype)
    if sharding is None:
        return converted
    return jax.lax.with_sharding_constraint(converted, sharding)


def _header(path: Path) -> dict[str, Stored]:
    """What a file says it holds; the library makes sure that the file is whole."""
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing; the model folder is incomplete, or holds its weights in another "
            f"format than safetensors and {TORCH_FILE} and must be converted first."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error}).") from None
    entries.pop("__metadata__", None)
    return {
        name: Stored(
            path, name, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        )
        for name, entry in entries.items()
    }
