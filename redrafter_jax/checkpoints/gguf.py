"""GGUF models: their header as `config.json` would state it, their tensors as its weights.

Tensors are named and laid out as in llama.cpp's `convert_hf_to_gguf.py`, fields as in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from jaxtyping import Float, Int

from redrafter_jax.checkpoints.families import target_config
from redrafter_jax.checkpoints.gguf_header import Header, Tensor, read_header, stored_bytes
from redrafter_jax.checkpoints.stored import ITEM_BYTES, Stored
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError


class _Architecture(NamedTuple):
    """How an architecture of GGUF becomes a family of transformers.

    Attributes:
      fields: of `config.json`, the same in every model.
      names: of tensors to names of weights; those of a layer stand below `blk.0.` and
        `model.layers.0.`.
      interleaved: weights in whose heads the two halves that rotary embedding pairs alternate,
        row by row, where transformers has one half after the other.
      norms_from_one: norms are stored with the one that the model adds to them.
    """

    fields: Mapping[str, Any]
    names: Mapping[str, str]
    interleaved: tuple[str, ...] = ()
    norms_from_one: bool = False


_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA = _OUTER | {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ARCHITECTURES = {
    "llama": _Architecture(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        _LLAMA,
        interleaved=("attn_q", "attn_k"),
    ),
    "qwen2": _Architecture({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, _LLAMA),
    "qwen3": _Architecture(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, _LLAMA | _QK_NORMS
    ),
}
# Fields below the architecture's name that are read, or change nothing that is computed.
_KNOWN = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
}
# Fields that say nothing where they have these values.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
# As llama.cpp has it where a file leaves it out.
_DEFAULT_BASE = 10000.0
_FACTORS, _SHORT, _LONG = "rope_freqs", "rope_factors_short", "rope_factors_long"
# What the `gguf` package can turn into numbers.
SUPPORTED_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


def find_gguf(path: Path) -> tuple[TargetConfig, dict[str, Stored]]:
    """The configuration of a GGUF model, and its weights by their names in transformers.

    Raises:
      InputError: as `read_header`, or the architecture, a field or a quantization is not supported.
    """
    header = read_header(path)
    architecture = _architecture(header)
    config = gguf_config(header)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stored = {}
    for name, tensor in header.tensors.items():
        if tensor.kind not in SUPPORTED_KINDS:
            raise InputError(
                f"{tensor.path}: tensor {name!r} is stored as {tensor.kind}; supported are "
                f"{', '.join(SUPPORTED_KINDS)}."
            )
        place, own, ending = _parse(name)
        if own in (_FACTORS, _SHORT, _LONG):
            continue
        if own not in architecture.names or (own in _OUTER) != (place == ""):
            raise InputError(
                f"{tensor.path} holds the tensor {name!r}, for which a model of its architecture "
                "has no place; it is of a kind that is not supported."
            )
        weight = f"{place}{architecture.names[own]}.{ending}"
        alternating = heads[own] if own in architecture.interleaved else 0
        added = -1.0 if architecture.norms_from_one and own.endswith("norm") else 0.0
        stored[weight] = _stored(weight, tensor, alternating, added)
    return config, stored


def gguf_config(header: Header) -> TargetConfig:
    """What the header states of a target.

    Raises:
      InputError: a field is missing or not supported.
    """
    values = gguf_fields(header)
    ends = values["eos_token_id"]
    return target_config(values, header.path, tuple(ends))


def gguf_fields(header: Header) -> dict[str, Any]:
    """What `config.json` would state of the model, as transformers 4 spells it.

    Raises:
      InputError: a field is missing or not supported.
    """
    architecture = _architecture(header)
    prefix = f"{header.values['general.architecture']}."
    _refuse_unknown(header, prefix)

    def stated(name: str, expected: type, default: Any = None) -> Any:
        return header.get(prefix + name, expected, default)

    width, heads = stated("embedding_length", int), stated("attention.head_count", int)
    head_dim = stated("attention.key_length", int, width // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (length := stated(name, int, head_dim)) != head_dim:
            raise InputError(
                f"{header.path} states {prefix}{name}={length}, but heads are {head_dim} wide; "
                "only heads that are rotated as a whole and of one width are supported."
            )
    if "token_embd.weight" not in header.tensors:
        raise InputError(
            f"{header.path} holds no tensor 'token_embd.weight'; it is no whole model."
        )
    ends = [
        header.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")
    ]
    return {
        **architecture.fields,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": stated("feed_forward_length", int),
        "num_hidden_layers": stated("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": stated("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": stated("context_length", int),
        "rms_norm_eps": stated("attention.layer_norm_rms_epsilon", float),
        "rope_theta": stated("rope.freq_base", float, _DEFAULT_BASE),
        **_scaling(header, prefix),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": list(dict.fromkeys(end for end in ends if end >= 0)),
    }


def _architecture(header: Header) -> _Architecture:
    name = header.get("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise InputError(
            f"{header.path} is of the architecture {name!r}; supported are "
            f"{', '.join(map(repr, _ARCHITECTURES))}."
        )
    return _ARCHITECTURES[name]


def _refuse_unknown(header: Header, prefix: str) -> None:
    for name, value in header.values.items():
        own = name.removeprefix(prefix)
        if own == name or own in _KNOWN or _NEUTRAL.get(own) == value:
            continue
        raise InputError(
            f"{header.path} states {name}={value!r}, which is not supported; such a model would "
            "decode to something else."
        )


def _scaling(header: Header, prefix: str) -> dict[str, Any]:
    """`rope_scaling`, where there is one."""

    def stated(name: str, expected: type, default: Any = None) -> Any:
        return header.get(f"{prefix}rope.{name}", expected, default)

    kind = stated("scaling.type", str, "none")
    factor = stated("scaling.factor", float, stated("scale_linear", float, 1.0))
    if kind == "none" and factor != 1.0:
        kind = "linear"
    context = header.get(f"{prefix}context_length", int)
    original = stated("scaling.original_context_length", int, context)
    share = stated("scaling.attn_factor", float, 1.0)
    if share != 1.0 and kind != "longrope":
        raise InputError(
            f"{header.path} states {prefix}rope.scaling.attn_factor={share}, which is supported "
            "with scaling of type 'longrope' alone."
        )
    short, long = (f"{name}.weight" in header.tensors for name in (_SHORT, _LONG))
    if (short or long) and kind != "longrope":
        raise InputError(
            f"{header.path} holds rotary factors for short and long texts, but states scaling of "
            f"type {kind!r} and not 'longrope'."
        )
    if f"{_FACTORS}.weight" in header.tensors:
        if kind != "none":
            raise InputError(
                f"{header.path} holds rotary factors beside scaling of type {kind!r}, which are "
                "not supported together."
            )
        factors = _factors(header, _FACTORS)
        return _longrope(factors, factors, context, share)
    match kind:
        case "none":
            return {}
        case "linear":
            return {"rope_scaling": {"rope_type": kind, "factor": factor}}
        case "yarn":
            yarn = {
                "rope_type": kind,
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": stated("scaling.yarn_beta_fast", float, 32.0),
                "beta_slow": stated("scaling.yarn_beta_slow", float, 1.0),
            }
            return {"rope_scaling": yarn}
        case "longrope":
            return _longrope(_factors(header, _SHORT), _factors(header, _LONG), original, share)
    raise InputError(
        f"{header.path} asks for rotary scaling of type {kind!r}; supported are 'none', 'linear', "
        "'yarn' and 'longrope'."
    )


def _longrope(short: list[float], long: list[float], original: int, share: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": share,
    }
    return {"rope_scaling": scaling}


def _factors(header: Header, own: str) -> list[float]:
    name = f"{own}.weight"
    tensor = header.tensors.get(name)
    if tensor is None:
        raise InputError(
            f"{header.path} states rotary scaling of type 'longrope' but holds no tensor {name!r}."
        )
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise InputError(
            f"{tensor.path}: tensor {name!r} is {tensor.kind} of shape {tensor.shape}; rotary "
            "factors are F32 on one axis."
        )
    values = _unpack(tensor, 0, 0.0, (slice(None),))
    return [float(str(value)) for value in values]


def _parse(name: str) -> tuple[str, str, str]:
    """A tensor's name: where the weight stands, its own name, and `weight` or `bias`."""
    rest, _, ending = name.rpartition(".")
    if not rest.startswith("blk."):
        return "", rest, ending
    _, layer, own = (*rest.split(".", 2), "")[:3]
    return f"model.layers.{layer}.", own, ending


