"""The files of DFlash and DSpark heads: published dialects, and the dialect written here.

A dialect is the set of fields that one program writes into `config.json`. The supported dialects
are taken from the code of these programs:

* z-lab/dflash (`dflash/model.py`), whose dialect sgl-project/SpecForge also writes for DFlash;
* deepseek-ai/DeepSpec (`modeling/dspark/qwen3`), for both kinds of heads;
* vllm-project/speculators (`models/dflash` and `models/dspark`).

Weights have the same names in all dialects. All these programs train with the frozen embedding and
vocabulary projection of the target; copies of the two in the files are ignored.

Three kinds of heads are not supported: SpecForge's DSpark heads, which predict a token at one place
in training and at another in decoding; SpecForge's Domino heads; and DeepSpec's heads for Gemma 4.
"""

from collections.abc import Mapping
from typing import Any

from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.published import (
    DESCRIBING,
    ROTARY,
    SPECULATORS,
    Reader,
    Shapes,
    architectures,
    first_stated,
)

MODEL_TYPE = "dflash"
READER = Reader(BlockConfig, "DFlash and DSpark heads")
_NESTED = "dflash_config"
_LAYER_IDS = "target_layer_ids"
_INPUT_IDS = "aux_hidden_state_layer_ids"
_FROM_ANCHOR = "sample_from_anchor"
# Names in `architectures` of z-lab's and DeepSpec's files, and whether the root's place predicts a
# token in these heads. In speculators' files a field states this.
_ARCHITECTURES = {"DFlashDraftModel": False, "Qwen3DSparkModel": True}
# Integers that every dialect states.
STATED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_hidden_layers", "block_size", "mask_token_id"),
)
_KNOWN = {
    *DESCRIBING,
    *ROTARY,
    *STATED,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias"),
    *("hidden_act", "mlp_bias", "layer_types", "use_sliding_window", "sliding_window_non_causal"),
    *("tie_word_embeddings", "target_hidden_size", "draft_vocab_size", "head"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("num_anchors", "transformer_layer_config"),
    *(SPECULATORS, _NESTED, _LAYER_IDS, _INPUT_IDS, _FROM_ANCHOR),
}
# Copies of the target's weights, and values that follow from the configuration.
IGNORED = (r"(embed_tokens|lm_head)\.weight", r"rotary_emb\.inv_freq")
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_PARTS = {
    "markov.embed_tokens": "markov_head.markov_w1",
    "markov.scores": "markov_head.markov_w2",
    "markov.gate": "markov_head.gate_proj",
    "markov.joint": "markov_head.joint_proj",
    "confidence": "confidence_head.proj",
}


def is_published(stated: Mapping[str, Any]) -> bool:
    """Whether the fields of `config.json` are those of a DFlash, DSpark or Domino head."""
    named = [str(stated.get(SPECULATORS, "")), *architectures(stated)]
    known = ("dflash", "dspark", "domino")
    return _NESTED in stated or any(one in name.lower() for name in named for one in known)


def flatten(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of all dialects as one flat mapping.

    Files of speculators nest the fields of the layers. Files of z-lab nest the fields of the block.

    Raises:
      FieldError: the head is not supported.
    """
    if SPECULATORS in stated:
        kind = stated[SPECULATORS]
        if kind not in ("dflash", "dspark"):
            READER.refuse(SPECULATORS, f"is {kind!r:.80}; 'dflash' and 'dspark' are supported.")
        return READER.flatten_speculators(stated)
    for name in architectures(stated):
        if name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            READER.refuse("architectures", f"names {name!r:.80}; {known} are supported.")
    within = stated.get(_NESTED)
    if not isinstance(within, Mapping | None):
        READER.refuse(_NESTED, f"is {within!r:.80}; it must be an object of fields.")
    for name, value in (within or {}).items():
        if name not in (_LAYER_IDS, "mask_token_id", "block_size") and value:
            READER.refuse(_NESTED, f"states {name}={value!r:.80}, which is not supported.")
    return {**(within or {}), **{name: one for name, one in stated.items() if one is not None}}


def from_files(stated: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the configuration fields that the files state under other names or not at all.

    The rotary embedding and the draftable tokens are read elsewhere.

    Args:
      stated: fields from `flatten`.
      shapes: shapes of the weights, by name.

    Raises:
      FieldError: a field that decides what the head computes is missing, is unknown or has an
        unsupported value.
    """
    del shapes
    READER.refuse_unknown(stated, _KNOWN)
    READER.refuse_other_layers(stated)
    READER.expect(stated, "target_hidden_size", stated["hidden_size"])
    heads = stated["num_attention_heads"]
    return {
        "num_layers": stated["num_hidden_layers"],
        "mask_token": stated["mask_token_id"],
        "num_key_value_heads": first_stated(stated, ("num_key_value_heads",), heads),
        "head_dim": stated.get("head_dim") or stated["hidden_size"] // max(heads, 1),
        "sample_from_anchor": _predicts_from_anchor(stated),
        "confidence": first_stated(stated, ("enable_confidence_head",), False),
        "confidence_with_markov": first_stated(stated, ("confidence_head_with_markov",), False),
        "context_layers": _layers(stated),
        "num_target_layers": stated.get("num_target_layers"),
    }


def to_files(config: BlockConfig) -> dict[str, Any]:
    """Return the fields of `config.json`: DeepSpec's, and speculators' where DeepSpec has none."""
    fields: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        _LAYER_IDS: list(config.context_layers),
        _FROM_ANCHOR: config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.confidence:
        fields["confidence_head_with_markov"] = config.confidence_with_markov
    if config.num_target_layers is not None:
        fields["num_target_layers"] = config.num_target_layers
    if config.draft_tokens is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    if config.head != "target":
        fields["head"] = config.head
    return fields


def stored_name(config: BlockConfig, name: str) -> str:
    """Map a parameter's name to its name in the published file.

    For example, layers.0.attention_norm becomes layers.0.input_layernorm.weight.
    """
    del config
    last = "bias" if name.endswith((".bias", "_bias")) else "weight"
    name = name.removesuffix(".kernel").removesuffix(".bias")
    if name.endswith("_bias"):  # of an attention projection
        return f"{name.removesuffix('_bias')}_proj.bias"
    parent, _, own = name.rpartition(".")
    if own in _NORMS:
        name = f"{parent}.{_NORMS[own]}"
    return f"{_PARTS.get(name, name)}.{last}"


def _predicts_from_anchor(stated: Mapping[str, Any]) -> bool:
    """Whether the root's place predicts a token, as stated or by the default of the dialect."""
    own = stated.get(_FROM_ANCHOR)
    if own is not None:
        return own
    if stated.get(SPECULATORS) == "dspark":
        READER.refuse(
            _FROM_ANCHOR,
            "is not stated, and programs differ on its default; state true if the head was trained "
            "to predict a token at the root's place, and false if not.",
        )
    return any(_ARCHITECTURES.get(name, False) for name in architectures(stated))


def _layers(stated: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the target layers that the head reads.

    Each dialect numbers layers in its own way. If the fields state no numbers, the result is the
    default of z-lab's code.
    """
    if SPECULATORS in stated:
        return READER.layers(_INPUT_IDS, stated.get(_INPUT_IDS), inputs=True)
    numbers = stated.get(_LAYER_IDS)
    if numbers is not None:
        return READER.layers(_LAYER_IDS, numbers, inputs=False)
    layers, count = stated.get("num_target_layers"), stated["num_hidden_layers"]
    if type(layers) is not int:
        READER.refuse(_LAYER_IDS, "and num_target_layers are both missing; state one of them.")
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
