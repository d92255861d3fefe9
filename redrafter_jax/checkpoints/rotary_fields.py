"""Rotary embedding as `config.json` states it, in transformers 4's spelling and in 5's."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter_jax.checkpoints.config_files import field
from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from redrafter_jax.errors import InputError

# What may stand beside `rope_type` and `rope_theta`, for each type.
_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}
# Files of older versions state no base: Llama's was a constant of their code.
_FIRST_WITH_THETA = (4, 33)
_LLAMA_THETA = 10000.0


def read_rotary(values: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """The base and the scaling that a target's `config.json` states.

    Args:
      values: the file's fields: transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes
        `rope_parameters` with both in it.
      path: of the file.

    Raises:
      InputError: a field is missing, of the wrong kind or not supported, or two contradict.
    """
    spellings = {
        name: parameters
        for name in ("rope_parameters", "rope_scaling")
        if (parameters := field(values, name, path, dict, {}))
    }
    # The base is one, wherever it is stated; all else belongs to a spelling.
    stated = {"rope_theta": values}
    stated |= {f"{name}.rope_theta": parameters for name, parameters in spellings.items()}
    thetas = {
        label: field(fields, "rope_theta", path, float)
        for label, fields in stated.items()
        if fields.get("rope_theta") is not None
    }
    theta = field(
        {"rope_theta": _agreed(thetas, path)}, "rope_theta", path, float, _implied_theta(values)
    )
    scalings = [_read(name, parameters, values, path) for name, parameters in spellings.items()]
    if any(scaling != scalings[0] for scaling in scalings):
        raise InputError(
            f"{path} states rope_parameters={spellings['rope_parameters']!r} and rope_scaling="
            f"{spellings['rope_scaling']!r}, which contradict each other; remove one."
        )
    return theta, scalings[0] if scalings else None


def rotary_fields(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The same in transformers 4's spelling, which 5 reads too."""
    kinds = {
        LinearScaling: "linear",
        DynamicScaling: "dynamic",
        Llama3Scaling: "llama3",
        YarnScaling: "yarn",
    }
    if scaling is None:
        return {"rope_theta": theta}
    return {
        "rope_theta": theta,
        "rope_scaling": {"rope_type": kinds[type(scaling)], **vars(scaling)},
    }


def _agreed(stated: Mapping[str, Any], path: Path) -> Any:
    """The one value that is stated under several names; None where there is no name."""
    (first, value), *others = stated.items() or [("", None)]
    for name, other in others:
        if other != value:
            raise InputError(
                f"{path} states {first}={value!r} and {name}={other!r}, which contradict each "
                "other; remove one."
            )
    return value


def _read(
    spelling: str, parameters: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> RopeScaling | None:
    kinds = {
        f"{spelling}.{name}": field(parameters, name, path, str)
        for name in ("rope_type", "type")
        if parameters.get(name) is not None
    }
    kind = _agreed(kinds or {"": "default"}, path)
    if kind not in _FIELDS:
        raise InputError(
            f"{path} asks for rotary scaling of type {kind!r}; supported are "
            f"{', '.join(map(repr, _FIELDS))}."
        )
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise InputError(
            f"{path} states partial_rotary_factor={parameters['partial_rotary_factor']!r}; heads "
            "that are rotated in part are not supported."
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_FIELDS[kind]}
    for name in parameters:
        if name not in known:
            raise InputError(
                f"{path} states {name!r} for rotary scaling of type {kind!r}; supported are "
                f"{', '.join(map(repr, _FIELDS[kind])) or 'no fields'}."
            )
    return _scaling(kind, parameters, values, path)


def _scaling(
    kind: str, parameters: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> RopeScaling | None:
    def number(name: str, default: float | None = None) -> float:
        return field(parameters, name, path, float, default)

    def original(default: int | None = None) -> int:
        return field(parameters, "original_max_position_embeddings", path, int, default)

    match kind:
        case "linear":
            return LinearScaling(number("factor"))
        case "dynamic":
            return DynamicScaling(number("factor"))
        case "llama3":
            slow, fast = number("low_freq_factor"), number("high_freq_factor")
            return Llama3Scaling(number("factor"), slow, fast, original())
        case "yarn":
            # Defaults of the paper and of transformers.
            context = original(field(values, "max_position_embeddings", path, int))
            return YarnScaling(
                number("factor"),
                context,
                number("attention_factor", _yarn_gain(number)),
                number("beta_fast", 32.0),
                number("beta_slow", 1.0),
            )
    return None


def _yarn_gain(number: Any) -> float:
    """What transformers takes where no `attention_factor` is stated."""
    factor = number("factor")

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    whole, of_all = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    return grown(whole) / grown(of_all) if whole and of_all else grown(1.0)


def _implied_theta(values: Mapping[str, Any]) -> float | None:
    """The base of a Llama whose file is older than the field, such as Vicuna's."""
    version = re.match(r"(\d+)\.(\d+)\.", str(values.get("transformers_version")))
    if values.get("model_type") != "llama" or version is None:
        return None
    before = tuple(map(int, version.groups())) < _FIRST_WITH_THETA
    return _LLAMA_THETA if before else None
