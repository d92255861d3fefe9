"""Conversion between a target's `config.json` and its `TargetConfig`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.attention_fields import (
    by_layer_kind,
    read_rotary,
    read_windows,
    rotary_fields,
    window_fields,
)
from redrafter_jax.files.family_table import FAMILIES, MULTIMODAL, Family
from redrafter_jax.files.fields import errors_naming, field
from redrafter_jax.files.quantized import read_method

# Fields that a multimodal model states outside of `text_config`.
_OUTER = ("eos_token_id", "quantization_config", "tie_word_embeddings")
_VARIATIONS = dict.fromkeys(name for family in FAMILIES.values() for name in family.variations)
_STATED = dict.fromkeys(name for family in FAMILIES.values() for name in family.stated)
# Limit on the number of layers: checking more layers would take longer than loading a model.
_MOST_LAYERS = 10_000
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OTHERS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
# The supported values of fields that change the computation.
_SUPPORTED = {
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}


def text_fields(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of the text model, which a multimodal model keeps in `text_config`.

    Raises:
      InputError: `text_config` is missing, or the architecture is not supported.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MULTIMODAL:
        return values
    architecture, text_type = MULTIMODAL[model_type]
    _check_architecture(values, architecture, path)
    outer = {name: values[name] for name in _OUTER if values.get(name) is not None}
    text = field(values, "text_config", path, dict)
    architectures = [FAMILIES[text_type].architecture]
    return {"model_type": text_type, **text, "architectures": architectures, **outer}


def target_config(
    values: Mapping[str, Any], path: Path, generation: tuple[Path, Mapping[str, Any]] | None = None
) -> TargetConfig:
    """The `TargetConfig` for the fields of a `config.json`.

    Args:
      values: the fields of the text model.
      path: path of the file, for error messages.
      generation: path and fields of `generation_config.json`, if there is one; it may list more
        end tokens.

    Raises:
      InputError: a field is missing, or its value is not supported.
    """
    family = _family(values, path)
    ends = _eos_token_ids({**family.defaults, **values}, path, generation)
    values = by_layer_kind(values, path) if family.windowed == "pattern" else values

    def stated(name: str, expected: type, default: Any = None) -> Any:
        return field(values, name, path, expected, family.defaults.get(name, default))

    sizes = {name: stated(name, int) for name in _SIZES}
    heads, width, layers = (
        sizes[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if layers > _MOST_LAYERS:
        raise InputError(
            f"{path} states num_hidden_layers={layers}; at most {_MOST_LAYERS} are supported."
        )

    def derived(name: str, value: int) -> int:
        return stated(name, int, value if name in family.derived else None)

    with errors_naming(path):
        theta, scaling = read_rotary(values, path, family.defaults.get("rope_theta"))
        bias, output_bias = _biases(values, family, path)
        window, windowed = read_windows(values, family, layers, path)
        return TargetConfig(
            **sizes,
            num_key_value_heads=derived("num_key_value_heads", heads),
            # TargetConfig refuses 0 heads later; here they must not be a divisor.
            head_dim=derived("head_dim", width // max(heads, 1)),
            rope_theta=theta,
            rms_norm_eps=stated("rms_norm_eps", float),
            # transformers leaves the field out if it has the family's default.
            tie_word_embeddings=stated("tie_word_embeddings", bool, False),
            eos_token_ids=ends,
            rope_scaling=scaling,
            attention_bias=bias,
            attention_output_bias=output_bias,
            sliding_window=window,
            windowed_layers=windowed,
            **{name: stated(name, float) for name in family.stated},
            **family.variations,
        )


def target_fields(config: TargetConfig) -> dict[str, Any]:
    """The fields of `config.json` as transformers writes them for this target.

    The fields are those of a family (a `model_type` of transformers). If several families have
    exactly the target's variations, the first one is taken.

    Raises:
      InputError: no family of transformers has exactly these variations.
    """
    model_type = _family_of(config)
    family = FAMILIES[model_type]
    eos = list(config.eos_token_ids)
    stated = {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{name: getattr(config, name) for name in (*_SIZES, *_OTHERS, *family.stated)},
        **rotary_fields(config.rope_theta, config.rope_scaling),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        family.activation: config.hidden_act,
    }
    if family.biases is None:
        stated["attention_bias"] = config.attention_bias
    if model_type == "llama":
        stated["mlp_bias"] = False
    return {**stated, **window_fields(config, family)}


def _family(values: Mapping[str, Any], path: Path) -> Family:
    """The family that a file names; fields that change the computation must be supported."""
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise InputError(
            f"{path} states model_type {model_type!r:.80}; this version reads "
            f"{', '.join(map(repr, (*FAMILIES, *MULTIMODAL)))}."
        )
    _check_architecture(values, family.architecture, path)
    read_method(values, path)
    activation = family.variations.get("hidden_act", TargetConfig.hidden_act)
    for name, supported in {
        **_SUPPORTED,
        **family.supported,
        family.activation: activation,
    }.items():
        if values.get(name, supported) != supported:
            raise InputError(
                f"{path} states {name}={values[name]!r:.80}; only {supported!r} is supported."
            )
    return family


def _check_architecture(values: Mapping[str, Any], architecture: str, path: Path) -> None:
    architectures = field(values, "architectures", path, list, [architecture])
    if architecture not in architectures:
        raise InputError(
            f"{path} states architectures={architectures!r:.80}; for model_type "
            f"{values['model_type']!r} only {architecture!r} is supported."
        )


def _biases(values: Mapping[str, Any], family: Family, path: Path) -> tuple[bool, bool]:
    stated = field(values, "attention_bias", path, bool, (family.biases or (False,))[0])
    biases = family.biases or (stated, stated)
    if stated != biases[0]:
        raise InputError(
            f"{path} states attention_bias={stated!r}, but transformers always uses "
            f"{biases[0]!r} for {family.architecture}; remove the field to use {biases[0]!r}."
        )
    return biases


def _family_of(config: TargetConfig) -> str:
    """The name of the first family that has exactly the variations of `config`."""
    biases = config.attention_bias, config.attention_output_bias
    every_layer = set(config.windowed_layers) == set(range(config.num_hidden_layers))
    windowed = "all" if every_layer else "some" if config.windowed_layers else "none"
    own = {name: getattr(config, name) for name in _STATED}
    varied = {name: getattr(config, name) for name in _VARIATIONS}
    plain = {name: getattr(TargetConfig, name) for name in _VARIATIONS}
    for model_type, family in FAMILIES.items():
        fits = (
            varied == {**plain, **family.variations}
            and {name for name, value in own.items() if value is not None} == {*family.stated}
            and (biases == family.biases if family.biases else biases[0] == biases[1])
            and (windowed == "none" or family.windowed in ("switched", "pattern", windowed))
        )
        if fits:
            return model_type
    stated = {"attention_bias": biases[0], "attention_output_bias": biases[1], **varied, **own}
    all_stated = ", ".join(f"{name}={value}" for name, value in stated.items())
    raise InputError(
        f"No family of transformers has all of {all_stated} and "
        f"windowed_layers={config.windowed_layers}, so this target cannot be written as a "
        "Hugging Face folder; give it the variations of one family."
    )


def _eos_token_ids(
    values: Mapping[str, Any], path: Path, generation: tuple[Path, Mapping[str, Any]] | None
) -> tuple[int, ...]:
    """The end tokens; a field in `generation` takes precedence, even if its value is null."""
    if generation is not None and "eos_token_id" in generation[1]:
        path, values = generation
    stated = values.get("eos_token_id")
    if stated is None:
        return ()
    tokens = stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int for token in tokens):
        raise InputError(
            f"{path} states eos_token_id={stated!r:.80}; it must be a whole number or a list of "
            "whole numbers."
        )
    return tuple(tokens)
