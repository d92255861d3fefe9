"""Files to parameters and back: targets of Hugging Face and GGUF, drafters by `model_type`."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.flax import save_file
from tqdm import tqdm

from redrafter_jax.checkpoints.config_files import write_atomically
from redrafter_jax.checkpoints.download import is_gguf, locate
from redrafter_jax.checkpoints.families import read_target_config
from redrafter_jax.checkpoints.found import (
    TARGET,
    FoundModel,
    Parameter,
    dotted,
    find_drafter,
    find_target,
    is_matrix,
)
from redrafter_jax.checkpoints.quantized import CODES, MINIMUM, QUANT_METHOD, SCALE, pack
from redrafter_jax.checkpoints.stored import StoredWeight, dtype_of, read_weight
from redrafter_jax.checkpoints.weights import SINGLE_FILE
from redrafter_jax.config import Dtype, TargetConfig
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.kinds import FileLayout, kind_of
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import QuantizedWeight, transposed
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import check_groups, check_mesh, check_target, parameter_spec
from redrafter_jax.parallel.model import Model, Source


def load_target(
    name: str | Path,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | None = None,
    *,
    keep_quantized: bool = False,
) -> Target:
    """Load a target from a folder or a hub id, one weight at a time.

    On a terminal a bar shows how far it is.

    Args:
      name: a folder with `config.json` and safetensors or PyTorch's `.bin` (one file, or shards
        with an index), a GGUF file or any part of one, or the id of a repository on the Hugging
        Face hub; of the hub's, files already downloaded serve where it cannot be reached.
      dtype: dtype of the parameters and activations, "float32" or "bfloat16"; the codes and scales
        of quantized weights stay as they are stored.
      mesh: from `make_mesh`: every device reads its own part of each weight; None is one device.
      keep_quantized: keep the blocks of a GGUF file in their own bits: Q8_0, Q4_0 and Q4_1 exactly,
        Q4_K and Q6_K with the same codes and their scales rounded to float16. Without it they
        become numbers of `dtype`. A folder that holds quantized weights, ours or of GPTQ, AWQ or
        float8, is always loaded so.

    Raises:
      InputError: the folder, a weight or a file is missing, truncated or of the wrong shape,
        there are weights that the model has no place for, it is of a kind not supported, its blocks
        cannot be kept, or the mesh does not divide its heads or its groups.
    """
    if mesh is not None:
        check_mesh(mesh)
    found = find_target(name, keep_quantized=keep_quantized)
    if mesh is not None:
        check_target(found.config, mesh)
    return _load(found, dtype, mesh)


def load_target_without_layers(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
) -> Target:
    """The embeddings, the final norm and the vocabulary projection of a target, and nothing else.

    What is trained on kept hidden states needs no more; this target cannot read tokens. Arguments
    are those of `load_target`, and errors those of `find_target`: the whole files are looked for.
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


def digest_files(found: FoundModel) -> str:
    """A digest of the contents of a model's files: its weights, and what describes it.

    They are read once from beginning to end; on a terminal a bar shows how far it is.

    Args:
      found: from `find_target` or `find_drafter`.
    """
    weights = {part.path for weight in found.weights for part in (weight, *weight.groups)}
    described = found.folder / "config.json"
    if is_gguf(found.folder):
        from redrafter_jax.checkpoints.gguf_header import read_header

        described = read_header(found.folder).path  # the first part, which may hold no weight
    digest = hashlib.sha256()
    paths = [*sorted(weights), *({described} - weights)]
    for path in tqdm(paths, desc=found.folder.name, leave=False, disable=None):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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
) -> LoadedHead:
    """Load a drafter of any kind from a folder or a hub id.

    Its files are what `save_drafter` writes, or what the kind's authors publish; see
    `redrafter_jax.drafters.kinds`. Arguments and errors are those of `load_target`.
    """
    if mesh is not None:
        check_mesh(mesh)
    return _load(find_drafter(name), dtype, mesh)


