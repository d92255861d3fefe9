"""`config.json` of a target to its configuration and back: which family has which variations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from redrafter_jax.checkpoints.config_files import field, naming, read_json
from redrafter_jax.checkpoints.rotary_fields import read_rotary, rotary_fields
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError


class _Family(NamedTuple):
    """What a `model_type` implies.

    Attributes:
      architecture: the class of transformers.
      biases: of queries, keys and values, and of the attention block's output; None where
        `attention_bias` states it for all four.
      qk_norm: queries and keys are normalised.
      windowed: which layers may have a sliding window.
      derived: fields that follow from others where the file leaves them out.
    """

    architecture: str
    biases: tuple[bool, bool] | None
    qk_norm: bool
    windowed: Literal["none", "all", "some"]
    derived: tuple[str, ...]


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", None, False, "none", ("num_key_value_heads", "head_dim")),
    "mistral": _Family("MistralForCausalLM", (False, False), False, "all", ("head_dim",)),
    "qwen2": _Family("Qwen2ForCausalLM", (True, False), False, "some", ("head_dim",)),
    "qwen3": _Family("Qwen3ForCausalLM", None, True, "some", ()),
}
# More would take longer to look at than a model takes to load.
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
# Supported values of fields that change what is computed.
_SUPPORTED = {
    "mlp_bias": False,
    "hidden_act": "silu",
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def read_target_config(folder: Path) -> TargetConfig:
    """The `TargetConfig` that `config.json` states.

    Raises:
      InputError: the file is missing, lacks a field, or asks for something not supported.
    """
    path = folder / "config.json"
    values = read_json(path)
    family = _family(values, path)
    sizes = {name: field(values, name, path, int) for name in _SIZES}
    heads, width, layers = (
        sizes[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if layers > _MOST_LAYERS:
        raise InputError(f"{path} states num_hidden_layers={layers}; the most is {_MOST_LAYERS}.")

    def derived(name: str, value: int) -> int:
        return field(values, name, path, int, value if name in family.derived else None)

    with naming(path):
        theta, scaling = read_rotary(values, path)
        bias, output_bias = _biases(values, family, path)
        window, windowed = _windows(values, family, layers, path)
        return TargetConfig(
            **sizes,
            num_key_value_heads=derived("num_key_value_heads", heads),
            # TargetConfig refuses 0 heads; here they must not divide.
            head_dim=derived("head_dim", width // max(heads, 1)),
            rope_theta=theta,
            rms_norm_eps=field(values, "rms_norm_eps", path, float),
            # transformers leaves the field out where it is False.
            tie_word_embeddings=field(values, "tie_word_embeddings", path, bool, False),
            eos_token_ids=_eos_token_ids(folder, values),
            rope_scaling=scaling,
            attention_bias=bias,
            attention_output_bias=output_bias,
            qk_norm=family.qk_norm,
            sliding_window=window,
            windowed_layers=windowed,
        )


def target_fields(config: TargetConfig) -> dict[str, Any]:
    """What transformers would state of the target in `config.json`, for a family that it fits.

    Raises:
      InputError: no family of transformers has all of its variations.
    """
    model_type = _family_of(config)
    family = _FAMILIES[model_type]
    eos = list(config.eos_token_ids)
    stated = {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{name: getattr(config, name) for name in (*_SIZES, *_OTHERS)},
        **rotary_fields(config.rope_theta, config.rope_scaling),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "hidden_act": "silu",
    }
    if family.biases is None:
        stated["attention_bias"] = config.attention_bias
    if model_type == "llama":
        stated["mlp_bias"] = False
    if family.windowed != "none":
        stated["sliding_window"] = config.sliding_window
    if family.windowed == "some":
        stated["use_sliding_window"] = config.sliding_window is not None
        stated["layer_types"] = [
            _WINDOWED if layer in config.windowed_layers else _FULL
            for layer in range(config.num_hidden_layers)
        ]
    return stated


def _family(values: Mapping[str, Any], path: Path) -> _Family:
    """The family of a file that asks for nothing it does not have."""
    model_type = values.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise InputError(
            f"{path} states model_type {model_type!r}; this version reads "
            f"{', '.join(map(repr, _FAMILIES))}."
        )
    architectures = field(values, "architectures", path, list, [family.architecture])
    if family.architecture not in architectures:
        raise InputError(
            f"{path} states architectures={architectures!r}; of model_type {model_type!r} only "
            f"{family.architecture!r} is supported."
        )
    for name, supported in _SUPPORTED.items():
        if values.get(name, supported) != supported:
            raise InputError(
                f"{path} states {name}={values[name]!r}; only {supported!r} is supported."
            )
    return family


def _biases(values: Mapping[str, Any], family: _Family, path: Path) -> tuple[bool, bool]:
    stated = field(values, "attention_bias", path, bool, (family.biases or (False,))[0])
    biases = family.biases or (stated, stated)
    if stated != biases[0]:
        raise InputError(
            f"{path} states attention_bias={stated!r}; {family.architecture} of transformers "
            f"always has {biases[0]!r}, remove the field if that is meant."
        )
    return biases


def _windows(
    values: Mapping[str, Any], family: _Family, layers: int, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, and the layers that have it."""
    window = _stated_window(values, family, path)
    stated = values.get("layer_types")
    if window is None or family.windowed == "all":
        types = [_FULL if window is None else _WINDOWED] * layers
        if stated not in (None, types):
            raise InputError(
                f"{path} states layer_types={stated!r}; with sliding_window={window} all "
                f"{layers} layers of {family.architecture} are {types[0]!r}."
            )
    elif stated is None:
        first = field(values, "max_window_layers", path, int)
        types = [_FULL if layer < first else _WINDOWED for layer in range(layers)]
    else:
        types = field(values, "layer_types", path, list)
        if len(types) != layers or any(kind not in (_FULL, _WINDOWED) for kind in types):
            raise InputError(
                f"{path} states layer_types={types!r}; it must hold {_FULL!r} or {_WINDOWED!r} "
                f"for each of {layers} layers."
            )
    windowed = tuple(layer for layer, kind in enumerate(types) if kind == _WINDOWED)
    return (window, windowed) if windowed else (None, ())


