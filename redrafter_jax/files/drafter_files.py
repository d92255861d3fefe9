"""Loads drafters by name: a trained head, a model, or a part of the target itself.

The record of each kind of head in `redrafter_jax.drafters.kinds` defines the layout of its files; a
model has the files of a target.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, overload

from jax.sharding import Mesh
from jax.typing import DTypeLike

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.limits import read_config
from redrafter_jax.drafters.base import Drafter, LoadedHead, outline
from redrafter_jax.drafters.kinds import KINDS, Kind, kind_of, recognise
from redrafter_jax.drafters.self_drafter import SelfDrafter, parse_self
from redrafter_jax.errors import InputError
from redrafter_jax.files.attention_fields import LLAMA_THETA, read_rotary, rotary_fields
from redrafter_jax.files.family_table import FAMILIES, MULTIMODAL
from redrafter_jax.files.fields import errors_naming, field, read_json
from redrafter_jax.files.locate import is_gguf, locate, locate_weights
from redrafter_jax.files.parameters import Layout, MatchedModel, match_weights
from redrafter_jax.files.quantized import check_method
from redrafter_jax.files.save import save
from redrafter_jax.files.stored import StoredWeight, read_table
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.files.weight_files import find_weights
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_mesh, check_target


@overload
def load_drafter(
    name: str | Path,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | None = None,
    *,
    target: None = None,
) -> LoadedHead: ...


@overload
def load_drafter(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None, *, target: Target
) -> LoadedHead | Drafter: ...


def load_drafter(
    name: str | Path,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | None = None,
    *,
    target: Target | None = None,
) -> LoadedHead | Drafter:
    """Load a drafter: a trained head of any kind, a model, or a part of the target itself.

    Args:
      name: the name of a head, of a model, or of a part of the target. For a head, give its folder
        or hub id; the files have the layout of `save_drafter` or of the kind's authors (see
        `redrafter_jax.drafters.kinds`). For a model with the target's vocabulary, give its folder,
        GGUF file or hub id, as in `load_target`. For a part of the target, give "self:int4" (or
        int8 or fp8), a quantized copy; "self:layers=N", the first N layers, which share the
        target's weights; or "self:layers=N,int4", a quantized copy of these layers.
      dtype: dtype of parameters and activations, as in `load_target`.
      mesh: mesh for the drafter, as in `load_target`.
      target: the target to draft for. It is required if the name begins with "self:"; the drafter
        then has the target's dtype and mesh.

    Raises:
      InputError: the errors of `load_target`; or a name that begins with "self:" is unknown, or is
        given without a target.
    """
    own = parse_self(str(name))
    if own is not None and target is None:
        raise InputError(
            f"drafter is {own.name!r}, a part of the target, but no target is given; call "
            f"load_drafter({own.name!r}, target=target)."
        )
    if own is not None and target is not None:
        return own.of(target)
    if mesh is not None:
        check_mesh(mesh)
    return load_found(find_drafter(name), dtype, mesh)


def load_found(
    found: "FoundDrafter", dtype: DTypeLike, mesh: Mesh | None, target: Target | None = None
) -> LoadedHead | Drafter:
    """Load the weights of a found drafter; arguments and errors are as in `load_drafter`."""
    if isinstance(found, FoundSelf):
        assert target is not None, "a part of a target comes after it"
        return found.drafter.of(target)
    if mesh is not None and isinstance(found.config, TargetConfig):
        check_target(found.config, mesh, "drafter")
    return found.load(dtype, mesh)


def save_drafter(drafter: LoadedHead, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` of a head, in the layout of the head's authors.

    `config.json` also holds fields of this library that the authors' layout does not have.

    Raises:
      InputError: the files cannot be written.
    """
    config, kind = drafter.config, kind_of(drafter.config)
    fields = {**kind.files.fields(config)}
    if kind.files.rotary:
        fields |= rotary_fields(config.rope_theta, config.rope_scaling)
    save(Path(folder), drafter, _layout(kind), fields, kind.files.write_tables(config))


class FoundSelf(NamedTuple):
    """A part of the target that drafts for it, before it is loaded.

    Attributes:
      drafter: the part of the target.
      config: the shape of the part.
    """

    drafter: SelfDrafter
    config: TargetConfig

    def digest(self) -> str:
        """The name of the part, which tells it from other parts of the same target."""
        return self.drafter.name


FoundDrafter = MatchedModel | FoundSelf


