"""Parameters' names in the files of Hugging Face, of Apple and of Medusa."""

from collections.abc import Mapping

from redrafter_jax.checkpoints.stored import StoredWeight
from redrafter_jax.config import MedusaConfig, RecurrentConfig, TargetConfig

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


def recurrent_name(config: RecurrentConfig, name: str) -> str:
    """Ours: blocks.0.kernel, lm_head.kernel ... Apple's: one `lm_head` list holds them all."""
    name = name.replace("kernel", "weight")
    if name == "lm_head.weight":
        return f"lm_head.{config.num_draft_layers}.weight"
    first, *rest = name.split(".")
    return f"lm_head.{rest[0]}.linear.{rest[1]}" if first == "blocks" else name


def medusa_name(config: MedusaConfig, name: str) -> str:
    """Ours: heads.0.blocks.0.kernel, heads.0.lm_head.kernel; theirs: 0.0.linear.weight, 0.1 ..."""
    _, head, *path = name.replace("kernel", "weight").split(".")
    if path == ["lm_head", "weight"]:
        return f"{head}.{config.num_draft_layers}.weight"
    _, block, last = path
    return f"{head}.{block}.linear.{last}"


def text_weights(stored: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """The same weights, those of a text model within a larger one named as if it were alone."""

    def own(name: str) -> str:
        # As transformers 4 and 5 name them inside, and as both name them in files.
        if name.startswith(inner := "model.language_model."):
            return f"model.{name.removeprefix(inner)}"
        return name.removeprefix("language_model.")

    return {own(name): weight._replace(name=own(name)) for name, weight in stored.items()}
