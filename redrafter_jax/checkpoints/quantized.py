"""Quantized weights in files: codes, and beside them the scales of their groups.

In a folder of `redrafter convert --quantize` the codes have the weight's own name and its shape:
int8 and float8_e4m3fn as they are, int4 two to a byte, the first in the low bits and each with 8
added. Scales and minima, [out, groups], have that name with `_scale` and `_minimum` behind it.
GGUF's blocks and the words of GPTQ and AWQ are found as the same three (`gguf_blocks`,
`packed_words`).
"""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
import numpy as np

from redrafter_jax.checkpoints.stored import Index, StoredWeight, check_shape, memory_map
from redrafter_jax.errors import InputError

QUANT_METHOD = "redrafter"
SCALE, MINIMUM = "_scale", "_minimum"
_SCALES = ("F32", "F16", "BF16")
CODES = {"I8": jnp.int8, "I4": jnp.int4, "F8_E4M3": jnp.float8_e4m3fn}


def weight_with_scales(
    stored: Mapping[str, StoredWeight], name: str, shape: tuple[int, ...]
) -> StoredWeight:
    """A weight that is known to be stored, with the scales beside it if it has any.

    Raises:
      InputError: a part of it has another shape or dtype than the model and its codes ask for.
    """
    codes, scale = stored[name], stored.get(name + SCALE)
    minimum = stored.get(name + MINIMUM)
    if scale is None:
        if codes.dtype in (*CODES, "U8") or minimum is not None:
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
    if codes.dtype not in CODES:
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
    return codes._replace(scale=scale, minimum=minimum)


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits as they are stored, two to a byte."""
    shifted = (codes.astype(np.int8) + np.int8(8)).view(np.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def _unpack(packed: StoredWeight, index: Index) -> np.ndarray:
    """A part of int4 codes, one to a byte."""
    content = memory_map(packed, np.uint8)
    rows, columns = index
    start, stop, _ = columns.indices(2 * packed.shape[1])
    pairs = content[rows, start // 2 : -(-stop // 2)]
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
    codes = codes[:, start % 2 : start % 2 + stop - start]
    return codes.astype(np.int8) - np.int8(8)