def find_drafter(name: str | Path, target: TargetFiles | None = None) -> FoundDrafter:
    """Find a drafter without reading its weights; the errors are those of `load_drafter`.

    Args:
      name: name of the drafter, as in `load_drafter`.
      target: the files of the target to draft for. A drafter that does not fit the target is
        refused, and so is a model with other tokens. None skips these checks, and is not allowed
        for names that begin with "self:".
    """
    if (own := parse_self(str(name))) is not None:
        assert target is not None, "its files are known to all that name one"
        return FoundSelf(own, own.shape(target.config))
    path = locate(name)
    stated = {} if is_gguf(path) else read_json(path / "config.json")
    kind = find_kind_of_files(name, stated)
    if kind is None:
        if not is_gguf(path):
            _refuse_unknown(path / "config.json", stated.get("model_type"))
        files = open_target(name)
        if target is not None:
            outline(files.config).check(target.config)
            check_tokens(files, target)
        return files.match()
    found = _match_head(name, path, stated, kind)
    if target is not None:
        outline(found.config).check(target.config)
    return found


def find_head(name: str | Path) -> MatchedModel:
    """Find a trained head without reading its weights; the errors are those of `load_drafter`."""
    folder = locate(name)
    stated = {} if is_gguf(folder) else read_json(folder / "config.json")
    kind = find_kind_of_files(name, stated)
    if kind is None:
        raise InputError(f"{folder} is a model, not a trained head; give a head's folder.")
    return _match_head(name, folder, stated, kind)


def _match_head(
    name: str | Path, folder: Path, values: Mapping[str, Any], kind: Kind
) -> MatchedModel:
    """Match the head in a folder with its files; `values` are the fields of its `config.json`."""
    path = folder / "config.json"
    check_method(values, path)
    files = kind.files
    with errors_naming(path):
        flat = {**files.flatten(values)}
    flat |= {key: field(flat, key, path, needed) for key, needed in files.own_fields.items()}
    rotary: dict[str, Any] = {}
    if files.rotary:
        # Without a stated base, the authors' code and all programs that read the files use Llama's.
        rotary["rope_theta"], rotary["rope_scaling"] = read_rotary(flat, path, LLAMA_THETA)
    # The sizes of some published heads are only in the shapes of the weights.
    folder = locate_weights(name, folder, files.weight_files)
    stored = {**files.rename(find_weights(folder, files.weight_files))}
    tables = {name: stored.pop(name) for name in files.tables if name in stored}
    with errors_naming(path):
        derived = {
            **files.read(flat, _shapes(stored)),
            **files.read_tables(flat, {name: read_table(one) for name, one in tables.items()}),
        }
    config = read_config(kind.config, {**flat, **derived}, path, foreign=True, **rotary)
    matched = match_weights(folder, path, config, stored, _layout(kind), files.ignored)
    return matched._replace(tables=tuple(tables.values()))


def find_kind_of_files(name: str | Path, values: Mapping[str, Any]) -> Kind | None:
    """The kind of a head in a folder or hub repository; None if it holds no head.

    `values` are the fields of `config.json`. Some published heads have the fields of a target with
    one layer. For these alone, the function looks at the weights, and downloads them if needed.
    """
    kind = recognise(values)
    if kind is not None or values.get("num_hidden_layers") != 1:
        return kind
    return recognise(values, _shapes(find_weights(locate_weights(name, locate(name)))))


def _shapes(stored: Mapping[str, StoredWeight]) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in stored.items()}


def check_tokens(drafter: TargetFiles, target: TargetFiles) -> None:
    """Refuse a draft model whose tokens differ from the target's.

    Up to a tenth of the tokens may differ, because fine-tuned models rename reserved tokens.
    Models whose files do not list their tokens are not checked.
    """
    ours, theirs = drafter.token_strings(), target.token_strings()
    if ours is None or theirs is None:
        return
    both = ours.keys() & theirs.keys()
    other = [token for token in both if ours[token] != theirs[token]]
    if 10 * len(other) > len(both):
        token = min(other)
        raise InputError(
            f"{drafter.name} has other tokens than {target.name}: {len(other)} of {len(both)} "
            f"differ, such as token {token}, which is {ours[token]!r:.40} in the first and "
            f"{theirs[token]!r:.40} in the second; use a model with the target's tokenizer."
        )


def _refuse_unknown(path: Path, model_type: object) -> None:
    """Refuse a model type that is neither a known kind of head nor a supported model."""
    known = {*FAMILIES, *MULTIMODAL}
    if model_type not in known:
        heads = ", ".join(repr(kind.files.model_type) for kind in KINDS)
        models = ", ".join(map(repr, sorted(known)))
        raise InputError(
            f"{path} states model_type {model_type!r}; a trained head states one of {heads}, and a "
            f"model that can draft states one of {models}."
        )


def _layout(kind: Kind) -> Layout:
    return Layout(kind.module, kind.files.stored_name, kind.files.layers)
