"""The families of targets: what a `model_type` of transformers implies, as data."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Windows = Literal["none", "all", "switched", "pattern"]


class Family(NamedTuple):
    """What a `model_type` implies.

    Attributes:
      architecture: the class of transformers.
      biases: of queries, keys and values, and of the attention block's output; None where
        `attention_bias` states it for all four.
      windowed: which layers may have a sliding window: "switched" ones where `use_sliding_window`
        is true, "pattern" ones unless the file says otherwise.
      derived: fields that follow from others where the file leaves them out.
      variations: fields of `TargetConfig` that are not as in Llama.
      stated: fields that this family alone has; they are in its files, under the same names.
      activation: the field that names it.
      defaults: transformers' own, of fields that a file may leave out.
      supported: values of further fields that change what is computed.
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
# Models that read images too, whose text model is of a family of its own.
MULTIMODAL = {"gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text")}
