"""Drafters in folders; how each kind's files are laid out is said by its record.

The records are those of `redrafter_jax.drafters.kinds`.
"""

from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from redrafter_jax.config.limits import read_config
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.kinds import KINDS, Kind, kind_of, recognise
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import errors_naming, field, read_json
from redrafter_jax.files.locate import is_gguf, locate, locate_weights
from redrafter_jax.files.parameters import Layout, MatchedModel, match_weights, save
from redrafter_jax.files.quantized import check_method
from redrafter_jax.files.weight_files import find_weights
from redrafter_jax.parallel.mesh import check_mesh


def load_drafter(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
) -> LoadedHead:
    """Load a drafter of any kind from a folder or a hub id.

    Its files are what `save_drafter` writes, or what the kind's authors publish; see
    `redrafter_jax.drafters.kinds`. Arguments and errors are those of `load_target`.
    """
    if mesh is not None:
        check_mesh(mesh)
    return find_drafter(name).load(dtype, mesh)


def save_drafter(drafter: LoadedHead, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, with the weights' names in the authors' layout.

    `config.json` also states what the authors' layout does not know.

    Raises:
      InputError: the files cannot be written.
    """
    kind = kind_of(drafter.config)
    save(Path(folder), drafter, _layout(kind), kind.files.fields(drafter.config))


def find_drafter(name: str | Path) -> MatchedModel:
    """A drafter as `load_drafter` finds it, no weight read yet; errors are the same."""
    folder = locate(name)
    if is_gguf(folder):
        raise InputError(f"{folder} is a GGUF file, which holds a target; a drafter is a folder.")
    path = folder / "config.json"
    values = read_json(path)
    kind = recognise(values)
    if kind is None:
        types = " or ".join(repr(kind.files.model_type) for kind in KINDS)
        raise InputError(
            f"{path} states model_type {values.get('model_type')!r}; a drafter folder states "
            f"{types}."
        )
    check_method(values, path)
    files = kind.files
    own = {key: field(values, key, path, needed) for key, needed in files.own_fields.items()}
    # The sizes of some published heads are in the weights alone.
    folder = locate_weights(name, folder, files.weight_files)
    stored = find_weights(folder, files.weight_files)
    with errors_naming(path):
        derived = files.read(values | own, {name: one.shape for name, one in stored.items()})
    config = read_config(kind.config, {**values, **derived}, path, foreign=True)
    return match_weights(folder, path, config, stored, _layout(kind))


def _layout(kind: Kind) -> Layout:
    return Layout(kind.module, kind.files.stored_name, kind.files.layers)
