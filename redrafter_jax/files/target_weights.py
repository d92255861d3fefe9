"""A target's weights: what their names in files are, which belong to it, and how it is saved."""

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
# Old files carry the rotary frequencies; activations are not quantized.
_IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.input_scale")
# Of a model that reads images too: what is no part of its text model.
_IMAGE_WEIGHTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
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


def match_target(
    folder: Path, described_by: Path, config: TargetConfig, found: Mapping[str, StoredWeight]
) -> MatchedModel:
    """The target whose files hold these weights, which are known to be whole and to fit.

    Args:
      folder: the folder or GGUF file in which it lies.
      described_by: the file that states the configuration.
      config: the configuration.
      found: the weights in the files, by name; of a model that reads images too all of its own.

    Raises:
      InputError: a weight is missing, of another shape, or has no place in the model.
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
    """The same model with the embeddings, the final norm and the vocabulary projection alone."""
    decoder = nnx.eval_shape(lambda: Decoder(matched.config, rngs=nnx.Rngs(0)))
    decoder.layers = nnx.List([])
    ends = [at for at, one in enumerate(matched.parameters) if one.path[0] != "layers"]
    return matched._replace(
        graphdef=nnx.split(decoder)[0],
        parameters=tuple(matched.parameters[at] for at in ends),
        weights=tuple(matched.weights[at] for at in ends),
    )


def save_target(target: Target, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` as transformers would for the target's family.

    Raises:
      InputError: no family has all of its variations.
    """
    # Commands that decode save nothing.
    from redrafter_jax.files.families import target_fields
    from redrafter_jax.files.save import save

    save(Path(folder), target, LAYOUT, target_fields(target.config))


def target_name(config: TargetConfig, name: str) -> str:
    """Ours: layers.0.self_attn.q_proj, ...q_bias; theirs: ...q_proj.weight, ...q_proj.bias."""
    if name.endswith("_bias"):
        return f"model.{name.removesuffix('_bias')}_proj.bias"
    *path, last = name.split(".")
    name = ".".join([*path, _NORMS[config.output_norms].get(last, last)])
    return _HEAD if name == "lm_head" else f"model.{name}.weight"


LAYOUT = Layout(Decoder, target_name, {"num_hidden_layers": "num_hidden_layers"})


def _text_name(name: str) -> str:
    """A weight's name as if the text model within a model for images too were alone."""
    # As transformers 4 and 5 name them inside, and as both name them in files.
    if name.startswith(inner := "model.language_model."):
        return f"model.{name.removeprefix(inner)}"
    return name.removeprefix("language_model.")


def _check_tied_head(stored: Mapping[str, StoredWeight], config: TargetConfig) -> None:
    """Refuse a head of its own in a tied target's files, which may carry the embedding twice."""
    if _HEAD not in stored or _EMBEDDING not in stored:
        return
    head, embedding = stored[_HEAD], stored[_EMBEDDING]
    for weight in (embedding, head):
        if weight.dtype not in (*CODES, "U8"):
            check_shape(weight, (config.vocab_size, config.hidden_size))
    if not same_values(head, embedding):
        raise InputError(
            f"{head.path}: {_HEAD!r} is not the same as {_EMBEDDING!r}, though config.json states "
            "tie_word_embeddings=True; state false if the head is meant, or take it out."
        )
