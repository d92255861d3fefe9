"""Files to parameters and back: targets of Hugging Face and GGUF, drafters by `model_type`."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.flax import save_file
from tqdm import tqdm

from redrafter_jax.checkpoints.config_files import (
    DRAFTER_MODEL_TYPE,
    drafter_fields,
    read_drafter_config,
    read_json,
)
from redrafter_jax.checkpoints.download import is_gguf, locate, with_weights
from redrafter_jax.checkpoints.families import read_target_config, target_fields
from redrafter_jax.checkpoints.stored import Stored, check_shape, read_weight, same_bytes
from redrafter_jax.checkpoints.weight_names import (
    EMBEDDING,
    HEAD,
    IMAGE_WEIGHTS,
    recurrent_name,
    target_name,
    text_weights,
)
from redrafter_jax.checkpoints.weights import SINGLE_FILE, find_weights
from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.recurrent_head import DraftModel, RecurrentHead
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import check_mesh, check_target, parameter_spec
from redrafter_jax.parallel.model import Model

_DTYPES = ("float32", "bfloat16")


class _Parameter(NamedTuple):
    """A parameter of a module, and the name and shape of its weight; it may lie transposed."""

    path: tuple[Any, ...]
    variable: nnx.Variable[Any]
    name: str
    shape: tuple[int, ...]
    transposed: bool


class _Kind(NamedTuple):
    """A kind of model.

    Attributes:
      read_config: what a folder's `config.json` states.
      module: from a configuration, parameters only.
      stored_name: from a configuration and a parameter's dotted name to its name in the files.
      layers: the field that counts layers.
    """

    read_config: Callable[[Path], Any]
    module: Callable[..., nnx.Module]
    stored_name: Callable[[Any, str], str]
    layers: str


class Found(NamedTuple):
    """A model that can be loaded: its files are whole and fit its `config.json`.

    Attributes:
      folder: where it lies; of GGUF, the file.
      config: what `config.json` states, or the GGUF file.
      graphdef: of the Flax module.
      parameters: of the module.
      weights: one for each parameter.
      left_out: weights in the files that are not read, such as the embedding once more.
    """

    folder: Path
    config: Any
    graphdef: Any
    parameters: tuple[_Parameter, ...]
    weights: tuple[Stored, ...]
    left_out: tuple[str, ...]


def load_target(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
) -> Target:
    """Load a target from a folder or a hub id, one weight at a time.

    On a terminal a bar shows how far it is.

    Args:
      name: a folder with `config.json` and safetensors or PyTorch's `.bin` (one file, or shards
        with an index), a GGUF file or any part of one, or the id of a repository on the Hugging
        Face hub; of the hub's, files already downloaded serve where it cannot be reached.
      dtype: dtype of the parameters, "float32" or "bfloat16".
      mesh: from `make_mesh`: every device reads its own part of each weight; None is one device.

    Raises:
      InputError: the folder, a weight or a file is missing, truncated or of the wrong shape,
        there are weights that the model has no place for, it is of a kind not supported, or the
        mesh does not divide its heads.
    """
    if mesh is not None:
        check_mesh(mesh)
    found = find_target(name)
    if mesh is not None:
        check_target(found.config, mesh)
    return _load(found, dtype, mesh)


def load_target_without_layers(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
) -> Target:
    """The embeddings, the final norm and the vocabulary projection of a target, and nothing else.

    What is trained on kept hidden states needs no more; this target cannot read tokens. Arguments
    and errors are those of `load_target`, whose whole files are looked for.
    """
    found = find_target(name)
    decoder = nnx.eval_shape(lambda: Decoder(found.config, rngs=nnx.Rngs(0)))
    decoder.layers = nnx.List([])
    ends = [at for at, parameter in enumerate(found.parameters) if parameter.path[0] != "layers"]
    found = found._replace(
        graphdef=nnx.split(decoder)[0],
        parameters=tuple(found.parameters[at] for at in ends),
        weights=tuple(found.weights[at] for at in ends),
    )
    return _load(found, dtype, mesh)


def digest_files(name: str | Path) -> str:
    """A digest of the contents of a target's files: its weights and, where it has one, config.json.

    They are read once from beginning to end; on a terminal a bar shows how far it is.
    """
    found = find_target(name)
    config, weights = found.folder / "config.json", {weight.path for weight in found.weights}
    digest = hashlib.sha256()
    paths = [*sorted(weights), *([config] if config.is_file() else [])]
    for path in tqdm(paths, desc=found.folder.name, leave=False, disable=None):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def find_target(name: str | Path) -> Found:
    """A target as `load_target` finds it, no weight read yet; errors are the same."""
    folder, config, found = _describe(name, locate(name), _TARGET)
    stored = text_weights(found)
    # Old files carry the rotary frequencies.
    ignored = [r".*\.rotary_emb\.inv_freq"]
    if stored.keys() != found.keys():
        ignored.append(IMAGE_WEIGHTS)
    if config.tie_word_embeddings:
        _check_tied_head(stored, config)
        ignored.append(HEAD)
    return _find(folder, config, stored, _TARGET, ignored)


def load_target_config(name: str | Path) -> TargetConfig:
    """The configuration of a target alone, its weights unread.

    Raises:
      InputError: the folder, its config.json or the GGUF file is missing, or the architecture is
        not supported.
    """
    path = locate(name)
    if is_gguf(path):
        from redrafter_jax.checkpoints.gguf import find_gguf

        return find_gguf(path)[0]
    return read_target_config(path)


def load_drafter(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
) -> DraftModel:
    """Load a recurrent drafter, in Apple's layout or beyond it, from a folder or a hub id.

    Arguments and errors are those of `load_target`.
    """
    if mesh is not None:
        check_mesh(mesh)
    return _load(find_drafter(name), dtype, mesh)


def find_drafter(name: str | Path) -> Found:
    """A drafter as `load_drafter` finds it, no weight read yet; errors are the same."""
    folder = locate(name)
    if is_gguf(folder):
        raise InputError(f"{folder} is a GGUF file, which holds a target; a drafter is a folder.")
    model_type = read_json(folder / "config.json").get("model_type")
    kind = DRAFTERS.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        raise InputError(
            f"{folder / 'config.json'} states model_type {model_type!r}; a drafter folder states "
            f"{' or '.join(map(repr, DRAFTERS))}."
        )
    return _find(*_describe(name, folder, kind), kind, ignored=())


def stored_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of such a target by its name in the files, and its shape there."""
    _, parameters = _parameters(config, _TARGET)
    return {parameter.name: parameter.shape for parameter in parameters}


