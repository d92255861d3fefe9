"""A target in a GGUF file: its tensors as weights of transformers, its blocks in their own bits.

Tensors are laid out as in llama.cpp's `convert_hf_to_gguf.py`, blocks as in ggml
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A block of Q8_0, Q4_0 or Q4_1 is
one group of 32 numbers. One of Q4_K is eight groups of 32, one of Q6_K sixteen of 16, whose scales
are products of two numbers and are rounded to float16 here.
"""

import os
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from jaxtyping import Float, Int, UInt8
from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.families import target_config
from redrafter_jax.files.gguf_fields import (
    OUTER_TENSORS,
    ROTARY_TENSORS,
    gguf_architecture,
    gguf_fields,
)
from redrafter_jax.files.gguf_header import Header, Tensor, read_header, stored_bytes
from redrafter_jax.files.gguf_tokenizer import gguf_tokenizer, tokenizer_fields
from redrafter_jax.files.quantized import MINIMUM, SCALE
from redrafter_jax.files.stored import ITEM_BYTES, Index, StoredWeight, memory_map
from redrafter_jax.files.target_files import TargetFiles

# What the `gguf` package can turn into numbers, but for NVFP4.
SUPPORTED_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


# Rows of a tensor's blocks, [rows, blocks, bytes], that begin within these slices.
_ReadBlocks = Callable[[slice, slice], np.ndarray]


class GgufFiles(TargetFiles):
    """The files of a target in GGUF, all of whose parts share one header."""

    @cached_property
    def header(self) -> Header:
        """The header of the file, or of all parts of a model in several."""
        return read_header(self.path)

    @cached_property
    def fields(self) -> dict[str, Any]:
        return gguf_fields(self.header)

    @cached_property
    def config(self) -> TargetConfig:
        return target_config(self.fields, self.path)

    @cached_property
    def described_by(self) -> Path:
        return self.header.path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer(self.header)

    @cached_property
    def tokenizer_fields(self) -> dict[str, Any]:
        """What `tokenizer_config.json` would state beside `tokenizer`."""
        return tokenizer_fields(self.header)

    @cached_property
    def template(self) -> Any:
        return self.tokenizer_fields.get("chat_template")

    @cached_property
    def transformers_tokenizer(self) -> Any:
        tokenizer, fields = self.tokenizer, self.tokenizer_fields
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not there
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)

    def stored_weights(self, *, keep_quantized: bool) -> tuple[Path, dict[str, StoredWeight]]:
        """The weights; with `keep_quantized` matrices in blocks are codes, scales and minima.

        Raises:
          InputError: a tensor has no place, or its quantization is not supported or cannot be kept.
        """
        return self.path, _find_weights(self.header, self.config, keep_quantized)


def _find_weights(
    header: Header, config: TargetConfig, keep_quantized: bool
) -> dict[str, StoredWeight]:
    architecture = gguf_architecture(header)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stored = {}
    for name, tensor in header.tensors.items():
        if tensor.kind not in SUPPORTED_KINDS:
            raise InputError(
                f"{tensor.path}: tensor {name!r} is stored as {tensor.kind}; supported are "
                f"{', '.join(SUPPORTED_KINDS)}."
            )
        prefix, own, suffix = _parse(name)
        if own in ROTARY_TENSORS:
            continue
        if own not in architecture.names or (own in OUTER_TENSORS) != (prefix == ""):
            raise InputError(
                f"{tensor.path} holds the tensor {name!r}, for which a model of its architecture "
                "has no place; it is of a kind that is not supported."
            )
        weight = f"{prefix}{architecture.names[own]}.{suffix}"
        alternating = heads[own] if own in architecture.interleaved else 0
        added = -1.0 if architecture.norms_from_one and own.endswith("norm") else 0.0
        stored[weight] = _stored(weight, tensor, alternating, added)
        if keep_quantized and tensor.kind not in ITEM_BYTES and len(tensor.shape) == 2:
            if tensor.kind not in BLOCK_KINDS:
                raise InputError(
                    f"{tensor.path}: tensor {name!r} is stored as {tensor.kind}, which cannot be "
                    f"kept quantized; {', '.join(BLOCK_KINDS)} can, and others are loaded without."
                )
            read = partial(_blocks, tensor, alternating)
            stored |= _kept_blocks(stored[weight], tensor.kind, read)
    return stored


