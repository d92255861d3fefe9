"""Quantized weights in files, as codes with scales and minima, and the supported methods.

A code is the number of 8 or 4 bits that is stored for an element of the weight. The elements of a
group share a scale, and in some formats a minimum; `models.linear.QuantizedWeight` explains them.

A folder that `redrafter convert --quantize` writes holds codes under the name of the weight, with
the shape of the weight. int8 and float8_e4m3fn codes are stored as they are. int4 codes are stored
with 8 added, two codes per byte, the first in the low bits. Scales and minima, [out, groups], have
the name of the weight with the suffixes `_scale` and `_minimum`. GGUF's blocks and the words of
GPTQ and AWQ are read as codes, scales and minima too (`gguf`, `packed_words`).

Folders of AutoFP8 and FBGEMM hold `X.weight` in float8_e4m3fn, and its scale `X.weight_scale`: one
number, or one number per output
(https://github.com/neuralmagic/AutoFP8/blob/main/auto_fp8/quantize.py; `FbgemmFp8Linear` of
transformers). Activations are not quantized here, so the scale of activations, `X.input_scale`, is
not read.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import field
from redrafter_jax.files.stored import Index, StoredWeight, check_shape, dtype_of, memory_map

QUANT_METHOD = "redrafter"
SCALE, MINIMUM = "_scale", "_minimum"
_SCALES = ("F32", "F16", "BF16")
CODES = {"I8": jnp.int8, "I4": jnp.int4, "F8_E4M3": jnp.float8_e4m3fn}


# The fields of each method: possible names of the field, and supported values, the default first.
_SIZES = {("bits", "w_bit"): (4,), ("group_size", "q_group_size"): (128, 64, 32, -1)}
_FORMAT = ("checkpoint_format", "format")
_FIELDS: Mapping[str, Mapping[tuple[str, ...], tuple[Any, ...]]] = {
    "gptq": {
        **_SIZES,
        _FORMAT: ("gptq", "gptq_v2"),
        ("is_marlin_format",): (False,),
        ("pack_dtype",): ("int32",),
    },
    "awq": {
        **_SIZES,
        ("version", *_FORMAT): ("gemm",),
        ("zero_point",): (True,),
        ("backend",): ("autoawq", "auto"),
        ("pack_dtype",): ("int32",),
    },
    "fp8": {("weight_block_size",): (None,), ("fmt",): ("e4m3",)},
    "fbgemm_fp8": {},
}
# A function from the weights of a folder to the same weights with the names that
# `weight_with_scales` reads.
FindQuantized = Callable[[dict[str, StoredWeight]], dict[str, StoredWeight]]


def weight_with_scales(
    stored: Mapping[str, StoredWeight], name: str, shape: tuple[int, ...]
) -> StoredWeight:
    """A stored weight, with its scales and minima if it has any.

    Raises:
      InputError: a part does not have the shape or dtype that the model and the codes require.
    """
    codes, scale = stored[name], stored.get(name + SCALE)
    minimum = stored.get(name + MINIMUM)
    if scale is None:
        if codes.dtype in (*CODES, "U8") or minimum is not None:
            raise InputError(
                f"{codes.path}: weight {name!r} is quantized as {codes.dtype}, but its scales "
                f"{name + SCALE!r} are missing; the model is incomplete."
            )
        check_shape(codes, shape)
        return codes
    if codes.dtype == "U8" and codes.shape[-1:]:
        *rows, packed = codes.shape
        unpack = partial(_unpack, codes)
        codes = codes._replace(dtype="I4", shape=(*rows, 2 * packed), unpack=unpack)
    if codes.dtype not in CODES:
        raise InputError(
            f"{codes.path}: weight {name!r} has scales and is stored as {codes.dtype}; the "
            "supported dtypes are I8, F8_E4M3, and U8 for two codes of 4 bits."
        )
    if codes.shape != shape or len(shape) != 2:
        raise InputError(
            f"{codes.path}: weight {name!r} has quantized numbers of shape {codes.shape}, but the "
            f"configuration asks for {shape}; use files of the same model."
        )
    outputs, inputs = shape
    groups = scale.shape[-1] if scale.shape else 0
    if scale.shape != (outputs, groups) or not groups or inputs % groups:
        raise InputError(
            f"{scale.path}: {scale.name!r} has shape {scale.shape}; the scales of a weight of "
            f"shape {shape} must have {outputs} rows and a number of columns that divides {inputs}."
        )
    for part in filter(None, (scale, minimum)):
        if part.dtype not in _SCALES:
            raise InputError(
                f"{part.path}: {part.name!r} is stored as {part.dtype}; scales and minima must be "
                f"one of {', '.join(_SCALES)}."
            )
        check_shape(part, scale.shape)
    return codes._replace(scale=scale, minimum=minimum)


def pack(codes: np.ndarray) -> np.ndarray:
    """Pack codes of 4 bits, two codes to a byte."""
    shifted = (codes.astype(np.int8) + np.int8(8)).view(np.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def _unpack(packed: StoredWeight, index: Index) -> np.ndarray:
    """A part of packed int4 codes, unpacked to one per byte."""
    content = memory_map(packed, np.uint8)
    rows, columns = index
    start, stop, _ = columns.indices(2 * packed.shape[1])
    pairs = content[rows, start // 2 : -(-stop // 2)]
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
    codes = codes[:, start % 2 : start % 2 + stop - start]
    return codes.astype(np.int8) - np.int8(8)


def read_method(values: Mapping[str, Any], path: Path) -> FindQuantized:
    """The function that unpacks the quantized weights of a target's folder.

    For unquantized folders and for folders that this library wrote, the function changes nothing.

    Args:
      values: the fields of `config.json`.
      path: path of `config.json`.

    Raises:
      InputError: the method, or a variant of it, is not supported.
    """
    method = check_method(values, path, (QUANT_METHOD, *_FIELDS))
    if method is None or method == QUANT_METHOD:
        return dict
    stated = values["quantization_config"]
    found = {}
    for names, supported in _FIELDS[method].items():
        name = next((name for name in names if stated.get(name) is not None), names[0])
        value = stated.get(name)
        value = supported[0] if value is None else value
        value = value.lower() if isinstance(value, str) else value
        # Not `in`, because 1 == True and 128.0 == 128.
        if not any(type(value) is type(one) and value == one for one in supported):
            raise InputError(
                f"{path} states {name}={stated[name]!r} for quant_method {method!r}; it must be "
                f"{' or '.join(map(repr, supported))}. Use another folder, or unquantized weights "
                "and `redrafter convert --quantize`."
            )
        found[names[0]] = value
    if "group_size" not in found:
        return _with_output_scales
    from redrafter_jax.files.packed_words import Packing, unpack_layers

    packing = Packing(
        by_inputs=method == "gptq",
        group_size=found["group_size"],
        zero_offset=int(found.get("checkpoint_format") == "gptq"),
        symmetric=method == "gptq" and stated.get("sym") is True,
    )
    return partial(unpack_layers, packing=packing)


def check_method(
    values: Mapping[str, Any], path: Path, supported: tuple[str, ...] = (QUANT_METHOD,)
) -> str | None:
    """The method of quantization that the fields of a `config.json` state; None if they state none.

    Raises:
      InputError: the method is not supported, or the field is not an object.
    """
    if values.get("quantization_config") is None:
        return None
    method = field(values, "quantization_config", path, dict).get("quant_method")
    if method not in supported:
        others = "".join(f", {name!r}" for name in supported if name != QUANT_METHOD)
        raise InputError(
            f"{path} states quantization_config of quant_method {method!r}; supported: "
            f"{QUANT_METHOD!r} (which `redrafter convert --quantize` writes from unquantized "
            f"weights){others}."
        )
    return method


def _with_output_scales(stored: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Return the weights with the scales of float8 weights as [out, 1]; keep other weights."""
    found = dict(stored)
    for weight in stored.values():
        scale = stored.get(weight.name + SCALE)
        if weight.dtype != "F8_E4M3" or scale is None:
            continue
        outputs = (*weight.shape, 0)[0]
        if scale.shape in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
            spread = partial(_spread, scale, outputs)
            found[scale.name] = scale._replace(shape=(outputs, 1), unpack=spread)
    return found


def _spread(scale: StoredWeight, outputs: int, index: Index) -> Float[np.ndarray, "outputs 1"]:
    numbers = memory_map(scale, dtype_of(scale)).reshape(-1, 1)
    return np.broadcast_to(numbers, (outputs, 1))[index]
