"""Matrices that GPTQ and AWQ pack into 32-bit words, read as codes, scales and minima.

A linear layer `X` is stored as `X.qweight`, `X.qzeros` and `X.scales`, with outputs on the last
axis. A word holds eight codes of 4 bits, or eight zero points. A code stands for the number
`scale * (code - zero)`.

GPTQ packs eight inputs per word, the first in the lowest bits: `qweight` is [in / 8, out].
`X.g_idx` is the group of every input. GPTQ's first format stores each zero point minus one
(`pack_original` of https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/nn_modules/qlinear).

AWQ's "gemm" packs eight outputs per word, even ones before odd ones: `qweight` is [in, out / 8]
(https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py). Both formats pack
the zero points of eight outputs per word, in the order in which they pack codes: `qzeros` is
[groups, out / 8].
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int8, UInt8, UInt32

from redrafter_jax.errors import InputError
from redrafter_jax.files.quantized import MINIMUM, SCALE
from redrafter_jax.files.stored import Index, StoredWeight, dtype_of, memory_map

# The place of each of the eight numbers in a word.
_IN_ORDER = np.arange(8, dtype=np.uint32)
_INTERLEAVED = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
_WORDS = np.dtype("<u4")


class Packing(NamedTuple):
    """How the words of a folder are packed.

    Attributes:
      by_inputs: True if a word holds the codes of eight inputs, as in GPTQ; False if it holds the
        codes of eight outputs, as in AWQ.
      group_size: number of inputs per scale; -1 for all inputs.
      zero_offset: number to add to the stored zero points.
      symmetric: whether every zero point is 8, so that no minima are needed.
    """

    by_inputs: bool
    group_size: int
    zero_offset: int
    symmetric: bool


class _Layer(NamedTuple):
    """The stored parts of a linear layer."""

    packing: Packing
    codes: StoredWeight
    zeros: StoredWeight
    scales: StoredWeight


def unpack_layers(stored: dict[str, StoredWeight], packing: Packing) -> dict[str, StoredWeight]:
    """Return the weights of a folder, with packed layers replaced by codes, scales and minima.

    Raises:
      InputError: a part of a layer is missing or has a shape or dtype that does not fit `qweight`,
        a group is not a run of consecutive inputs, or the layer is also stored unpacked.
    """
    found = dict(stored)
    for packed in stored.values():
        if not packed.name.endswith(".qweight"):
            continue
        layer = packed.name.removesuffix(".qweight")
        names = [f"{layer}.{part}" for part in ("qweight", "qzeros", "scales")]
        for name in names:
            if name not in found:
                raise InputError(
                    f"{packed.path} holds {packed.name!r}, but {name!r} is missing; the model is "
                    "incomplete."
                )
        for name in (f"{layer}.weight{ending}" for ending in ("", SCALE, MINIMUM)):
            if name in found:
                raise InputError(
                    f"{packed.path} holds {packed.name!r}, but the folder also holds {name!r}; "
                    "remove the wrong one."
                )
        parts = _Layer(packing, *(found.pop(name) for name in names))
        found |= _layer_parts(f"{layer}.weight", parts, found.pop(f"{layer}.g_idx", None))
    return found


def _layer_parts(name: str, layer: _Layer, order: StoredWeight | None) -> dict[str, StoredWeight]:
    """A layer's codes, scales and, unless it is symmetric, minima."""
    packing, codes, zeros, scales = layer
    rows, columns = (*codes.shape, 0, 0)[:2]
    inputs, outputs = (8 * rows, columns) if packing.by_inputs else (rows, 8 * columns)
    group = inputs if packing.group_size == -1 else packing.group_size
    groups = inputs // max(group, 1)
    divided = groups and not inputs % group and not outputs % 8
    for part, shape, dtypes in (
        (codes, (rows, columns), ("I32",)),
        (zeros, (groups, outputs // 8), ("I32",)),
        (scales, (groups, outputs), ("F16", "BF16")),
        *(((order, (inputs,), ("I32",)),) if order else ()),
    ):
        if not divided:
            raise InputError(
                f"{codes.path}: {codes.name!r} is {codes.dtype} of shape {codes.shape}, for "
                f"{inputs} inputs and {outputs} outputs; it must be I32, with a number of inputs "
                f"that the group size {group} divides and a number of outputs that 8 divides. Use "
                "another folder."
            )
        if part.shape != shape or part.dtype not in dtypes:
            raise InputError(
                f"{part.path}: {part.name!r} is {part.dtype} of shape {part.shape}; with {inputs} "
                f"inputs, {outputs} outputs and groups of {group} it must be {' or '.join(dtypes)} "
                f"of shape {shape}. Download the file again, or use another folder."
            )
    if order and (memory_map(order, "<i4") != np.arange(inputs) // group).any():
        raise InputError(
            f"{order.path}: {order.name!r} orders inputs by their activations (desc_act or "
            "act-order), which is not supported; use a folder quantized without this option."
        )
    shape = (outputs, groups)
    parts = [
        codes._replace(
            name=name, dtype="I4", shape=(outputs, inputs), unpack=partial(_codes, layer)
        ),
        scales._replace(name=name + SCALE, shape=shape, unpack=partial(_scales, layer)),
    ]
    if not packing.symmetric:
        minima = partial(_minima, layer)
        parts.append(zeros._replace(name=name + MINIMUM, dtype="F32", shape=shape, unpack=minima))
    return {part.name: part for part in parts}


def _codes(layer: _Layer, index: Index) -> Int8[np.ndarray, "out in"]:
    outputs, inputs = index
    words = memory_map(layer.codes, _WORDS)
    if layer.packing.by_inputs:
        codes = _unpack_words(words.T, outputs, inputs, _IN_ORDER)
    else:
        codes = _unpack_words(words, inputs, outputs, _INTERLEAVED).T
    return codes.astype(np.int8) - np.int8(8)


def _scales(layer: _Layer, index: Index) -> Float[np.ndarray, "out groups"]:
    if layer.packing.symmetric:
        stored = _zeros(layer, index)
        # Most programs assume zero points of 8 whatever is stored, so a folder in one format may
        # state the name of the other (https://github.com/vllm-project/vllm/pull/38966).
        if stored.size and not ((stored == 7).all() or (stored == 8).all()):
            raise InputError(
                f"{layer.zeros.path}: {layer.zeros.name!r} holds zero points other than 8, but "
                "config.json states sym=true; state sym=false if the zero points are intended."
            )
    outputs, groups = index
    return memory_map(layer.scales, dtype_of(layer.scales))[groups, outputs].T


def _minima(layer: _Layer, index: Index) -> Float32[np.ndarray, "out groups"]:
    """The minima, which are exact in float32: a float16 scale has 11 bits, a zero point 4."""
    zeros = _zeros(layer, index)
    # A zero point of 0 minus one is stored as 15. In some programs it overflows into neighbours.
    if layer.packing.zero_offset and (zeros == 15).any():
        raise InputError(
            f"{layer.zeros.path}: {layer.zeros.name!r} holds zero points that are stored as 15, "
            "which some programs read as 0 and others as 16; write the folder again in the format "
            "gptq_v2."
        )
    return -_scales(layer, index).astype(np.float32) * (zeros + layer.packing.zero_offset)


def _zeros(layer: _Layer, index: Index) -> UInt8[np.ndarray, "out groups"]:
    """The zero points as they are stored."""
    outputs, groups = index
    order = _IN_ORDER if layer.packing.by_inputs else _INTERLEAVED
    return _unpack_words(memory_map(layer.zeros, _WORDS), groups, outputs, order).T


def _unpack_words(
    words: UInt32[np.ndarray, "all words"],
    rows: slice,
    columns: slice,
    order: UInt32[np.ndarray, "8"],
) -> UInt8[np.ndarray, "rows columns"]:
    """A part of the unpacked numbers, which have eight columns per word."""
    start, stop, _ = columns.indices(8 * words.shape[1])
    whole = words[rows, start // 8 : -(-stop // 8)]
    eight = (whole[..., None] >> (4 * order)).astype(np.uint8) & 15
    return eight.reshape(len(whole), -1)[:, start % 8 : start % 8 + stop - start]
