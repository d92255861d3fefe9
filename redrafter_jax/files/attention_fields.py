"""Rotary embedding and sliding windows as `config.json` states them.

Rotary embedding comes in transformers 4's spelling and in 5's.
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

# Kinds of layers, as transformers calls them.
FULL, WINDOWED = "full_attention", "sliding_attention"
_KINDS: dict[str, type[RopeScaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
# What a type reads beside its own fields, for the `attention_factor` that a file does not state.
_READ = {"yarn": ("mscale", "mscale_all_dim", "attn_factor"), "longrope": ("factor",)}
# Names that every type may state: any value of the first two, which only describe how the model was
# made, and of others the one that changes nothing.
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
# Files of older versions state no base: Llama's was a constant of their code.
_FIRST_WITH_THETA = (4, 33)
LLAMA_THETA = 10000.0
# Of layers with a window, every so many has none.
_PERIOD = "sliding_window_pattern"


def read_rotary(
    values: Mapping[str, Any], path: Path, theta: float | None = None
) -> tuple[float, RopeScaling | None]:
    """The base and the scaling that a target's `config.json` states.

    Args:
      values: the file's fields: transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes
        `rope_parameters` with both in it.
      path: of the file.
      theta: the base where the file states none; None is an error there.

    Raises:
      InputError: a field is missing, of the wrong kind or not supported, or two contradict.
    """
    stated = _stated(values, path)
    base = field(stated, "rope_theta", path, float, theta or _implied_theta(values))
    return base, _scaling(stated, values, path)


def by_layer_kind(values: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The fields as transformers 4 has them where windowed layers have a base of their own.

    It keeps theirs in `rope_local_base_freq`; 5 has `rope_parameters` for each kind of layer.

    Raises:
      InputError: as `read_rotary`, or windowed layers are to be stretched.
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
            "only layers without a window can be stretched."
        )
    others = {name: part for name, part in parameters.items() if name not in (FULL, WINDOWED)}
    local_theta = stated.get("rope_theta")
    return {**values, "rope_parameters": full | others, "rope_local_base_freq": local_theta}


def rotary_fields(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The same in transformers 4's spelling, which 5 reads too."""
    if scaling is None:
        return {"rope_theta": theta}
    kind = next(name for name, one in _KINDS.items() if one is type(scaling))
    # A default is not stated: transformers before 4.56 knows no `truncate`.
    own = {
        one.name: list(value) if isinstance(value, tuple) else value
        for one in fields(scaling)
        if (value := getattr(scaling, one.name)) != one.default
    }
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **own}}


def _stated(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Every parameter that is stated, in whatever place; in several it must be the same."""
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
            f"{path} states partial_rotary_factor={stated['partial_rotary_factor']!r}; heads that "
            "are rotated in part are not supported."
        )
    scaling = _KINDS[kind]
    own = [one.name for one in fields(scaling)] if scaling else []
    known = [*own, *_READ.get(kind, ())]
    for name, value in stated.items():
        if name in {"rope_type", "rope_theta", *_DESCRIBING, *known}:
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise InputError(
                f"{path} states {name}={value!r:.80} for rotary scaling of type {kind!r}; "
                f"supported are {', '.join(map(repr, known)) or 'no fields'}."
            )
    if scaling is YarnScaling:
        stated = {**_yarn_defaults(stated, values, path), **stated}
    elif scaling is LongRopeScaling:
        stated = {**_longrope_defaults(stated, values, path), **stated}
    return read_config(scaling, stated, path, foreign=True) if scaling else None


def _yarn_defaults(
    stated: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, int | float]:
    """Those of the paper (arXiv 2309.00071) and of transformers.

    `attn_factor` is for programs such as vLLM, which multiply by it; transformers does not read it.
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
            f"{path} states attention_factor={stated['attention_factor']!r} and attn_factor="
            f"{more!r}; one is the whole factor and the other multiplies it, remove one."
        )
    whole = gain(one) / gain(all_dimensions) if one and all_dimensions else gain(1.0)
    return {**defaults, "factor": factor, "attention_factor": more * whole}


def _longrope_defaults(
    stated: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, float]:
    """The attention factor of the paper (arXiv 2402.13753), as transformers has it."""
    original = field(stated, "original_max_position_embeddings", path, int)
    factor = _factor(stated, values, path)
    if factor <= 1:
        return {"attention_factor": 1.0}
    if original < 2:
        raise InputError(
            f"{path} states original_max_position_embeddings={original}; without an "
            "attention_factor it must be greater than 1."
        )
    return {"attention_factor": math.sqrt(1 + math.log(factor) / math.log(original))}


def _factor(stated: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> float:
    """What the context is stretched by: where it is not stated, from the two contexts that are."""
    if "factor" in stated or "original_max_position_embeddings" not in stated:
        return field(stated, "factor", path, float)
    original = field(stated, "original_max_position_embeddings", path, int)
    return field(values, "max_position_embeddings", path, int) / max(original, 1)


def _implied_theta(values: Mapping[str, Any]) -> float | None:
    """The base of a Llama whose file is older than the field, such as Vicuna's."""
    version = re.match(r"(\d+)\.(\d+)\.", str(values.get("transformers_version")))
    if values.get("model_type") != "llama" or version is None:
        return None
    before = tuple(map(int, version.groups())) < _FIRST_WITH_THETA
    return LLAMA_THETA if before else None


def read_windows(
    values: Mapping[str, Any], family: Family, layers: int, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window that a target's `config.json` states, and the layers that have it.

    The window is in tokens, the token's own position included; layers are counted from 0. Where no
    layer has one it is `(None, ())`.

    Raises:
      InputError: a field is missing or of the wrong kind, or the family has no such windows.
    """
    window = _stated_window(values, family, path)
    stated = values.get("layer_types")
    if window is None or family.windowed == "all":
        types = [FULL if window is None else WINDOWED] * layers
        if stated not in (None, types):
            raise InputError(
                f"{path} states layer_types={stated!r:.80}; with sliding_window={window} all "
                f"{layers} layers of {family.architecture} are {types[0]!r}."
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
            f"{path} states sliding_window={window}; {family.architecture} of transformers has "
            "none, remove the field if that is meant."
        )
    return window


def window_fields(config: TargetConfig, family: Family) -> dict[str, Any]:
    """The fields of windows as transformers would write them for a target of the family."""
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
