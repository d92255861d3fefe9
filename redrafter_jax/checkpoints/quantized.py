"""Quantized weights in files: codes, and beside them the scales of their groups.

In a folder of `redrafter convert --quantize` the codes have the weight's own name and its shape:
int8 and float8_e4m3fn as they are, int4 two to a byte, the first in the low bits and each with 8
added. Scales and minima, [out, groups], have that name with `_scale` and `_minimum` behind it.
GGUF's blocks and the words of GPTQ and AWQ are found as the same three (`gguf_blocks`,
`packed_words`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from redrafter_jax.checkpoints.stored import Stored, check_shape, dtype_of, mapped, read_weight
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import QuantizedWeight
from redrafter_jax.parallel.mesh import check_groups, parameter_spec

QUANT_METHOD = "redrafter"
SCALE, MINIMUM = "_scale", "_minimum"
_SCALES = ("F32", "F16", "BF16")
_CODES = {"I8": jnp.int8, "I4": jnp.int4, "F8_E4M3": jnp.float8_e4m3fn}


class StoredQuantized(NamedTuple):
    """A quantized weight in files.

    Attributes:
      codes: of dtype "I8" or "F8_E4M3", or "I4" unpacked to one in a byte.
      scale: of every group, [out, groups].
      minimum: the same, or None.
    """

    codes: Stored
    scale: Stored
    minimum: Stored | None

    @property
    def path(self) -> Path:
        """The file that holds the codes."""
        return self.codes.path

    @property
    def name(self) -> str:
        """Of the weight."""
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, [out, in]."""
        return self.codes.shape

    @property
    def parts(self) -> tuple[Stored, ...]:
        """All that is stored of it."""
        return tuple(part for part in self if part is not None)

    @property
    def bytes(self) -> int:
        """That its parts take on a device."""
        codes = self.codes.bytes // (2 if self.codes.dtype == "I4" else 1)
        return codes + sum(part.bytes for part in self.parts[1:])

    @property
    def dtype(self) -> str:
        """Of the codes."""
        return self.codes.dtype


StoredWeight = Stored | StoredQuantized


def stored_weight(stored: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> StoredWeight:
    """A weight that is known to be stored, with the scales beside it if it has any.

    Raises:
      InputError: a part of it has another shape or dtype than the model and its codes ask for.
    """
    codes, scale = stored[name], stored.get(name + SCALE)
    minimum = stored.get(name + MINIMUM)
    if scale is None:
        if codes.dtype in (*_CODES, "U8") or minimum is not None:
            raise InputError(
                f"{codes.path}: weight {name!r} is quantized as {codes.dtype}, but no scales "
                f"{name + SCALE!r} lie beside it; the model is incomplete."
            )
        check_shape(codes, shape)
        return codes
    if codes.dtype == "U8" and codes.shape[-1:]:
        *rows, packed = codes.shape
        unpack = partial(_unpack, codes)
        codes = codes._replace(dtype="I4", shape=(*rows, 2 * packed), unpack=unpack)
    if codes.dtype not in _CODES:
        raise InputError(
            f"{codes.path}: weight {name!r} has scales and is stored as {codes.dtype}; supported "
            "are I8, F8_E4M3, and U8 for two codes of 4 bits."
        )
    if codes.shape != shape or len(shape) != 2:
        raise InputError(
            f"{codes.path}: weight {name!r} has quantized numbers of shape {codes.shape}, its "
            f"configuration asks for {shape}."
        )
    outputs, inputs = shape
    groups = scale.shape[-1] if scale.shape else 0
    if scale.shape != (outputs, groups) or not groups or inputs % groups:
        raise InputError(
            f"{scale.path}: {scale.name!r} has shape {scale.shape}; the scales of a weight of "
            f"shape {shape} are {outputs} rows of groups that divide {inputs}."
        )
    for part in filter(None, (scale, minimum)):
        if part.dtype not in _SCALES:
            raise InputError(
                f"{part.path}: {part.name!r} is stored as {part.dtype}; supported are "
                f"{', '.join(_SCALES)}."
            )
        check_shape(part, scale.shape)
    return StoredQuantized(codes, scale, minimum)


def read_quantized(
    weight: StoredQuantized, parameter: str, *, transpose: bool, mesh: Mesh | None
) -> QuantizedWeight:
    """The weight on the default device, or each part of it on its own; bit for bit as stored.

    The host holds one byte for each of its numbers, and little else meanwhile.

    Args:
      weight: where it is.
      parameter: the dotted name, by which a mesh splits it.
      transpose: whether it is turned on the way.
      mesh: over which it is split; None is the default device.

    Raises:
      InputError: the file has become shorter, or the mesh splits the inputs within a group.
    """

    def read(part: Stored) -> Any:
        dtype = _CODES[part.dtype] if part is weight.codes else dtype_of(part)
        sharding = None
        if mesh is not None:
            shape = part.shape[::-1] if transpose else part.shape
            sharding = NamedSharding(mesh, parameter_spec(parameter, shape, mesh))
        return read_weight(part, dtype, transpose=transpose, sharding=sharding)

    if mesh is not None:
        step = -1 if transpose else 1
        check_groups(parameter, weight.codes.shape[::step], weight.scale.shape[::step], mesh)
    codes, scale, minimum = weight
    return QuantizedWeight(read(codes), read(scale), None if minimum is None else read(minimum))


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits as they are stored, two to a byte."""
    shifted = (codes.astype(np.int8) + np.int8(8)).view(np.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def _unpack(packed: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """A part of int4 codes, one to a byte."""
    content = mapped(packed, np.uint8)
    rows, columns = index
    start, stop, _ = columns.indices(2 * packed.shape[1])
    pairs = content[rows, start // 2 : -(-stop // 2)]
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
    codes = codes[:, start % 2 : start % 2 + stop - start]
    return codes.astype(np.int8) - np.int8(8)
