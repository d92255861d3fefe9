"""A target in a GGUF file, whose tensors are read as the weights of transformers.

llama.cpp's `convert_hf_to_gguf.py` defines the layout of the tensors.
"""

import os
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from jaxtyping import Float, Int, UInt8
from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.families import target_config
from redrafter_jax.files.gguf_blocks import BLOCK_KINDS, kept_blocks
from redrafter_jax.files.gguf_fields import (
    OUTER_TENSORS,
    ROTARY_TENSORS,
    gguf_architecture,
    gguf_fields,
)
from redrafter_jax.files.gguf_header import Header, Tensor, read_header, stored_bytes
from redrafter_jax.files.gguf_tokenizer import gguf_tokenizer, token_strings, tokenizer_fields
from redrafter_jax.files.stored import ITEM_BYTES, Index, StoredWeight, memory_map
from redrafter_jax.files.target_files import TargetFiles

# The formats that the `gguf` package can dequantize, except NVFP4.
SUPPORTED_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


class GgufFiles(TargetFiles):
    """The files of a target in GGUF; the parts of a split model are read as one."""

    @cached_property
    def header(self) -> Header:
        """The header of the file, or the joint header of a split model's parts."""
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
        """The fields of a `tokenizer_config.json` for this tokenizer."""
        return tokenizer_fields(self.header)

    @cached_property
    def template(self) -> Any:
        return self.tokenizer_fields.get("chat_template")

    @cached_property
    def transformers_tokenizer(self) -> Any:
        tokenizer, fields = self.tokenizer, self.tokenizer_fields
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch is not installed
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)

    def token_strings(self) -> dict[int, str] | None:
        return dict(enumerate(token_strings(self.header))) or None

    def stored_weights(self, *, keep_quantized: bool) -> tuple[Path, dict[str, StoredWeight]]:
        """Return the path, and its weights by name; `keep_quantized` keeps quantized blocks.

        Raises:
          InputError: a tensor does not belong to the model, or its quantization is not supported or
            cannot be kept.
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
                f"{tensor.path}: tensor {name!r} is stored as {tensor.kind}; the supported formats "
                f"are {', '.join(SUPPORTED_KINDS)}."
            )
        prefix, own, suffix = _parse(name)
        if own in ROTARY_TENSORS:
            continue
        if own not in architecture.names or (own in OUTER_TENSORS) != (prefix == ""):
            raise InputError(
                f"{tensor.path} holds the tensor {name!r}, which supported models of this "
                "architecture do not have; use another file."
            )
        weight = f"{prefix}{architecture.names[own]}.{suffix}"
        alternating = heads[own] if own in architecture.interleaved else 0
        added = -1.0 if architecture.norms_from_one and own.endswith("norm") else 0.0
        stored[weight] = _stored(weight, tensor, alternating, added)
        if keep_quantized and tensor.kind not in ITEM_BYTES and len(tensor.shape) == 2:
            if tensor.kind not in BLOCK_KINDS:
                raise InputError(
                    f"{tensor.path}: tensor {name!r} is stored as {tensor.kind}, but only "
                    f"{', '.join(BLOCK_KINDS)} can be kept quantized; load the file without "
                    "keeping its blocks."
                )
            read = partial(_blocks, tensor, alternating)
            stored |= kept_blocks(stored[weight], tensor.kind, read)
    return stored


def _parse(name: str) -> tuple[str, str, str]:
    """The parts of a tensor's name: its layer's prefix, its own name, and `weight` or `bias`."""
    rest, _, suffix = name.rpartition(".")
    if not rest.startswith("blk."):
        return "", rest, suffix
    _, layer, own = (*rest.split(".", 2), "")[:3]
    return f"model.layers.{layer}.", own, suffix


def _stored(name: str, tensor: Tensor, alternating: int, added: float) -> StoredWeight:
    """The stored weight for a tensor; a weight in quantized blocks has dtype float32."""
    plain = tensor.kind in ITEM_BYTES
    dtype = tensor.kind if plain else "F32"
    stored = StoredWeight(tensor.path, name, dtype, tensor.shape, tensor.offset)
    if alternating and tensor.shape and tensor.shape[0] % (2 * alternating):
        raise InputError(
            f"{tensor.path}: weight {name!r} has shape {tensor.shape}; the number of rows must be "
            f"a multiple of {2 * alternating}, twice the number of heads."
        )
    if plain and not alternating and not added:
        return stored
    return stored._replace(unpack=partial(_unpack, tensor, alternating, added))


def _unpack(
    tensor: Tensor, alternating: int, added: float, index: Index
) -> Float[np.ndarray, "..."]:
    """A part of a tensor of one or two axes, in float32; other parts are not read.

    Args:
      tensor: the tensor.
      alternating: number of heads whose two halves alternate row by row in the file; the result has
        one half after the other. 0 keeps the order of the file.
      added: number to add to every element.
      index: slices of the part, counted in the order of the returned rows.
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
    """Blocks of a matrix, with rows in the order that `_unpack` returns."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    content = _content(tensor)
    by_block = content.reshape(len(content), -1, size)
    return np.ascontiguousarray(by_block[_rows(len(content), alternating)[rows], blocks])


def _content(tensor: Tensor) -> UInt8[np.ndarray, "..."]:
    """The bytes of a tensor as a memory map, which reads only what is used."""
    *rest, length = tensor.shape
    shape = (*rest, stored_bytes(tensor.kind, (length,)))
    return memory_map(StoredWeight(tensor.path, "", "U8", shape, tensor.offset), np.uint8)


def _rows(count: int, alternating: int) -> Int[np.ndarray, " rows"]:
    """The index in the file of each returned row."""
    rows = np.arange(count)
    if not alternating:
        return rows
    return rows.reshape(alternating, -1, 2).swapaxes(1, 2).reshape(-1)
