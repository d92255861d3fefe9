"""Models in files before a weight is read: are the files whole, do they fit the configuration."""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from redrafter_jax.checkpoints.config_files import (
    errors_naming,
    field,
    read_fields,
    read_json,
)
from redrafter_jax.checkpoints.download import is_gguf, locate, locate_weights
from redrafter_jax.checkpoints.families import read_target_config, target_fields, text_fields
from redrafter_jax.checkpoints.quantization_methods import check_method, read_method
from redrafter_jax.checkpoints.quantized import CODES, MINIMUM, SCALE, weight_with_scales
from redrafter_jax.checkpoints.stored import StoredWeight, check_shape, is_zero, same_values
from redrafter_jax.checkpoints.weight_names import (
    ACTIVATION_SCALES,
    EMBEDDING,
    HEAD,
    IMAGE_WEIGHTS,
    target_name,
    text_weights,
)
from redrafter_jax.checkpoints.weights import find_weights
from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.kinds import KINDS, FileLayout, Kind, recognise
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Decoder


class Parameter(NamedTuple):
    """A parameter of a module, and the name and shape of its weight; it may lie transposed."""

    path: tuple[Any, ...]
    variable: nnx.Variable[Any]
    name: str
    shape: tuple[int, ...]
    transposed: bool


class FoundModel(NamedTuple):
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
    parameters: tuple[Parameter, ...]
    weights: tuple[StoredWeight, ...]
    left_out: tuple[str, ...]


TARGET = FileLayout(target_fields, target_name, ("num_hidden_layers",))


def find_target(name: str | Path, *, keep_quantized: bool = False) -> FoundModel:
    """A target as `load_target` finds it; only weights that decide what it is are read.

    Raises:
      InputError: as `load_target`, but for what concerns meshes and dtypes.
    """
    folder, config, found = _describe(name, locate(name), keep_quantized)
    stored = text_weights(found)
    # Old files carry the rotary frequencies; activations are not quantized.
    ignored = [r".*\.rotary_emb\.inv_freq", ACTIVATION_SCALES]
    if stored.keys() != found.keys():
        ignored.append(IMAGE_WEIGHTS)
    if config.tie_word_embeddings:
        _check_tied_head(stored, config)
        ignored.append(HEAD)
    return _find(folder, config, stored, Decoder, TARGET, ignored)


def find_drafter(name: str | Path) -> FoundModel:
    """A drafter as `load_drafter` finds it, no weight read yet; errors are the same."""
    folder = locate(name)
    if is_gguf(folder):
        raise InputError(f"{folder} is a GGUF file, which holds a target; a drafter is a folder.")
    path = folder / "config.json"
    values = read_json(path)
    kind = drafter_kind(name, values)
    if kind is None or kind.files is None:
        types = " or ".join(repr(kind.files.model_type) for kind in KINDS if kind.files)
        raise InputError(
            f"{path} states model_type {values.get('model_type')!r}; a drafter folder states "
            f"{types}."
        )
    check_method(values, path)
    files = kind.files
    own = {name: field(values, name, path, needed) for name, needed in files.own_fields.items()}
    # The sizes of some published heads are in the weights alone.
    folder = locate_weights(name, folder, files.weight_files)
    stored = find_weights(folder, files.weight_files)
    with errors_naming(path):
        derived = files.read(values | own, {name: one.shape for name, one in stored.items()})
    config = read_fields(kind.config, {**values, **derived}, path)
    return _find(folder, config, stored, kind.module, files, ignored=())


def drafter_kind(name: str | Path, values: Mapping[str, Any]) -> Kind | None:
    """The kind of drafter by the fields of its `config.json`; None where they are no drafter's.

    Of a folder the names of its weights tell too; those of a hub's model are not downloaded here.
    """
    kind = recognise(values)
    if kind is None and Path(name).is_dir():
        kind = recognise(values, find_weights(Path(name)))
    return kind


