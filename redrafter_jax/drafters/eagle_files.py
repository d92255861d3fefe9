"""The files of EAGLE heads: published dialects, and the dialect written here.

A dialect is the file layout of one program. The supported dialects are taken from the code of these
programs:

* SafeAILab/EAGLE (`cnets1.py` for EAGLE and EAGLE-2, `cnets.py` for EAGLE-3);
* sgl-project/SpecForge (`llama3_eagle.py`), whose dialect Tencent/AngelSlim and SGLang share;
* vllm-project/speculators (`models/eagle3`);
* deepseek-ai/DeepSpec (`modeling/eagle3/qwen3`).

Dialects differ in the nesting of `config.json`, in the flags that `config.json` states, in the
meaning of layer numbers, and in the name of the head's layer.
"""

from collections.abc import Mapping
from typing import Any

from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.published import (
    DESCRIBING,
    ROTARY,
    SPECULATORS,
    Reader,
    Shapes,
    architectures,
    first_stated,
)

MODEL_TYPE = "eagle"
READER = Reader(EagleConfig, "EAGLE heads")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Names in `architectures` of every dialect but SafeAILab's, whose files name a target's class.
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "Qwen3Eagle3Model",
}
# Fields that describe the head's training.
_TRAINED = {"ttt_length", "ttt_steps", "step_loss_decay", "draft_num_hidden_layers"}
_SIZES = ("vocab_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
# Integers that every dialect states.
STATED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
# Flags that come with weights, and one such weight: if a file does not state a flag, the presence
# of the weight decides.
_WEIGHTS_OF = {
    "fc_bias": "fc.bias",
    "attention_bias": "{layer}self_attn.q_proj.bias",
    "attention_output_bias": "{layer}self_attn.o_proj.bias",
    "qk_norm": "{layer}self_attn.q_norm.weight",
    "norm_before_fc": "input_norm.weight",
    "fc_norm": "fc_norm.0.weight",
}
# Names of these flags in files; the first stated one is used.
_STATED_AS = {
    "fc_bias": ("bias",),
    "attention_bias": ("qkv_bias", "attention_bias"),
    "norm_before_fc": ("norm_before_fc",),
    "fc_norm": ("fc_norm",),
}
_KNOWN = {
    *DESCRIBING,
    *ROTARY,
    *_TRAINED,
    *_SIZES,
    *("hidden_size", "target_hidden_size", "draft_vocab_size", "num_hidden_layers", "head_dim"),
    *("num_key_value_heads", "hidden_act", "mlp_bias", "tie_word_embeddings", "layer_types"),
    *("bias", "qkv_bias", "attention_bias", "norm_before_fc", "fc_norm", "norm_before_residual"),
    *("norm_output", "embed_requires_grad", "eagle_config", "target_layer_ids"),
    *("use_sliding_window",),
    *("num_aux_hidden_states", "transformer_layer_config"),
    *(SPECULATORS, _LAYER_IDS),
}
_LAYERS = {"1": "layers.0.", "3": "midlayer."}
_NORMS = {
    "embedding_norm": "{layer}input_layernorm",
    "hidden_norm": "{layer}hidden_norm",
    "mlp_norm": "{layer}post_attention_layernorm",
}
# Copies of the target's weights, and values that follow from the configuration.
IGNORED = (r"embed_tokens\.weight", r"(.*\.)?rotary_emb\.inv_freq")


def is_published(stated: Mapping[str, Any]) -> bool:
    """Whether the fields of `config.json` are those of an EAGLE head.

    SafeAILab's first heads have the fields of a target; `holds` recognises them by their weights.
    """
    kind = stated.get(SPECULATORS)
    if isinstance(kind, str):
        return "eagle" in kind
    if any("eagle" in name.lower() for name in architectures(stated)):
        return True
    # SafeAILab's EAGLE-3.
    return "draft_vocab_size" in stated and stated.get("num_hidden_layers") == 1


def holds(shapes: Shapes) -> bool:
    """Whether the weights belong to SafeAILab's first heads, which have the fields of a target."""
    names = {name.removeprefix("model.") for name in shapes}
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names


def flatten(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of all dialects as one flat mapping.

    In speculators' files, the fields of the layer are nested.

    Raises:
      FieldError: the dialect or its kind of EAGLE head is not supported.
    """
    if SPECULATORS not in stated:
        for name in architectures(stated):
            if "eagle" in name.lower() and name not in _ARCHITECTURES:
                known = ", ".join(sorted(_ARCHITECTURES))
                READER.refuse(
                    "architectures", f"names {name!r:.80}; the supported ones are {known}."
                )
        return dict(stated)
    kind = stated[SPECULATORS]
    if kind != "eagle3":
        READER.refuse(SPECULATORS, f"is {kind!r:.80}; for EAGLE heads only 'eagle3' is supported.")
    return READER.flatten_speculators(stated)


def rename[T](stored: Mapping[str, T]) -> dict[str, T]:
    """Rename weights to the names that SafeAILab and SpecForge use."""
    bare = {name.removeprefix("model."): weight for name, weight in stored.items()}
    if not any(name.endswith("hidden_norm.weight") for name in bare):
        return bare
    first, third = _LAYERS["1"], _LAYERS["3"]
    return {
        third + name.removeprefix(first) if name.startswith(first) else name: weight
        for name, weight in bare.items()
    }


def from_files(stated: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the configuration fields, except for the rotary embedding and the draftable tokens.

    Args:
      stated: fields from `flatten`.
      shapes: shapes of the weights, by the names of `rename`.

    Raises:
      FieldError: a field that decides what the head computes is missing, is unknown or has an
        unsupported value.
    """
    _refuse_unsupported(stated, shapes)
    version = "3" if "midlayer.hidden_norm.weight" in shapes else "1"
    width, heads = stated["hidden_size"], stated["num_attention_heads"]
    own_head = "lm_head.weight" in shapes or stated.get("draft_vocab_size") is not None
    layers = _layers(stated)
    values = {
        **{name: stated[name] for name in _SIZES if stated.get(name) is not None},
        "version": version,
        "width": width,
        "hidden_size": first_stated(stated, ("target_hidden_size", "hidden_size")),
        "num_key_value_heads": first_stated(stated, ("num_key_value_heads", "num_attention_heads")),
        "head_dim": stated.get("head_dim") or width // max(heads, 1),
        "head": "own" if version == "3" and own_head else "target",
        "norm_before_residual": stated.get("norm_before_residual", False),
        "norm_output": stated.get("norm_output", False),
        "context_layers": layers,
        "num_target_layers": stated.get("num_target_layers"),
    }
    values["own_embedding"] = (
        values["hidden_size"] != width or stated.get("embed_requires_grad") is True
    )
    for name, weight in _WEIGHTS_OF.items():
        told = weight.format(layer=_LAYERS[version]) in shapes
        values[name] = first_stated(stated, _STATED_AS.get(name, ()), told)
    count, named = stated.get("num_aux_hidden_states"), len(layers) or 3
    if count not in (None, named):
        READER.refuse(
            "num_aux_hidden_states",
            f"is {count}, but the head reads {named} layers; make the two numbers agree.",
        )
    return values


def to_files(config: EagleConfig) -> dict[str, Any]:
    """Return the fields of `config.json`: SpecForge's, and speculators' flags that SpecForge lacks.

    For version 1, return the fields of SafeAILab, with the architecture name of SGLang.
    """
    third = config.version == "3"
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bias": config.fc_bias,
        "attention_bias": config.attention_bias,
    }
    if config.num_target_layers is not None:
        fields["num_target_layers"] = config.num_target_layers
    if not third:
        return fields
    if config.head == "own":
        fields["draft_vocab_size"] = config.draft_vocab_size
    if config.width != config.hidden_size:
        fields["target_hidden_size"] = config.hidden_size
    elif config.own_embedding:
        fields["embed_requires_grad"] = True
    if config.context_layers:
        fields["eagle_config"] = {_LAYER_IDS: list(config.context_layers)}
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {**fields, **{name: True for name in flags if getattr(config, name)}}


def stored_name(config: EagleConfig, name: str) -> str:
    """Map a parameter's name to its name in the published file.

    For example, self_attn.q_proj becomes midlayer.self_attn.q_proj.weight.
    """
    layer = _LAYERS[config.version]
    name = name.removesuffix(".kernel")
    if name.endswith(".bias"):  # that of `fc`
        return name
    if name in _NORMS:
        return f"{_NORMS[name].format(layer=layer)}.weight"
    if name.endswith("_bias"):
        return f"{layer}{name.removesuffix('_bias')}_proj.bias"
    within = name.startswith(("self_attn.", "mlp."))
    return f"{layer if within else ''}{name}.weight"


def _layers(stated: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the target layers that the head fuses; () if the fields state none.

    Each dialect numbers layers in its own way.
    """
    within = stated.get("eagle_config") or {}
    outputs, field = within.get(_LAYER_IDS), "eagle_config"
    if outputs is None:
        outputs, field = stated.get("target_layer_ids"), "target_layer_ids"
    inputs = stated.get(_LAYER_IDS)
    if inputs is not None and SPECULATORS not in stated:
        READER.refuse(
            _LAYER_IDS,
            "is stated without speculators_model_type, and programs differ on whether its numbers "
            "then name the inputs or the outputs of layers; remove it, and state the outputs in "
            "eagle_config.",
        )
    if inputs is not None:
        outputs, field = inputs, _LAYER_IDS
    if outputs is None:
        return ()
    return READER.layers(field, outputs, inputs=inputs is not None)


def _refuse_unsupported(stated: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse fields whose effect on the head's computation is unknown."""
    READER.refuse_unknown(stated, _KNOWN)
    if SPECULATORS in stated and stated.get("norm_before_residual") is None:
        READER.refuse(
            "norm_before_residual",
            "is not stated, and programs differ on its default; state the value with which the "
            "head was trained, true or false.",
        )
    READER.expect(stated, "num_hidden_layers", 1)
    READER.refuse_other_layers(stated)
    third = "midlayer.hidden_norm.weight" in shapes
    # Heads of the first version always score with the target's projection.
    if third and stated.get("tie_word_embeddings") and "lm_head.weight" not in shapes:
        READER.refuse(
            "tie_word_embeddings",
            "is True, but tied embeddings are not supported; use a head with an lm_head.weight.",
        )
    within = stated.get("eagle_config")
    if not isinstance(within, Mapping | None):
        READER.refuse("eagle_config", f"is {within!r:.80}; it must be an object of fields.")
    for name, value in (within or {}).items():
        if name == "use_aux_hidden_state" and value is True:
            continue
        if name != _LAYER_IDS:
            READER.refuse("eagle_config", f"states {name}={value!r:.80}, which is not supported.")