def _parse(name: str) -> tuple[str, str, str]:
    """A tensor's name: the prefix that names its layer, its own name, and `weight` or `bias`."""
    rest, _, suffix = name.rpartition(".")
    if not rest.startswith("blk."):
        return "", rest, suffix
    _, layer, own = (*rest.split(".", 2), "")[:3]
    return f"model.layers.{layer}.", own, suffix


def _stored(name: str, tensor: Tensor, alternating: int, added: float) -> StoredWeight:
    """The weight; numbers in blocks count as float32."""
    plain = tensor.kind in ITEM_BYTES
    dtype = tensor.kind if plain else "F32"
    stored = StoredWeight(tensor.path, name, dtype, tensor.shape, tensor.offset)
    if alternating and tensor.shape and tensor.shape[0] % (2 * alternating):
        raise InputError(
            f"{tensor.path}: weight {name!r} has shape {tensor.shape}, which {alternating} heads "
            "of two halves do not divide."
        )
    if plain and not alternating and not added:
        return stored
    return stored._replace(unpack=partial(_unpack, tensor, alternating, added))


def _unpack(
    tensor: Tensor, alternating: int, added: float, index: Index
) -> Float[np.ndarray, "..."]:
    """A part of a tensor on one axis or two, float32; nothing else of it is read.

    Args:
      tensor: the tensor.
      alternating: heads whose halves alternate, to be put one after the other; 0 is none.
      added: to every number.
      index: of the part, as it is returned.
    """
    kind = GGMLQuantizationType[tensor.kind]
    block, _ = GGML_QUANT_SIZES[kind]
    if len(tensor.shape) == 1:
        rows = _rows(tensor.shape[0], alternating)[index[0]]
        values = dequantize(_content(tensor), kind)[rows]
    else:
        start, stop, _ = index[1].indices(tensor.shape[1])
        first = start // block
        blocks = _blocks(tensor, alternating, index[0], slice(first, -(-stop // block)))
        values = dequantize(blocks.reshape(len(blocks), -1), kind)
        values = values[:, start - first * block : stop - first * block]
    return values + np.float32(added)


def _blocks(
    tensor: Tensor, alternating: int, rows: slice, blocks: slice
) -> UInt8[np.ndarray, "rows blocks bytes"]:
    """Blocks of a matrix, their rows as `_unpack` has them."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    content = _content(tensor)
    by_block = content.reshape(len(content), -1, size)
    return np.ascontiguousarray(by_block[_rows(len(content), alternating)[rows], blocks])


def _content(tensor: Tensor) -> UInt8[np.ndarray, "..."]:
    """The bytes of a tensor, of which those are read that are looked at."""
    *rest, length = tensor.shape
    shape = (*rest, stored_bytes(tensor.kind, (length,)))
    return memory_map(StoredWeight(tensor.path, "", "U8", shape, tensor.offset), np.uint8)


def _rows(count: int, alternating: int) -> Int[np.ndarray, " rows"]:
    """Where in the file each row lies."""
    rows = np.arange(count)
    if not alternating:
        return rows
    return rows.reshape(alternating, -1, 2).swapaxes(1, 2).reshape(-1)


class _BlockKind(NamedTuple):
    """How a block of GGUF is taken apart.

    Attributes:
      numbers: count of numbers in a block.
      group: count of numbers that share a scale.
      dtype: dtype of the codes, "I8" or "I4".
      codes: function from blocks [..., bytes] to codes [..., numbers], each one int8.
      scale: function from blocks to the scales of their groups, [..., groups].
      minimum: function from blocks to the minima of their groups, or None.
    """

    numbers: int
    group: int
    dtype: str
    codes: Callable[[np.ndarray], np.ndarray]
    scale: Callable[[np.ndarray], np.ndarray]
    minimum: Callable[[np.ndarray], np.ndarray] | None = None


def _half(blocks: np.ndarray, place: int) -> np.ndarray:
    """The float16 at a place of each block, [..., 1]."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view("<f2")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """All low halves of the bytes and then all high ones, 8 taken from each."""
    halves = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return halves.astype(np.int8) - np.int8(8)


def _by_pairs(packed: np.ndarray) -> np.ndarray:
    """`_nibbles` of every 32 bytes by themselves, as Q4_K has them."""
    halves = _nibbles(packed.reshape(*packed.shape[:-1], -1, 32))
    return halves.reshape(*packed.shape[:-1], -1)


def _six_bits(blocks: np.ndarray, minima: bool) -> np.ndarray:
    """Scales or minima of the eight groups of Q4_K's blocks: six bits each, in twelve bytes."""
    low, high, mixed = (blocks[..., at : at + 4] for at in (4, 8, 12))
    if minima:
        return np.concatenate([high & 63, (mixed >> 4) | ((high >> 6) << 4)], axis=-1)
    return np.concatenate([low & 63, (mixed & 15) | ((low >> 6) << 4)], axis=-1)


def _q6_codes(blocks: np.ndarray) -> np.ndarray:
    """Q6_K: four low bits in 128 bytes, two high ones in 64, of either half of the block."""
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)) + np.int8(8)
    pairs = (
        blocks[..., 128:192].reshape(*shape, 2, 1, 32)
        >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    )
    high = (pairs & 3).astype(np.int8).reshape(*shape, 2, 128)
    return (low + 16 * high - np.int8(32)).reshape(*shape, 256)


def _q6_scales(blocks: np.ndarray) -> np.ndarray:
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _half(blocks, 208).astype(np.float32) * factors


BLOCK_KINDS = {
    "Q8_0": _BlockKind(
        32, 32, "I8", lambda blocks: blocks[..., 2:].view(np.int8), partial(_half, place=0)
    ),
    "Q4_0": _BlockKind(
        32, 32, "I4", lambda blocks: _nibbles(blocks[..., 2:]), partial(_half, place=0)
    ),
    "Q4_1": _BlockKind(
        32,
        32,
        "I4",
        lambda blocks: _nibbles(blocks[..., 4:]),
        partial(_half, place=0),
        partial(_half, place=2),
    ),
    "Q4_K": _BlockKind(
        256,
        32,
        "I4",
        lambda blocks: _by_pairs(blocks[..., 16:]),
        lambda blocks: _half(blocks, 0).astype(np.float32) * _six_bits(blocks, minima=False),
        lambda blocks: -_half(blocks, 2).astype(np.float32) * _six_bits(blocks, minima=True),
    ),
    "Q6_K": _BlockKind(256, 16, "I8", _q6_codes, _q6_scales),
}


def _kept_blocks(stored: StoredWeight, kind: str, read: _ReadBlocks) -> dict[str, StoredWeight]:
    """Codes, scales and minima of a matrix in blocks, as `weight_with_scales` looks for them.

    Args:
      stored: the matrix.
      kind: of its blocks, one of `BLOCK_KINDS`.
      read: its blocks.
    """
    own = BLOCK_KINDS[kind]
    rows, columns = stored.shape
    groups = rows, columns // own.group

    def part(
        ending: str,
        dtype: str,
        shape: tuple[int, ...],
        take: Callable[[np.ndarray], np.ndarray],
        per_block: int,
    ) -> StoredWeight:
        name = stored.name + ending
        unpack = partial(_unpack_groups, name, read, take, per_block)
        return stored._replace(name=name, dtype=dtype, shape=shape, unpack=unpack)

    per_block = own.numbers // own.group
    parts = [
        part("", own.dtype, stored.shape, own.codes, own.numbers),
        part(SCALE, "F16", groups, own.scale, per_block),
    ]
    if own.minimum is not None:
        parts.append(part(MINIMUM, "F16", groups, own.minimum, per_block))
    return {one.name: one for one in parts}


def _unpack_groups(
    name: str,
    read: _ReadBlocks,
    take: Callable[[np.ndarray], np.ndarray],
    per_block: int,
    index: Index,
) -> np.ndarray:
    """A part of the codes, scales or minima."""
    rows, columns = index
    start, stop = columns.start or 0, columns.stop
    first = start // per_block
    blocks = read(rows, slice(first, None if stop is None else -(-stop // per_block)))
    taken = take(blocks).reshape(len(blocks), -1)
    taken = taken[:, start - first * per_block : None if stop is None else stop - first * per_block]
    if taken.dtype == np.float32:
        with np.errstate(over="ignore"):
            taken = taken.astype(np.float16)
        if not np.isfinite(taken).all():
            raise InputError(
                f"{name!r} is beyond the range of float16, in which scales of GGUF are kept; load "
                "the file without keeping them quantized."
            )
    return taken
