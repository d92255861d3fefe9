"""The families of targets as data: the properties of each `model_type` of transformers."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Windows = Literal["none", "all", "switched", "pattern"]


class Family(NamedTuple):
    """The properties of a family of targets, which is a `model_type` of transformers.

    Attributes:
      architecture: name of the class in transformers.
      biases: whether queries, keys and values have a bias, and whether the output of the attention
        block has one; None if the field `attention_bias` decides both.
      windowed: which layers may have a sliding window: "none", "all", "switched" or "pattern". With
        "switched", `max_window_layers` chooses the layers if `use_sliding_window` is true. With
        "pattern", all but every n-th layer have a window. In both cases `layer_types` takes
        precedence, if the file has it.
      derived: fields that are computed from other fields if the file leaves them out.
      variations: fields of `TargetConfig` that differ from Llama, with their values.
      stated: fields that only this family has; the files use the same names as `TargetConfig`.
      activation: name of the field that states the activation function.
      defaults: transformers' defaults of fields that a file may leave out.
      supported: for further fields that change the computation, the only supported value.
    """

    architecture: str
    biases: tuple[bool, bool] | None = None
    windowed: Windows = "none"
    derived: tuple[str, ...] = ()
    variations: Mapping[str, Any] = {}
    stated: tuple[str, ...] = ()
    activation: str = "hidden_act"
    defaults: Mapping[str, Any] = {}
    supported: Mapping[str, Any] = {}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", derived=("num_key_value_heads", "head_dim")),
    "mistral": Family("MistralForCausalLM", (False, False), "all", ("head_dim",)),
    "qwen2": Family("Qwen2ForCausalLM", (True, False), "switched", ("head_dim",)),
    "qwen3": Family("Qwen3ForCausalLM", None, "switched", variations={"qk_norm": True}),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        windowed="pattern",
        variations={
            "qk_norm": True,
            "hidden_act": "gelu_pytorch_tanh",
            "output_norms": True,
            "zero_centered_norms": True,
            "scaled_embeddings": True,
        },
        stated=("rope_local_base_freq", "query_pre_attn_scalar"),
        activation="hidden_activation",
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        supported={
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
}
# Multimodal models: the class in transformers, and the family of the text model.
MULTIMODAL = {"gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text")}
