"""JSON files of model folders, and the `config.json` of drafters in Apple's layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter_jax.config import DrafterConfig
from redrafter_jax.errors import InputError

DRAFTER_MODEL_TYPE = "recurrent_drafting_drafter"
# What Apple's code reads of a drafter's config.json, `DrafterConfig` of configuration_drafter.py.
APPLE_FIELDS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "exit_dim",
    "num_draft_layers",
    "num_lookback_tokens",
    "rnn",
)
# Beyond it a whole number fits no array, and at last no float.
_WHOLE = 2**63
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The `DrafterConfig` that `config.json` states.

    Raises:
      InputError: the file is missing, lacks a field, or describes another kind of model.
    """
    path = folder / "config.json"
    values = read_json(path)
    if values.get("model_type") != DRAFTER_MODEL_TYPE:
        raise InputError(
            f"{path} states model_type {values.get('model_type')!r}; a drafter folder states "
            f"{DRAFTER_MODEL_TYPE!r}."
        )
    return DrafterConfig(
        vocab_size=field(values, "vocab_size", path, int),
        hidden_size=field(values, "hidden_size", path, int),
        exit_dim=field(values, "exit_dim", path, int),
        num_draft_layers=field(values, "num_draft_layers", path, int),
        rnn=field(values, "rnn", path, bool),
        draft_tokens=_draft_tokens(values, path),
    )


def _draft_tokens(values: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    if values.get("draft_tokens") is None:
        return None
    tokens = values["draft_tokens"]
    if not isinstance(tokens, list):
        raise InputError(f"{path} states draft_tokens={tokens!r}; it must be a list of token ids.")
    for token in tokens:
        if type(token) is not int:
            raise InputError(f"{path} states {token!r} in 'draft_tokens'; they must be integers.")
    return tuple(tokens)


def drafter_fields(config: DrafterConfig) -> dict[str, Any]:
    """What Apple's code would state of the drafter in `config.json`.

    And `draft_tokens` where it can draft some tokens only, which Apple's code does not know.
    """
    fewer = {} if config.draft_tokens is None else {"draft_tokens": list(config.draft_tokens)}
    return {
        "architectures": ["Drafter"],
        "model_type": DRAFTER_MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": config.rnn,
        **fewer,
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object of fields that a JSON file holds.

    Raises:
      InputError: the file is missing or cannot be read, is no JSON, or no object.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is missing; a model folder needs it.") from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply for a model's description.") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, not an object of fields.")
    return values


def field(
    values: Mapping[str, Any], name: str, path: Path, expected: type, default: Any = None
) -> Any:
    """What a file states, or the default; a whole number will do where a float is expected.

    Raises:
      InputError: the field is missing and has no default, is of another type or too large.
    """
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise InputError(f"{path} does not state {name!r}, and it has no default.")
    if type(value) is int and not -_WHOLE < value < _WHOLE:
        raise InputError(
            f"{path} states {name}={str(value)[:8]}..., a number of {len(str(abs(value)))} digits; "
            "it must be less than 2 to the 63rd."
        )
    if expected is float and type(value) is int:
        return float(value)
    # Not isinstance: to Python, true is a whole number.
    if type(value) is not expected:
        raise InputError(f"{path} states {name}={value!r}; it must be {_EXPECTED[expected]}.")
    return value