def save_target(target: Target, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` as transformers would for the target's family.

    Raises:
      InputError: no family has all of its variations.
    """
    _save(folder, target_fields(target.config), target, _TARGET)


def save_drafter(drafter: DraftModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, in Apple's layout where it applies.

    Where it does not, `config.json` says what is different; see `DrafterConfig.beyond_apple`.
    """
    _save(folder, drafter_fields(drafter.config), drafter, DRAFTERS[DRAFTER_MODEL_TYPE])


_TARGET = _Kind(read_target_config, Decoder, target_name, "num_hidden_layers")
DRAFTERS = {
    DRAFTER_MODEL_TYPE: _Kind(
        read_drafter_config, RecurrentHead, recurrent_name, "num_draft_layers"
    ),
}


def _describe(name: str | Path, folder: Path, kind: _Kind) -> tuple[Path, Any, dict[str, Stored]]:
    """What a format of files tells of a model: where it lies, its configuration, stored weights."""
    if is_gguf(folder):
        from redrafter_jax.checkpoints.gguf import find_gguf  # the `gguf` package takes its time

        return folder, *find_gguf(folder)
    config = kind.read_config(folder)
    folder = with_weights(name, folder)
    return folder, config, find_weights(folder)


def _parameters(config: Any, kind: _Kind) -> tuple[Any, list[_Parameter]]:
    """The structure of the module, and its parameters; none is made."""
    skeleton = nnx.eval_shape(lambda: kind.module(config, rngs=nnx.Rngs(0)))
    graphdef, abstract = nnx.split(skeleton)
    parameters = []
    for path, variable in nnx.to_flat_state(abstract):
        name, leaf = kind.stored_name(config, _dotted(path)), variable.get_value()
        transposed = _is_matrix(name, leaf)
        shape = leaf.shape[::-1] if transposed else leaf.shape
        parameters.append(_Parameter(path, variable, name, shape, transposed))
    return graphdef, parameters


def _find(
    folder: Path, config: Any, stored: dict[str, Stored], kind: _Kind, ignored: Sequence[str]
) -> Found:
    """Everything is checked; `ignored` are regular expressions."""
    layers = getattr(config, kind.layers)
    if layers > len(stored):  # before so many are made
        raise InputError(
            f"{_description(folder)} states {kind.layers}={layers}, but the files hold "
            f"{len(stored)} weights; they do not belong together."
        )
    graphdef, parameters = _parameters(config, kind)
    for parameter in parameters:
        if parameter.name not in stored:
            raise InputError(
                f"{folder} holds no weight {parameter.name!r}; the model is incomplete."
            )
        check_shape(stored[parameter.name], parameter.shape)
    left_out = sorted(stored.keys() - {parameter.name for parameter in parameters})
    others = [
        name for name in left_out if not any(re.fullmatch(pattern, name) for pattern in ignored)
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InputError(
            f"{folder} holds the weight {others[0]!r}{more}, for which the model that "
            f"{_description(folder).name} describes has no place; they do not belong together."
        )
    weights = tuple(stored[parameter.name] for parameter in parameters)
    return Found(folder, config, graphdef, tuple(parameters), weights, tuple(left_out))


def _description(folder: Path) -> Path:
    """The file that describes the model."""
    return folder if is_gguf(folder) else folder / "config.json"


def _load(found: Found, dtype: DTypeLike, mesh: Mesh | None = None) -> Any:
    if str(dtype) not in _DTYPES and dtype not in (jnp.float32, jnp.bfloat16):
        raise InputError(f"dtype {dtype!r} is not supported; use 'float32' or 'bfloat16'.")
    total = sum(weight.bytes for weight in found.weights)
    flat = []
    # disable=None: no bar where nobody watches.
    with tqdm(
        total=total, desc=found.folder.name, unit="B", unit_scale=True, leave=False, disable=None
    ) as bar:
        for parameter, weight in zip(found.parameters, found.weights, strict=True):
            path, variable, _, _, transposed = parameter
            sharding = None
            if mesh is not None:
                shape = variable.get_value().shape
                sharding = NamedSharding(mesh, parameter_spec(_dotted(path), shape, mesh))
            value = read_weight(weight, dtype, transpose=transposed, sharding=sharding)
            flat.append((path, variable.replace(value)))
            bar.update(weight.bytes)
    return Model(found.config, found.graphdef, nnx.from_flat_state(flat), mesh)


def _check_tied_head(stored: Mapping[str, Stored], config: TargetConfig) -> None:
    """A tied target's files may carry the embedding twice, but no head of its own."""
    if HEAD not in stored or EMBEDDING not in stored:
        return
    head, embedding = stored[HEAD], stored[EMBEDDING]
    for weight in (embedding, head):
        check_shape(weight, (config.vocab_size, config.hidden_size))
    if not same_bytes(head, embedding):
        raise InputError(
            f"{head.path}: {HEAD!r} is not the same as {EMBEDDING!r}, though config.json states "
            "tie_word_embeddings=True; state false if the head is meant, or take it out."
        )


def _save(folder: Path, config: Mapping[str, Any], model: Model[Any, Any], kind: _Kind) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, variable in nnx.to_flat_state(model.params):
        name = kind.stored_name(model.config, _dotted(path))
        value = jnp.asarray(variable[...])
        tensors[name] = value.T if _is_matrix(name, value) else value
    try:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        raise InputError(f"{folder / SINGLE_FILE} could not be written ({error}).") from None
    stated = {**config, "torch_dtype": str(next(iter(tensors.values())).dtype)}
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    # safetensors leaves a file that its owner alone may read.
    shutil.copymode(folder / "config.json", folder / SINGLE_FILE)


def _is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a weight is stored [out, in] there and [in, out] here; embeddings are tables."""
    return leaf.ndim == 2 and "embed_tokens" not in name


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)
