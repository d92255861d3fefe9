"""Folders in Hugging Face's layout to parameters and back: Llama targets, Apple-style drafters."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from redrafter_jax.config import DrafterConfig, TargetConfig
from redrafter_jax.drafter import Drafter, RecurrentHead
from redrafter_jax.errors import InputError
from redrafter_jax.model import Model
from redrafter_jax.target import Decoder, Target

DRAFTER_MODEL_TYPE = "recurrent_drafting_drafter"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("float32", "bfloat16")
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
}


def load_target(name: str | Path, dtype: DTypeLike = "bfloat16") -> Target:
    """Load a Llama-architecture target from a folder or a hub id.

    Args:
      name: a folder with `config.json` and safetensors (one file, or shards with an index), or
        the id of a repository on the Hugging Face hub.
      dtype: dtype of the parameters, "float32" or "bfloat16".

    Raises:
      InputError: the folder, a weight or a file is missing, truncated or of the wrong shape, or
        the architecture is not supported.
    """
    folder = _locate(name)
    config = read_target_config(folder)
    skeleton = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return _load(folder, config, skeleton, _target_name, dtype)


def load_drafter(name: str | Path, dtype: DTypeLike = "bfloat16") -> Drafter:
    """Load a recurrent drafter in Apple's layout from a folder or a hub id.

    Arguments and errors are those of `load_target`.
    """
    folder = _locate(name)
    config = read_drafter_config(folder)
    skeleton = nnx.eval_shape(lambda: RecurrentHead(config, rngs=nnx.Rngs(0)))
    return _load(folder, config, skeleton, _drafter_name(config), dtype)


def save_target(target: Target, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` as transformers would for `LlamaForCausalLM`."""
    config = target.config
    eos = list(config.eos_token_ids)
    values = {
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
    _save(folder, values, target.params, _target_name)


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` in Apple's layout."""
    config = drafter.config
    values = {
        "architectures": ["Drafter"],
        "model_type": DRAFTER_MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": config.rnn,
    }
    _save(folder, values, drafter.params, _drafter_name(config))


def read_target_config(folder: Path) -> TargetConfig:
    """The `TargetConfig` that `config.json` states.

    Raises:
      InputError: the file is missing, lacks a field, or asks for something not supported.
    """
    path = folder / "config.json"
    values = _read_json(path)
    if values.get("model_type") != "llama":
        raise InputError(
            f"{path} states model_type {values.get('model_type')!r}; this version reads 'llama'."
        )
    for field, supported in {
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "quantization_config": None,
    }.items():
        if values.get(field, supported) != supported:
            raise InputError(
                f"{path} states {field}={values[field]!r}; only {supported!r} is supported."
            )
    heads = _field(values, "num_attention_heads", path, int)
    width = _field(values, "hidden_size", path, int)
    return TargetConfig(
        vocab_size=_field(values, "vocab_size", path, int),
        hidden_size=width,
        intermediate_size=_field(values, "intermediate_size", path, int),
        num_hidden_layers=_field(values, "num_hidden_layers", path, int),
        num_attention_heads=heads,
        num_key_value_heads=_field(values, "num_key_value_heads", path, int, heads),
        # TargetConfig refuses 0 heads; here they must not divide.
        head_dim=_field(values, "head_dim", path, int, width // max(heads, 1)),
        rope_theta=_rope_theta(values, path),
        rms_norm_eps=_field(values, "rms_norm_eps", path, float),
        max_position_embeddings=_field(values, "max_position_embeddings", path, int),
        # transformers leaves the field out where it is False for Llama.
        tie_word_embeddings=_field(values, "tie_word_embeddings", path, bool, False),
        eos_token_ids=_eos_token_ids(folder, values),
    )


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The `DrafterConfig` that `config.json` states.

    Raises:
      InputError: the file is missing, lacks a field, or describes another kind of model.
    """
    path = folder / "config.json"
    values = _read_json(path)
    if values.get("model_type") != DRAFTER_MODEL_TYPE:
        raise InputError(
            f"{path} states model_type {values.get('model_type')!r}; a drafter folder states "
            f"{DRAFTER_MODEL_TYPE!r}."
        )
    return DrafterConfig(
        vocab_size=_field(values, "vocab_size", path, int),
        hidden_size=_field(values, "hidden_size", path, int),
        exit_dim=_field(values, "exit_dim", path, int),
        num_draft_layers=_field(values, "num_draft_layers", path, int),
        rnn=_field(values, "rnn", path, bool),
    )


def _rope_theta(values: Mapping[str, Any], path: Path) -> float:
    """`rope_theta`, from transformers 4's field or inside transformers 5's `rope_parameters`."""
    parameters = _field(values, "rope_parameters", path, dict, {})
    parameters = parameters or _field(values, "rope_scaling", path, dict, {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise InputError(
            f"{path} asks for rotary scaling of type {kind!r}; only 'default' is supported."
        )
    return _field(parameters if "rope_theta" in parameters else values, "rope_theta", path, float)


def _eos_token_ids(folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens; `generation_config.json` knows more of them where it is present."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    if generation.is_file() and "eos_token_id" in (general := _read_json(generation)):
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


def _target_name(name: str) -> str:
    prefix = "" if name == "lm_head" else "model."
    return f"{prefix}{name}.weight"


def _drafter_name(config: DrafterConfig) -> Callable[[str], str]:
    """Ours: blocks.0.kernel, lm_head.kernel ... Apple's: one `lm_head` list holds them all."""

    def stored(name: str) -> str:
        name = name.replace("kernel", "weight")
        if name == "lm_head.weight":
            return f"lm_head.{config.num_draft_layers}.weight"
        first, *rest = name.split(".")
        return f"lm_head.{rest[0]}.linear.{rest[1]}" if first == "blocks" else name

    return stored


def _load(
    folder: Path,
    config: Any,
    skeleton: nnx.Module,
    stored_name: Callable[[str], str],
    dtype: DTypeLike,
) -> Any:
    if str(dtype) not in _DTYPES and dtype not in (jnp.float32, jnp.bfloat16):
        raise InputError(f"dtype {dtype!r} is not supported; use 'float32' or 'bfloat16'.")
    graphdef, abstract = nnx.split(skeleton)
    files = _weight_files(folder)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = stored_name(_dotted(path))
        if name not in files:
            raise InputError(f"{folder} holds no weight {name!r}; the folder is incomplete.")
        return _read_weight(files[name], name, leaf.shape, _is_matrix(name, leaf), dtype)

    flat = nnx.to_flat_state(abstract)
    params = nnx.from_flat_state(
        [(path, variable.replace(read(path, variable.get_value()))) for path, variable in flat]
    )
    return Model(config, graphdef, params)


def _save(
    folder: Path, config: Mapping[str, Any], params: nnx.State, stored_name: Callable[[str], str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, variable in nnx.to_flat_state(params):
        name, value = stored_name(_dotted(path)), variable[...]
        tensors[name] = value.T if _is_matrix(name, value) else value
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    stated = {**config, "torch_dtype": str(next(iter(tensors.values())).dtype)}
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")


def _is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a weight is stored [out, in] there and [in, out] here; embeddings are tables."""
    return leaf.ndim == 2 and "embed_tokens" not in name


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


def _locate(name: str | Path) -> Path:
    """The folder itself, or the hub's copy of it."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        raise InputError(
            f"{str(name)!r} is neither a folder nor a repository the Hugging Face hub can be "
            "reached for; give the path of a folder with config.json and model.safetensors."
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is missing; a model folder needs it.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, not an object of fields.")
    return values


def _field(
    values: Mapping[str, Any], name: str, path: Path, expected: type, default: Any = None
) -> Any:
    """What a file states, or the default; a whole number will do where a float is expected."""
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise InputError(f"{path} does not state {name!r}, and it has no default.")
    if expected is float and type(value) is int:
        return float(value)
    # Not isinstance: to Python, true is a whole number.
    if type(value) is not expected:
        raise InputError(f"{path} states {name}={value!r}; it must be {_EXPECTED[expected]}.")
    return value


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of every stored weight, from the shards' index or the single file's header."""
    index = folder / _INDEX
    if index.is_file():
        placed = _field(_read_json(index), "weight_map", index, dict)
        return {name: folder / _field(placed, name, index, str) for name in placed}
    path = folder / _WEIGHTS
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _read_weight(
    path: Path, name: str, shape: tuple[int, ...], transpose: bool, dtype: DTypeLike
) -> jax.Array:
    with _open(path) as file:
        if name not in file.keys():  # noqa: SIM118 - not a mapping
            raise InputError(f"{path} holds no weight {name!r}, which the index places there.")
        stored = file.get_tensor(name)
    expected = shape[::-1] if transpose else shape
    if stored.shape != expected:
        raise InputError(
            f"{path}: weight {name!r} has shape {stored.shape}, config.json asks for {expected}."
        )
    return jnp.asarray(stored.T if transpose else stored, dtype)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="flax")
    except FileNotFoundError:
        raise InputError(f"{path} is missing; the model folder is incomplete.") from None
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error}).") from None