def save_target(target: Target, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` as transformers would for the target's family.

    Raises:
      InputError: no family has all of its variations.
    """
    _save(Path(folder), target, TARGET)


def save_drafter(drafter: LoadedHead, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, the weights named as by the kind's authors.

    What the authors' layout does not know is said in `config.json`.
    """
    kind = kind_of(drafter.config)
    assert kind is not None, f"{type(drafter.config).__name__} is no drafter's configuration"
    _save(Path(folder), drafter, kind.files or TARGET)


def _load(found: FoundModel, dtype: DTypeLike, mesh: Mesh | None = None) -> Any:
    if str(dtype) not in get_args(Dtype) and dtype not in (jnp.float32, jnp.bfloat16):
        supported = " or ".join(map(repr, get_args(Dtype)))
        raise InputError(f"dtype {dtype!r} is not supported; use {supported}.")
    total = sum(weight.bytes for weight in found.weights)
    flat = []
    # disable=None: no bar where nobody watches.
    with tqdm(
        total=total, desc=found.folder.name, unit="B", unit_scale=True, leave=False, disable=None
    ) as bar:
        for parameter, weight in zip(found.parameters, found.weights, strict=True):
            value = _read(parameter, weight, dtype, mesh)
            flat.append((parameter.path, parameter.variable.replace(value)))
            bar.update(weight.bytes)
    params = nnx.from_flat_state(flat)
    return Model(found.config, found.graphdef, params, mesh, Source(found.folder))


def _read(parameter: Parameter, weight: StoredWeight, dtype: DTypeLike, mesh: Mesh | None) -> Any:
    """Numbers are cast; codes, scales and minima are bit for bit as stored."""
    name, order = dotted(parameter.path), slice(None, None, -1 if parameter.transposed else 1)

    def read(part: StoredWeight, dtype: DTypeLike) -> jax.Array:
        sharding = None
        if mesh is not None:
            sharding = NamedSharding(mesh, parameter_spec(name, part.shape[order], mesh))
        return read_weight(part, dtype, transpose=parameter.transposed, sharding=sharding)

    if weight.scale is None:
        return read(weight, dtype)
    if mesh is not None:
        check_groups(name, weight.shape[order], weight.scale.shape[order], mesh)
    codes = read(weight, CODES[weight.dtype])
    return QuantizedWeight(codes, *(read(part, dtype_of(part)) for part in weight.groups))


def _save(folder: Path, model: Model[Any, Any], files: FileLayout) -> None:
    config = files.fields(model.config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    dtype = None
    for path, variable in nnx.to_flat_state(model.params):
        name, value = files.stored_name(model.config, dotted(path)), variable.get_value()
        if not isinstance(value, QuantizedWeight):
            dtype = value.dtype
            # Of a NumPy array safetensors would write the bytes in the order of before `.T`.
            value = jnp.asarray(value)
            tensors[name] = value.T if is_matrix(name, value) else value
            continue
        config = {**config, "quantization_config": {"quant_method": QUANT_METHOD}}
        parts = transposed(value) if is_matrix(name, value.codes) else value
        codes = np.asarray(parts.codes)
        stored = (pack(codes) if codes.dtype == jnp.int4 else codes, *parts[1:])
        endings = ("", SCALE, MINIMUM)
        tensors |= {
            name + ending: jnp.asarray(part)
            for ending, part in zip(endings, stored, strict=True)
            if part is not None
        }
    fresh = folder / f"{SINGLE_FILE}.new"
    try:
        save_file(tensors, fresh, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        fresh.unlink(missing_ok=True)
        raise InputError(f"{folder / SINGLE_FILE} could not be written ({error}).") from None
    # Killed between these, the folder holds no model, rather than parts of two.
    (folder / "config.json").unlink(missing_ok=True)
    fresh.replace(folder / SINGLE_FILE)
    stated = {**config, "torch_dtype": str(dtype)}
    write_atomically(folder / "config.json", json.dumps(stated, indent=2) + "\n")
    # safetensors leaves a file that its owner alone may read.
    shutil.copymode(folder / "config.json", folder / SINGLE_FILE)
