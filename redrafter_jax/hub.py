"""Safetensors to parameters and back: Hugging Face targets, drafters in Apple's layout."""

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
from redrafter_jax.config_files import (
    drafter_fields,
    field,
    read_drafter_config,
    read_json,
    read_target_config,
    target_fields,
)
from redrafter_jax.drafter import Drafter, RecurrentHead
from redrafter_jax.errors import InputError
from redrafter_jax.model import Model
from redrafter_jax.target import Decoder, Target

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("float32", "bfloat16")


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


def load_target_config(name: str | Path) -> TargetConfig:
    """The configuration of a target alone, its weights unread.

    Raises:
      InputError: the folder or its config.json is missing, or the architecture is not supported.
    """
    return read_target_config(_locate(name))


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
    _save(folder, target_fields(target.config), target.params, _target_name)


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` in Apple's layout."""
    config = drafter.config
    _save(folder, drafter_fields(config), drafter.params, _drafter_name(config))


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


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of every stored weight, from the shards' index or the single file's header."""
    index = folder / _INDEX
    if index.is_file():
        placed = field(read_json(index), "weight_map", index, dict)
        return {name: folder / field(placed, name, index, str) for name in placed}
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