def _stored(name: str, tensor: Tensor, alternating: int, added: float) -> Stored:
    """The weight; numbers in blocks count as float32."""
    plain = tensor.kind in ITEM_BYTES
    dtype = tensor.kind if plain else "F32"
    stored = Stored(tensor.path, name, dtype, tensor.shape, tensor.offset)
    if alternating and tensor.shape and tensor.shape[0] % (2 * alternating):
        raise InputError(
            f"{tensor.path}: weight {name!r} has shape {tensor.shape}, which {alternating} heads "
            "of two halves do not divide."
        )
    if plain and not alternating and not added:
        return stored
    return stored._replace(unpack=partial(_unpack, tensor, alternating, added))


def _unpack(
    tensor: Tensor, alternating: int, added: float, index: tuple[slice, ...]
) -> Float[np.ndarray, "..."]:
    """A part of a tensor on one axis or two, float32; nothing else of it is read.

    Args:
      tensor: the tensor.
      alternating: heads whose halves alternate, to be put one after the other; 0 is none.
      added: to every number.
      index: of the part, as it is returned.
    """
    kind = GGMLQuantizationType[tensor.kind]
    block, size = GGML_QUANT_SIZES[kind]
    *rest, length = tensor.shape
    shape = (*rest, stored_bytes(tensor.kind, (length,)))
    try:
        content = np.memmap(tensor.path, np.uint8, "r", tensor.offset, shape)
    except ValueError:
        raise InputError(f"{tensor.path} was cut short while it was read; load it again.") from None
    rows = _rows(tensor.shape[0], alternating)[index[0]]
    if len(tensor.shape) == 1:
        values = dequantize(content, kind)[rows]
    else:
        start, stop, _ = index[1].indices(length)
        first, last = start // block, -(-stop // block)
        blocks = np.ascontiguousarray(content[rows, first * size : last * size])
        values = dequantize(blocks, kind)[:, start - first * block : stop - first * block]
    return values + np.float32(added)


def _rows(count: int, alternating: int) -> Int[np.ndarray, " rows"]:
    """Where in the file each row lies."""
    rows = np.arange(count)
    if not alternating:
        return rows
    return rows.reshape(alternating, -1, 2).swapaxes(1, 2).reshape(-1)
