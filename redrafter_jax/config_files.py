"""`config.json` to configurations and back: Hugging Face targets, drafters in Apple's layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter_jax.config import DrafterConfig, TargetConfig
from redrafter_jax.errors import InputError

DRAFTER_MODEL_TYPE = "recurrent_drafting_drafter"
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
}


def read_target_config(folder: Path) -> TargetConfig:
    """The `TargetConfig` that `config.json` states.

    Raises:
      InputError: the file is missing, lacks a field, or asks for something not supported.
    """
    path = folder / "config.json"
    values = read_json(path)
    if values.get("model_type") != "llama":
        raise InputError(
            f"{path} states model_type {values.get('model_type')!r}; this version reads 'llama'."
        )
    for name, supported in {
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "quantization_config": None,
    }.items():
        if values.get(name, supported) != supported:
            raise InputError(
                f"{path} states {name}={values[name]!r}; only {supported!r} is supported."
            )
    heads = field(values, "num_attention_heads", path, int)
    width = field(values, "hidden_size", path, int)
    return TargetConfig(
        vocab_size=field(values, "vocab_size", path, int),
        hidden_size=width,
        intermediate_size=field(values, "intermediate_size", path, int),
        num_hidden_layers=field(values, "num_hidden_layers", path, int),
        num_attention_heads=heads,
        num_key_value_heads=field(values, "num_key_value_heads", path, int, heads),
        # TargetConfig refuses 0 heads; here they must not divide.
        head_dim=field(values, "head_dim", path, int, width // max(heads, 1)),
        rope_theta=_rope_theta(values, path),
        rms_norm_eps=field(values, "rms_norm_eps", path, float),
        max_position_embeddings=field(values, "max_position_embeddings", path, int),
        # transformers leaves the field out where it is False for Llama.
        tie_word_embeddings=field(values, "tie_word_embeddings", path, bool, False),
        eos_token_ids=_eos_token_ids(folder, values),
    )


def target_fields(config: TargetConfig) -> dict[str, Any]:
    """What transformers would state of the target in `config.json`, for `LlamaForCausalLM`."""
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
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
      InputError: the file is missing, no JSON, or no object.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is missing; a model folder needs it.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, not an object of fields.")
    return values


def field(
    values: Mapping[str, Any], name: str, path: Path, expected: type, default: Any = None
) -> Any:
    """What a file states, or the default; a whole number will do where a float is expected.

    Raises:
      InputError: the field is missing and has no default, or is of another type.
    """
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise InputError(f"{path} does not state {name!r}, and it has no default.")
    if expected is float and type(value) is int:
        return float(value)
    # Not isinstance: to Python, true is a whole number.
    if type(value) is not expected:
        raise InputError(f"{path} states {name}={value!r}; it must be {_EXPECTED[expected]}.")
    return value


def _rope_theta(values: Mapping[str, Any], path: Path) -> float:
    """`rope_theta`, from transformers 4's field or inside transformers 5's `rope_parameters`."""
    parameters = field(values, "rope_parameters", path, dict, {})
    parameters = parameters or field(values, "rope_scaling", path, dict, {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise InputError(
            f"{path} asks for rotary scaling of type {kind!r}; only 'default' is supported."
        )
    return field(parameters if "rope_theta" in parameters else values, "rope_theta", path, float)


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
