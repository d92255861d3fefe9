"""Tiny GGUF files, written with the writer of the `gguf` package."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TensorNameMap,
    dequantize,
    get_tensor_name_map,
)
from places import GOLDENS
from tiny_models import stored_shapes

from redrafter_jax.config import TargetConfig

# One layer whose rows are whole blocks of every quantization.
CONFIG = TargetConfig(16, 256, 256, 1, 4, 2, 64, 1e4, 1e-5, 64, False, (3, 5))


@cache
def _names(architecture: str) -> TensorNameMap:
    """Those of llama.cpp's converter."""
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, n_blocks=8)


def gguf_name(name: str, architecture: str = "llama") -> str:
    """Of a weight of transformers."""
    found = _names(architecture).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def alternate(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp's converter lays them: of either half one after the other."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def config_fields(config: TargetConfig, architecture: str) -> dict[str, Any]:
    """What the header states of a target."""
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.sliding_window is not None:
        own["attention.sliding_window"] = config.sliding_window
    stated: dict[str, Any] = {f"{architecture}.{name}": value for name, value in own.items()}
    for name, token in zip(("eos", "eot"), config.eos_token_ids, strict=False):
        stated[f"tokenizer.ggml.{name}_token_id"] = token
    return stated


def tokenizer_fields(kind: str) -> dict[str, Any]:
    """A small vocabulary: the name of a pre-tokenizer, or `llama` or `gemma` of SentencePiece's."""
    stored = json.loads((GOLDENS / "gguf" / "tokenizers.json").read_text())
    if kind in stored["sentencepiece"]:
        pieces = stored["sentencepiece"][kind]
        own = {
            "model": "llama",
            "tokens": pieces["tokens"],
            "scores": pieces["scores"],
            "token_type": pieces["types"],
            "add_space_prefix": pieces["prefixed"],
        }
    else:
        words = stored["byte_level"]
        own = {
            "model": "gpt2",
            "pre": kind,
            "tokens": words["tokens"],
            "merges": words["merges"],
            "token_type": [3 if token in words["special"] else 1 for token in words["tokens"]],
        }
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str] | EllipsisType],
    architecture: str = "llama",
    tensors_per_part: int = 0,
    header_apart: bool = False,
) -> None:
    """A file, or parts of so many tensors.

    Args:
      path: of the file; parts are numbered by the writer.
      fields: of the header; here and among tensors those that are `...` are left out.
      tensors: their content as it is stored, and ggml's name of their type.
      architecture: of the model.
      tensors_per_part: 0 is one file.
      header_apart: whether the first part has no tensors.
    """
    writer = GGUFWriter(
        path, architecture, split_max_tensors=tensors_per_part, small_first_shard=header_apart
    )
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in fields.items():
        if value is not ...:
            add[type(value)](name, value)
    for name, tensor in tensors.items():
        if tensor is not ...:
            content, kind = tensor
            writer.add_tensor(name, content, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random(path: Path, kind: str, config: TargetConfig = CONFIG, **fields: Any) -> None:
    """A Llama whose matrices are random blocks of that kind, with further fields."""
    tensors = random_tensors(stored_shapes(config), kind)
    write_gguf(path, config_fields(config, "llama") | fields, tensors)


def plain_tensors(
    weights: Mapping[str, np.ndarray], architecture: str, heads: Mapping[str, int]
) -> dict[str, tuple[np.ndarray, str]]:
    """Weights of transformers in float32; `heads` are those of the projections that alternate."""
    tensors = {}
    for name, weight in weights.items():
        own = name.rpartition(".")[0].rpartition(".")[2]
        values = np.asarray(weight, np.float32)
        if architecture == "gemma3" and own.endswith("norm"):
            values = values + np.float32(1)
        rows = alternate(values, heads[own]) if own in heads else values
        tensors[gguf_name(name, architecture)] = rows, "F32"
    return tensors


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], kind: str
) -> dict[str, tuple[np.ndarray, str]]:
    """Matrices of random blocks whose numbers are finite and small, and norms in float32."""
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[gguf_name(name)] = random.uniform(0.5, 1.5, shape).astype(np.float32), "F32"
        else:
            tensors[gguf_name(name)] = _random_blocks(random, shape, kind), kind
    return tensors


def _random_blocks(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    quantization = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[quantization]
    count = shape[0] * shape[1] // block
    blocks = np.empty((count, size), np.uint8)
    left = np.arange(count)
    while len(left):  # a scale of any bits may be huge or no number
        blocks[left] = random.integers(0, 256, (len(left), size))
        with np.errstate(all="ignore"):
            numbers = np.abs(dequantize(blocks[left], quantization).astype(np.float64))
            left = left[~(numbers < 1e4).all(axis=1)]
    return blocks.reshape(shape[0], -1)
