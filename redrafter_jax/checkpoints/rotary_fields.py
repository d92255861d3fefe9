"""Rotary embedding as `config.json` states it, in transformers 4's spelling and in 5's."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from redrafter_jax.checkpoints.config_files import field
from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from redrafter_jax.errors import InputError

_KINDS: dict[str, type[RopeScaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
# Of yarn, beside its fields: weights of the logarithm in `attention_factor`.
_YARN_WEIGHTS = ("mscale", "mscale_all_dim")
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
        label: field(parameters, "rope_theta", path, float)
        for label, parameters in stated.items()
        if parameters.get("rope_theta") is not None
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
    if scaling is None:
        return {"rope_theta": theta}
    kind = next(name for name, one in _KINDS.items() if one is type(scaling))
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **vars(scaling)}}


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
    if kind not in _KINDS:
        raise InputError(
            f"{path} asks for rotary scaling of type {kind!r}; supported are "
            f"{', '.join(map(repr, _KINDS))}."
        )
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise InputError(
            f"{path} states partial_rotary_factor={parameters['partial_rotary_factor']!r}; heads "
            "that are rotated in part are not supported."
        )
    scaling = _KINDS[kind]
    own = get_type_hints(scaling) if scaling else {}
    known = [*own, *(_YARN_WEIGHTS if scaling is YarnScaling else ())]
    for name in parameters:
        if name not in {"rope_type", "type", "rope_theta", "partial_rotary_factor", *known}:
            raise InputError(
                f"{path} states {name!r} for rotary scaling of type {kind!r}; supported are "
                f"{', '.join(map(repr, known)) or 'no fields'}."
            )
    if scaling is None:
        return None
    defaults = _yarn_defaults(parameters, values, path) if scaling is YarnScaling else {}
    return scaling(
        **{name: field(parameters, name, path, own[name], defaults.get(name)) for name in own}
    )


def _yarn_defaults(
    parameters: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, int | float]:
    """Those of the paper (arXiv 2309.00071) and of transformers."""
    factor = field(parameters, "factor", path, float)

    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dimensions = (field(parameters, name, path, float, 0.0) for name in _YARN_WEIGHTS)
    return {
        "original_max_position_embeddings": field(values, "max_position_embeddings", path, int),
        "attention_factor": gain(one) / gain(all_dimensions)
        if one and all_dimensions
        else gain(1.0),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def _implied_theta(values: Mapping[str, Any]) -> float | None:
    """The base of a Llama whose file is older than the field, such as Vicuna's."""
    version = re.match(r"(\d+)\.(\d+)\.", str(values.get("transformers_version")))
    if values.get("model_type") != "llama" or version is None:
        return None
    before = tuple(map(int, version.groups())) < _FIRST_WITH_THETA
    return _LLAMA_THETA if before else None
