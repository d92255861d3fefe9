"""Reads and writes the fields of rotary embedding and sliding windows in `config.json`.

Rotary embedding is read in the formats of transformers 4 and 5.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    TargetConfig,
    YarnScaling,
)
from redrafter_jax.config.limits import read_config
from redrafter_jax.errors import InputError
from redrafter_jax.files.family_table import Family
from redrafter_jax.files.fields import field

# transformers' names of the kinds of layers.
FULL, WINDOWED = "full_attention", "sliding_attention"
_KINDS: dict[str, type[RopeScaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
# Further fields of a type of scaling, from which a missing `attention_factor` is computed.
_READ = {"yarn": ("mscale", "mscale_all_dim", "attn_factor"), "longrope": ("factor",)}
# Fields that every type of scaling may state. The first two may have any value, because they only
# describe how the model was made; the others must have the value that changes nothing.
_DESCRIBING = ("finetuned", "original_max_position_embeddings")
_NEUTRAL = {
    "factor": 1,
    "attention_factor": 1,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "apply_yarn_scaling": True,
    "truncate": True,
    "partial_rotary_factor": 1,
}
# Older versions of transformers write no rotary base, which was a constant in the code of Llama.
_FIRST_WITH_THETA = (4, 33)
LLAMA_THETA = 10000.0
# With this field set to n, every n-th layer has no window.
_PERIOD = "sliding_window_pattern"


def read_rotary(
    values: Mapping[str, Any], path: Path, theta: float | None = None
) -> tuple[float, RopeScaling | None]:
    """The rotary base that a target's `config.json` states, and the rotary scaling, None for none.

    Args:
      values: the file's fields; transformers 4 writes `rope_theta` and `rope_scaling`, and
        transformers 5 writes both into `rope_parameters`.
      path: path of the file.
      theta: the base if the file states none; with None, a missing base is an error.

    Raises:
      InputError: a field is missing, has the wrong type or is not supported, or two fields
        contradict each other.
    """
    stated = _stated(values, path)
    base = field(stated, "rope_theta", path, float, theta or _implied_theta(values))
    return base, _scaling(stated, values, path)


def by_layer_kind(values: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the fields in the format of transformers 4, for models with two rotary bases.

    Such models have a second rotary base for windowed layers. transformers 4 writes that base into
    `rope_local_base_freq`; transformers 5 writes `rope_parameters` for each kind of layer.

    Raises:
      InputError: the errors of `read_rotary`, or windowed layers have rotary scaling.
    """
    parameters = field(values, "rope_parameters", path, dict, {})
    if not {FULL, WINDOWED} & parameters.keys():
        return values
    full, local = (field(parameters, kind, path, dict, {}) for kind in (FULL, WINDOWED))
    outer = {"rope_theta": values.get("rope_local_base_freq"), "rope_parameters": local}
    stated = _stated(outer, path)
    if _scaling(stated, values, path) is not None:
        raise InputError(
            f"{path} asks for rotary scaling of type {stated['rope_type']!r} in windowed layers; "
            "only layers without a window can be scaled."
        )
    others = {name: part for name, part in parameters.items() if name not in (FULL, WINDOWED)}
    local_theta = stated.get("rope_theta")
    return {**values, "rope_parameters": full | others, "rope_local_base_freq": local_theta}