def _describe(
    name: str | Path, folder: Path, keep_quantized: bool
) -> tuple[Path, Any, dict[str, StoredWeight]]:
    """What a format of files tells of a target: its place, its configuration, stored weights."""
    if is_gguf(folder):
        from redrafter_jax.checkpoints.gguf import find_gguf  # the `gguf` package takes its time

        return folder, *find_gguf(folder, keep_quantized=keep_quantized)
    config = read_target_config(folder)
    folder = locate_weights(name, folder)
    path = folder / "config.json"
    find_quantized = read_method(text_fields(read_json(path), path), path)
    return folder, config, find_quantized(find_weights(folder))


def _parameters(
    config: Any, module: Callable[..., nnx.Module], files: FileLayout
) -> tuple[Any, list[Parameter]]:
    """The structure of the module, and its parameters, as shapes; no array is allocated."""
    skeleton = nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))
    graphdef, abstract = nnx.split(skeleton)
    parameters = []
    for path, variable in nnx.to_flat_state(abstract):
        name, leaf = files.stored_name(config, dotted(path)), variable.get_value()
        transposed = is_matrix(name, leaf)
        shape = leaf.shape[::-1] if transposed else leaf.shape
        parameters.append(Parameter(path, variable, name, shape, transposed))
    return graphdef, parameters


def _find(
    folder: Path,
    config: Any,
    stored: dict[str, StoredWeight],
    module: Callable[..., nnx.Module],
    files: FileLayout,
    ignored: Sequence[str],
) -> FoundModel:
    """A model whose weights all have their place and shape; names may match those `ignored`.

    Raises:
      InputError: a weight is missing, of another shape, or has no place in the model.
    """
    counts = {name: getattr(config, name) for name in files.layers}
    if prod(max(count, 1) for count in counts.values()) > len(stored):  # before so many are made
        stated = " and ".join(f"{name}={count}" for name, count in counts.items())
        raise InputError(
            f"{_description(folder)} states {stated}, but the files hold {len(stored)} weights; "
            "they do not belong together."
        )
    graphdef, parameters = _parameters(config, module, files)
    weights = []
    for parameter in parameters:
        if parameter.name not in stored:
            raise InputError(
                f"{folder} holds no weight {parameter.name!r}; the model is incomplete."
            )
        weights.append(weight_with_scales(stored, parameter.name, parameter.shape))
    names = {parameter.name for parameter in parameters}
    scales = {name + ending for name in names for ending in (SCALE, MINIMUM)}
    left_out = sorted(stored.keys() - names - scales)
    others = [
        name
        for name in left_out
        if not any(re.fullmatch(pattern, name) for pattern in ignored)
        and not _is_zero_bias(stored, name)
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InputError(
            f"{folder} holds the weight {others[0]!r}{more}, for which the model that "
            f"{_description(folder).name} describes has no place; they do not belong together."
        )
    return FoundModel(folder, config, graphdef, tuple(parameters), tuple(weights), tuple(left_out))


def _is_zero_bias(stored: Mapping[str, StoredWeight], name: str) -> bool:
    """Whether it is a quantized layer's; early folders of GPTQ have them where a model has none."""
    layer = name.removesuffix("bias")
    return layer != name and f"{layer}weight{SCALE}" in stored and is_zero(stored[name])


def _description(folder: Path) -> Path:
    """The file that describes the model."""
    return folder if is_gguf(folder) else folder / "config.json"


def _check_tied_head(stored: Mapping[str, StoredWeight], config: TargetConfig) -> None:
    """A tied target's files may carry the embedding twice, but no head of its own."""
    if HEAD not in stored or EMBEDDING not in stored:
        return
    head, embedding = stored[HEAD], stored[EMBEDDING]
    for weight in (embedding, head):
        if weight.dtype not in (*CODES, "U8"):
            check_shape(weight, (config.vocab_size, config.hidden_size))
    if not same_values(head, embedding):
        raise InputError(
            f"{head.path}: {HEAD!r} is not the same as {EMBEDDING!r}, though config.json states "
            "tie_word_embeddings=True; state false if the head is meant, or take it out."
        )


def is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a weight is stored [out, in] there and [in, out] here; embeddings are tables."""
    return leaf.ndim == 2 and "embed_tokens" not in name


def dotted(path: tuple[Any, ...]) -> str:
    """A parameter's path as one name."""
    return ".".join(str(part) for part in path)