def _stated_window(values: Mapping[str, Any], family: _Family, path: Path) -> int | None:
    if family.windowed == "some" and not field(values, "use_sliding_window", path, bool, False):
        return None
    if family.windowed == "all" and "sliding_window" not in values:
        raise InputError(
            f"{path} does not state 'sliding_window', and it has no default; null is none."
        )
    if values.get("sliding_window") is None:
        return None
    window = field(values, "sliding_window", path, int)
    if family.windowed == "none":
        raise InputError(
            f"{path} states sliding_window={window}; {family.architecture} of transformers has "
            "none, remove the field if that is meant."
        )
    return window


def _family_of(config: TargetConfig) -> str:
    """The first family that has the variations of `config`, and no others."""
    biases = config.attention_bias, config.attention_output_bias
    every_layer = set(config.windowed_layers) == set(range(config.num_hidden_layers))
    windowed = "all" if every_layer else "some" if config.windowed_layers else "none"
    fitting_windows = {"none": ("none",), "all": ("none", "all"), "some": ("none", "all", "some")}
    for model_type, family in _FAMILIES.items():
        fits = (
            config.qk_norm == family.qk_norm
            and (biases == family.biases if family.biases else biases[0] == biases[1])
            and windowed in fitting_windows[family.windowed]
        )
        if fits:
            return model_type
    raise InputError(
        f"No family of transformers has attention_bias={biases[0]}, attention_output_bias="
        f"{biases[1]}, qk_norm={config.qk_norm} and windowed_layers={config.windowed_layers} "
        "together; such a target cannot be written as a Hugging Face folder."
    )


def _eos_token_ids(folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens; `generation_config.json` knows more of them where it is present."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    if generation.is_file() and "eos_token_id" in (general := read_json(generation)):
        path, values = generation, general
    stated = values.get("eos_token_id")
    if stated is None:
        return ()
    tokens = stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int for token in tokens):
        raise InputError(
            f"{path} states eos_token_id={stated!r}; it must be a whole number or a list of them."
        )
    return tuple(tokens)
