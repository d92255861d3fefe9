"""The fields of `config.json` for a GGUF header, by architecture.

The names of header fields are from https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and
the names of tensors from llama.cpp's `convert_hf_to_gguf.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.family_table import FAMILIES
from redrafter_jax.files.gguf_header import Header

# llama.cpp's default of the rotary base.
_DEFAULT_BASE = 10000.0
ROTARY_TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
_FACTORS, _SHORT, _LONG = ROTARY_TENSORS


class Architecture(NamedTuple):
    """The mapping from a GGUF architecture to a family of transformers.

    Attributes:
      model_type: the family's `model_type`.
      names: mapping from tensor names to weight names; names within a layer omit the prefixes
        `blk.0.` and `model.layers.0.`.
      interleaved: tensors that store the two halves of each head in alternating rows; transformers
        stores one half after the other. (The rotary embedding pairs the two halves.)
      norms_from_one: whether stored norm weights already include the 1 that the model adds.
      known: header fields that are supported in addition to `_KNOWN`.
      further: function that returns additional fields of `config.json`. Its argument is a function
        that reads a header field, from a name, a type and a default.
    """

    model_type: str
    names: Mapping[str, str]
    interleaved: tuple[str, ...] = ()
    norms_from_one: bool = False
    known: tuple[str, ...] = ()
    further: Callable[[Callable[..., Any]], Mapping[str, Any]] = lambda stated: {}


def _gemma3_fields(stated: Callable[..., Any]) -> dict[str, Any]:
    """The fields of windows; their constants are in the code of llama.cpp and not in the file."""
    layers, width = stated("block_count", int), stated("embedding_length", int)
    scalar = stated("attention.key_length", int)
    if layers == _LARGEST_GEMMA3:
        scalar = width // stated("attention.head_count", int)
    return {
        "sliding_window": stated("attention.sliding_window", int),
        "sliding_window_pattern": stated("attention.sliding_window_pattern", int, 6),
        "rope_local_base_freq": stated("rope.freq_base_swa", float, _DEFAULT_BASE),
        "query_pre_attn_scalar": scalar,
    }


OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA = OUTER_TENSORS | {
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
# Number of layers of Gemma 3 27B, the only size whose scores are not divided by the root of the
# head dimension.
_LARGEST_GEMMA3 = 62
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ARCHITECTURES = {
    "llama": Architecture("llama", _LLAMA, interleaved=("attn_q", "attn_k")),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _LLAMA | _QK_NORMS),
    "gemma3": Architecture(
        "gemma3_text",
        _LLAMA
        | _QK_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_from_one=True,
        known=(
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "rope.freq_base_swa",
        ),
        further=_gemma3_fields,
    ),
}
# Fields with the architecture's prefix that are read, or that do not change the computation.
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
# Fields that change nothing if they have these values.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}


def gguf_fields(header: Header) -> dict[str, Any]:
    """The fields of `config.json` for the model, in the format of transformers 4.

    Raises:
      InputError: a field is missing or not supported.
    """
    architecture = gguf_architecture(header)
    family = FAMILIES[architecture.model_type]
    prefix = f"{header.values['general.architecture']}."
    _refuse_unknown(header, prefix, architecture)

    def stated(name: str, expected: type, default: Any = None) -> Any:
        return header.get(prefix + name, expected, default)

    width, heads = stated("embedding_length", int), stated("attention.head_count", int)
    head_dim = stated("attention.key_length", int, width // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (length := stated(name, int, head_dim)) != head_dim:
            raise InputError(
                f"{header.path} states {prefix}{name}={length}, but heads are {head_dim} wide; use "
                "a model whose keys, values and rotary embedding all have the width of a head."
            )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise InputError(
            f"{header.path} holds no tensor 'token_embd.weight'; the file is incomplete."
        )
    ends = [
        header.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")
    ]
    scaling = _scaling(header, prefix)
    return {
        "architectures": [family.architecture],
        "model_type": architecture.model_type,
        family.activation: family.variations.get("hidden_act", TargetConfig.hidden_act),
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": stated("feed_forward_length", int),
        "num_hidden_layers": stated("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": stated("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": stated("context_length", int),
        "rms_norm_eps": stated("attention.layer_norm_rms_epsilon", float),
        "rope_theta": stated("rope.freq_base", float, _DEFAULT_BASE),
        **({"rope_scaling": scaling} if scaling else {}),
        **architecture.further(stated),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": list(dict.fromkeys(end for end in ends if end >= 0)),
    }


def gguf_architecture(header: Header) -> Architecture:
    """The architecture that the header names.

    Raises:
      InputError: the architecture is not supported.
    """
    name = header.get("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise InputError(
            f"{header.path} has the architecture {name!r}; supported are "
            f"{', '.join(map(repr, _ARCHITECTURES))}."
        )
    return _ARCHITECTURES[name]


def _refuse_unknown(header: Header, prefix: str, architecture: Architecture) -> None:
    for name, value in header.values.items():
        own = name.removeprefix(prefix)
        if own == name or own in {*_KNOWN, *architecture.known} or _NEUTRAL.get(own) == value:
            continue
        raise InputError(
            f"{header.path} states {name}={value!r}, which is not supported and might change the "
            "text; use another file."
        )


def _scaling(header: Header, prefix: str) -> dict[str, Any] | None:
    """The field `rope_scaling`; None for no scaling."""

    def stated(name: str, expected: type, default: Any = None) -> Any:
        return header.get(f"{prefix}rope.{name}", expected, default)

    kind = stated("scaling.type", str, "none")
    factor = stated("scaling.factor", float, stated("scale_linear", float, 1.0))
    if kind == "none" and factor != 1.0:
        kind = "linear"
    context = header.get(f"{prefix}context_length", int)
    original = stated("scaling.original_context_length", int, context)
    gain = stated("scaling.attn_factor", float, 1.0)
    if gain != 1.0 and kind != "longrope":
        raise InputError(
            f"{header.path} states {prefix}rope.scaling.attn_factor={gain}, which is supported "
            "only with scaling of type 'longrope'."
        )
    short, long = (f"{name}.weight" in header.tensors for name in (_SHORT, _LONG))
    if (short or long) and kind != "longrope":
        raise InputError(
            f"{header.path} holds rotary factors for short and long texts, so the type of scaling "
            f"must be 'longrope', but it is {kind!r}; correct the type."
        )
    if f"{_FACTORS}.weight" in header.tensors:
        if kind != "none":
            raise InputError(
                f"{header.path} holds rotary factors and states scaling of type {kind!r}; the two "
                "are not supported together, so use another file."
            )
        factors = _factors(header, _FACTORS)
        return _longrope(factors, factors, context, gain)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": kind, "factor": factor}
        case "yarn":
            return {
                "rope_type": kind,
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": stated("scaling.yarn_beta_fast", float, 32.0),
                "beta_slow": stated("scaling.yarn_beta_slow", float, 1.0),
            }
        case "longrope":
            return _longrope(_factors(header, _SHORT), _factors(header, _LONG), original, gain)
        case _:
            raise InputError(
                f"{header.path} asks for rotary scaling of type {kind!r}; supported are 'none', "
                "'linear', 'yarn' and 'longrope'."
            )


def _longrope(short: list[float], long: list[float], original: int, gain: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": gain,
    }


def _factors(header: Header, own: str) -> list[float]:
    name = f"{own}.weight"
    tensor = header.tensors.get(name)
    if tensor is None:
        raise InputError(
            f"{header.path} states rotary scaling of type 'longrope' but holds no tensor {name!r}; "
            "the file is incomplete."
        )
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise InputError(
            f"{tensor.path}: tensor {name!r} is {tensor.kind} of shape {tensor.shape}; rotary "
            "factors must be F32 with one axis."
        )
    values = np.fromfile(tensor.path, "<f4", tensor.shape[0], offset=tensor.offset)
    return [float(str(value)) for value in values]