def rotary_fields(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The fields of `config.json` for a rotary base and a scaling.

    They have the format of transformers 4, which transformers 5 also reads.
    """
    if scaling is None:
        return {"rope_theta": theta}
    kind = next(name for name, one in _KINDS.items() if one is type(scaling))
    # Defaults are left out, because transformers before 4.56 does not know `truncate`.
    own = {
        one.name: list(value) if isinstance(value, tuple) else value
        for one in fields(scaling)
        if (value := getattr(scaling, one.name)) != one.default
    }
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **own}}


def _stated(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """All rotary parameters of the file; a parameter that is stated twice must agree."""
    outer = ("rope_theta", "original_max_position_embeddings")
    places = {"": {name: values.get(name) for name in outer}} | {
        f"{name}.": field(values, name, path, dict, {})
        for name in ("rope_parameters", "rope_scaling")
    }
    stated: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for place, parameters in places.items():
        for label, value in parameters.items():
            name = "rope_type" if label == "type" else label
            if value is None:
                continue
            if name in stated and stated[name] != value:
                raise InputError(
                    f"{path} states {labels[name]}={stated[name]!r} and {place}{label}={value!r}, "
                    "which contradict each other; remove one."
                )
            stated[name] = value
            labels.setdefault(name, place + label)
    return stated


def _scaling(
    stated: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> RopeScaling | None:
    kind = field(stated, "rope_type", path, str, "default")
    if kind not in _KINDS:
        raise InputError(
            f"{path} asks for rotary scaling of type {kind!r:.80}; supported are "
            f"{', '.join(map(repr, _KINDS))}."
        )
    if stated.get("partial_rotary_factor", 1) != 1:
        raise InputError(
            f"{path} states partial_rotary_factor={stated['partial_rotary_factor']!r}; only 1, the "
            "rotation of whole heads, is supported."
        )
    scaling = _KINDS[kind]
    own = [one.name for one in fields(scaling)] if scaling else []
    known = [*own, *_READ.get(kind, ())]
    for name, value in stated.items():
        if name in {"rope_type", "rope_theta", *_DESCRIBING, *known}:
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise InputError(
                f"{path} states {name}={value!r:.80} for rotary scaling of type {kind!r}; the "
                f"supported fields of this type are {', '.join(map(repr, known)) or 'none'}."
            )
    if scaling is YarnScaling:
        stated = {**_yarn_defaults(stated, values, path), **stated}
    elif scaling is LongRopeScaling:
        stated = {**_longrope_defaults(stated, values, path), **stated}
    return read_config(scaling, stated, path, foreign=True) if scaling else None


def _yarn_defaults(
    stated: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, int | float]:
    """YaRN's default values, from the paper (arXiv 2309.00071) and from transformers.

    `attn_factor` is a further factor that vLLM and other programs read and transformers ignores.
    """
    defaults = {
        "original_max_position_embeddings": field(values, "max_position_embeddings", path, int),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    factor = _factor(stated, values, path)

    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dimensions, more = (
        field(stated, name, path, float, default)
        for name, default in zip(_READ["yarn"], (0.0, 0.0, 1.0), strict=True)
    )
    if more != 1 and "attention_factor" in stated:
        raise InputError(
            f"{path} states attention_factor={stated['attention_factor']!r}, which is the whole "
            f"factor, and attn_factor={more!r}, which would change it; remove one of them."
        )
    whole = gain(one) / gain(all_dimensions) if one and all_dimensions else gain(1.0)
    return {**defaults, "factor": factor, "attention_factor": more * whole}


def _longrope_defaults(
    stated: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, float]:
    """The default attention factor of the paper (arXiv 2402.13753), as in transformers."""
    original = field(stated, "original_max_position_embeddings", path, int)
    factor = _factor(stated, values, path)
    if factor <= 1:
        return {"attention_factor": 1.0}
    if original < 2:
        raise InputError(
            f"{path} states original_max_position_embeddings={original}; without "
            "attention_factor, this number must be greater than 1."
        )
    return {"attention_factor": math.sqrt(1 + math.log(factor) / math.log(original))}


def _factor(stated: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> float:
    """The factor by which the context length is scaled.

    If no field states the factor, it is the ratio of the scaled to the original context length.
    """
    if "factor" in stated or "original_max_position_embeddings" not in stated:
        return field(stated, "factor", path, float)
    original = field(stated, "original_max_position_embeddings", path, int)
    return field(values, "max_position_embeddings", path, int) / max(original, 1)


def _implied_theta(values: Mapping[str, Any]) -> float | None:
    """The rotary base of a Llama whose file has no field `rope_theta`, such as Vicuna's file."""
    version = re.match(r"(\d+)\.(\d+)\.", str(values.get("transformers_version")))
    if values.get("model_type") != "llama" or version is None:
        return None
    before = tuple(map(int, version.groups())) < _FIRST_WITH_THETA
    return LLAMA_THETA if before else None


def read_windows(
    values: Mapping[str, Any], family: Family, layers: int, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window that a target's `config.json` states, and the indices of windowed layers.

    The window is in tokens and includes the token's own position; indices start at 0. Without
    windowed layers, the result is `(None, ())`.

    Raises:
      InputError: a field is missing or has the wrong type, or the family has no such window.
    """
    window = _stated_window(values, family, path)
    stated = values.get("layer_types")
    if window is None or family.windowed == "all":
        types = [FULL if window is None else WINDOWED] * layers
        if stated not in (None, types):
            raise InputError(
                f"{path} states layer_types={stated!r:.80}, but with sliding_window={window} all "
                f"{layers} layers of {family.architecture} are {types[0]!r}; correct one of them."
            )
    elif stated is None and family.windowed == "switched":
        first = field(values, "max_window_layers", path, int)
        types = [FULL if layer < first else WINDOWED for layer in range(layers)]
    elif stated is None:
        period = field(values, _PERIOD, path, int, family.defaults[_PERIOD])
        if period < 1:
            raise InputError(f"{path} states {_PERIOD}={period}; it must be 1 or more.")
        types = [WINDOWED if (layer + 1) % period else FULL for layer in range(layers)]
    else:
        types = field(values, "layer_types", path, list)
        if len(types) != layers or any(kind not in (FULL, WINDOWED) for kind in types):
            raise InputError(
                f"{path} states layer_types={types!r:.80}; it must hold {FULL!r} or {WINDOWED!r} "
                f"for each of {layers} layers."
            )
    windowed = tuple(layer for layer, kind in enumerate(types) if kind == WINDOWED)
    return (window, windowed) if windowed else (None, ())


def _stated_window(values: Mapping[str, Any], family: Family, path: Path) -> int | None:
    if family.windowed == "switched" and not field(values, "use_sliding_window", path, bool, False):
        return None
    if family.windowed == "all" and "sliding_window" not in values:
        raise InputError(
            f"{path} does not state 'sliding_window', which has no default; state the window in "
            "tokens, or null for no window."
        )
    default = family.defaults.get("sliding_window")
    if values.get("sliding_window", default) is None:
        return None
    window = field(values, "sliding_window", path, int, default)
    if family.windowed == "none":
        raise InputError(
            f"{path} states sliding_window={window}, but {family.architecture} of transformers has "
            "no window; remove the field if the model needs none."
        )
    return window


def window_fields(config: TargetConfig, family: Family) -> dict[str, Any]:
    """The fields of sliding windows as transformers writes them for a target of this family."""
    stated: dict[str, Any] = {}
    if family.windowed != "none":
        stated["sliding_window"] = config.sliding_window
    if family.windowed == "switched":
        stated["use_sliding_window"] = config.sliding_window is not None
    if family.windowed in ("switched", "pattern"):
        stated["layer_types"] = [
            WINDOWED if layer in config.windowed_layers else FULL
            for layer in range(config.num_hidden_layers)
        ]
    return stated
