"""Parameters' names in the files of Hugging Face's targets."""

from collections.abc import Mapping

from redrafter_jax.checkpoints.stored import StoredWeight
from redrafter_jax.config import TargetConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Of a model that reads images too: what is no part of its text model.
IMAGE_WEIGHTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
ACTIVATION_SCALES = r".*\.input_scale"
# A layer's norms, by whether attention and feed-forward have one behind them.
_NORMS = {
    False: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    True: {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}


def target_name(config: TargetConfig, name: str) -> str:
    """Ours: layers.0.self_attn.q_proj, ...q_bias; theirs: ...q_proj.weight, ...q_proj.bias."""
    if name.endswith("_bias"):
        return f"model.{name.removesuffix('_bias')}_proj.bias"
    *path, last = name.split(".")
    name = ".".join([*path, _NORMS[config.output_norms].get(last, last)])
    return HEAD if name == "lm_head" else f"model.{name}.weight"


def text_weights(stored: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """The same weights, those of a text model within a larger one named as if it were alone."""

    def own(name: str) -> str:
        # As transformers 4 and 5 name them inside, and as both name them in files.
        if name.startswith(inner := "model.language_model."):
            return f"model.{name.removeprefix(inner)}"
        return name.removeprefix("language_model.")

    return {own(name): weight._replace(name=own(name)) for name, weight in stored.items()}
