"""The names of a target's weights in files, the matching of parameters with them, and saving."""

from collections.abc import Mapping
from pathlib import Path

from flax import nnx

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.parameters import Layout, MatchedModel, match_weights
from redrafter_jax.files.quantized import CODES
from redrafter_jax.files.stored import StoredWeight, check_shape, same_values
from redrafter_jax.models.target import Decoder, Target

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Old files hold the rotary frequencies; scales of activations are not used.
_IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.input_scale")
# Weights of a multimodal model outside of its text model.
_IMAGE_WEIGHTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
# Names of a layer's norms in files, by `TargetConfig.output_norms`.
_NORMS = {
    False: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    True: {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}


def match_target(
    folder: Path, described_by: Path, config: TargetConfig, found: Mapping[str, StoredWeight]
) -> MatchedModel:
    """Match the parameters of a target with the weights in its files.

    Args:
      folder: the target's folder or GGUF file.
      described_by: the file with the configuration.
      config: the configuration.
      found: all weights in the files, by name; a multimodal model has weights outside of its text
        model.

    Raises:
      InputError: a weight is missing, has the wrong shape, or does not belong to the model.
    """
    stored = {
        (text := _text_name(name)): weight._replace(name=text) for name, weight in found.items()
    }
    ignored = [*_IGNORED]
    if stored.keys() != found.keys():
        ignored.append(_IMAGE_WEIGHTS)
    if config.tie_word_embeddings:
        _check_tied_head(stored, config)
        ignored.append(_HEAD)
    return match_weights(folder, described_by, config, stored, LAYOUT, ignored)


def without_layers(matched: MatchedModel) -> MatchedModel:
    """The model without its layers: embeddings, final norm and vocabulary projection."""
    decoder = nnx.eval_shape(lambda: Decoder(matched.config, rngs=nnx.Rngs(0)))
    decoder.layers = nnx.List([])
    ends = [at for at, one in enumerate(matched.parameters) if one.path[0] != "layers"]
    return matched._replace(
        graphdef=nnx.split(decoder)[0],
        parameters=tuple(matched.parameters[at] for at in ends),
        weights=tuple(matched.weights[at] for at in ends),
    )


def save_target(target: Target, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` as transformers does for the target's family.

    A family is a `model_type` of transformers, such as "llama".

    Raises:
      InputError: no family of transformers has exactly the target's variations, or the weights
        cannot be written.
    """
    # Imported here, because commands that decode save nothing.
    from redrafter_jax.files.families import target_fields
    from redrafter_jax.files.save import save

    save(Path(folder), target, LAYOUT, target_fields(target.config))


def target_name(config: TargetConfig, name: str) -> str:
    """The name of a parameter's weight in transformers.

    For example, `layers.0.self_attn.q_bias` becomes `model.layers.0.self_attn.q_proj.bias`.
    """
    if name.endswith("_bias"):
        return f"model.{name.removesuffix('_bias')}_proj.bias"
    *path, last = name.split(".")
    name = ".".join([*path, _NORMS[config.output_norms].get(last, last)])
    return _HEAD if name == "lm_head" else f"model.{name}.weight"


LAYOUT = Layout(Decoder, target_name, {"num_hidden_layers": "num_hidden_layers"})


def _text_name(name: str) -> str:
    """The name of a weight without the prefix that a multimodal model gives its text model."""
    # The first prefix is from modules of transformers, the second from its files.
    if name.startswith(inner := "model.language_model."):
        return f"model.{name.removeprefix(inner)}"
    return name.removeprefix("language_model.")


def _check_tied_head(stored: Mapping[str, StoredWeight], config: TargetConfig) -> None:
    """Refuse a head that differs from the embedding of a target with tied weights."""
    if _HEAD not in stored or _EMBEDDING not in stored:
        return
    head, embedding = stored[_HEAD], stored[_EMBEDDING]
    for weight in (embedding, head):
        if weight.dtype not in (*CODES, "U8"):
            check_shape(weight, (config.vocab_size, config.hidden_size))
    if not same_values(head, embedding):
        raise InputError(
            f"{head.path}: {_HEAD!r} differs from {_EMBEDDING!r}, but config.json states "
            "tie_word_embeddings=True; state false if the head is intended, or remove the head."
        )
