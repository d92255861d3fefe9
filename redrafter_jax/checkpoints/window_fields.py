"""Sliding windows as `config.json` states them: their length, and which layers have one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter_jax.checkpoints.config_files import field
from redrafter_jax.checkpoints.family_table import Family
from redrafter_jax.checkpoints.rotary_fields import FULL, WINDOWED
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError

# Of layers with a window, every so many has none.
_PERIOD = "sliding_window_pattern"


def read_windows(
    values: Mapping[str, Any], family: Family, layers: int, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window that a target's `config.json` states, and the layers that have it.

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
            f"{path} does not state 'sliding_window', and it has no default; null is none."
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
    """The same as transformers would write it for the family."""
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
