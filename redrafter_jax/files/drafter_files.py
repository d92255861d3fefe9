"""Drafters in folders: recurrent heads in Apple's layout and beyond it, and Medusa heads.

Medusa heads are read as their authors publish them, and as they are saved here. Both call the
numbers of heads and of blocks the same (https://github.com/FasterDecoding/Medusa). Published files
state no model_type and no sizes, and some of them fewer heads than there are; the weights beside
them, in `medusa_lm_head.pt`, tell.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jax.typing import DTypeLike

from redrafter_jax.config import MedusaConfig, RecurrentConfig
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.medusa import MedusaHeads
from redrafter_jax.drafters.recurrent import RecurrentHead
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import field, read_fields, read_json
from redrafter_jax.files.locate import is_gguf, locate, locate_weights
from redrafter_jax.files.parameters import Layout, MatchedModel, match_weights, save
from redrafter_jax.files.quantized import check_method
from redrafter_jax.files.weight_files import find_weights
from redrafter_jax.parallel.mesh import check_mesh

MEDUSA_MODEL_TYPE = "medusa"
DRAFTER_MODEL_TYPE = "recurrent_drafting_drafter"


def read_drafter_config(folder: Path) -> RecurrentConfig:
    """The `RecurrentConfig` that `config.json` states.

    Raises:
      InputError: the file is missing, lacks a field, or states one of another type or range.
    """
    path = folder / "config.json"
    values = read_json(path)
    # Apple's layout states whether there is a cell, in `rnn`; ours which, if it is another.
    has_cell = field(values, "rnn", path, bool)
    cell = field(values, "cell", path, str, "simple" if has_cell else "sum")
    if has_cell == (cell == "sum"):
        raise InputError(
            f"{path} states rnn={has_cell} and cell={cell!r}, which contradict each other."
        )
    return read_fields(RecurrentConfig, values, path, cell=cell)


def drafter_fields(config: RecurrentConfig) -> dict[str, Any]:
    """What Apple's code states of a drafter in `config.json` (`configuration_drafter.py`).

    And what it does not know, where the drafter has it: `RecurrentConfig.beyond_apple`.
    """
    return {
        "architectures": ["Drafter"],
        "model_type": DRAFTER_MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": config.cell != "sum",
        **config.beyond_apple,
    }


def read_medusa_config(folder: Path) -> MedusaConfig:
    """The `MedusaConfig` that `config.json` states; of published heads, with the weights' sizes.

    Raises:
      InputError: a file is missing, or `config.json` lacks a field, or states one of another type
        or range or that the weights contradict.
    """
    path, weights = folder / "config.json", find_weights(folder)
    values = read_json(path)
    heads = field(values, "medusa_num_heads", path, int)
    layers = field(values, "medusa_num_layers", path, int)
    if not values.get("model_type"):
        last = f".{layers}.weight"
        projection = weights.get(f"0{last}")
        if projection is None or len(projection.shape) != 2:
            raise InputError(
                f"{folder} holds no matrix '0{last}', the vocabulary projection that its first "
                f"head has if medusa_num_layers={layers}; they do not belong together."
            )
        V, D = projection.shape
        values = {"vocab_size": V, "hidden_size": D}
        heads = max(heads, sum(name.removesuffix(last).isdecimal() for name in weights))
    if heads * max(layers, 1) > len(weights):  # before so many are made
        raise InputError(
            f"{path} states medusa_num_heads={heads} and medusa_num_layers={layers}, but the files "
            f"hold {len(weights)} weights; they do not belong together."
        )
    return read_fields(MedusaConfig, values, path, num_heads=heads, num_draft_layers=layers)


def medusa_fields(config: MedusaConfig) -> dict[str, Any]:
    """What is stated in `config.json`; the last two only where the published layout lacks them."""
    fields: dict[str, Any] = {
        "architectures": ["Medusa"],
        "model_type": MEDUSA_MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_draft_layers,
    }
    if config.draft_tokens is not None:
        fields["draft_tokens"] = config.draft_tokens
    if config.head != "own":
        fields["head"] = config.head
    return fields


def recurrent_name(config: RecurrentConfig, name: str) -> str:
    """Ours: blocks.0.kernel, lm_head.kernel ... Apple's: one `lm_head` list holds them all."""
    name = name.replace("kernel", "weight")
    if name == "lm_head.weight":
        return f"lm_head.{config.num_draft_layers}.weight"
    first, *rest = name.split(".")
    return f"lm_head.{rest[0]}.linear.{rest[1]}" if first == "blocks" else name


def medusa_name(config: MedusaConfig, name: str) -> str:
    """Ours: heads.0.blocks.0.kernel, heads.0.lm_head.kernel; theirs: 0.0.linear.weight, 0.1 ..."""
    _, head, *path = name.replace("kernel", "weight").split(".")
    if path == ["lm_head", "weight"]:
        return f"{head}.{config.num_draft_layers}.weight"
    _, block, last = path
    return f"{head}.{block}.linear.{last}"


class DrafterKind(NamedTuple):
    """A kind of drafter in files.

    Attributes:
      config: the type of its configuration.
      read_config: function from a folder to the configuration that its `config.json` states.
      fields: function from a configuration to the fields that `config.json` states of it.
      layout: how its parameters lie in files.
    """

    config: type
    read_config: Callable[[Path], Any]
    fields: Callable[[Any], Mapping[str, Any]]
    layout: Layout


# By the model_type that `config.json` states.
DRAFTERS = {
    DRAFTER_MODEL_TYPE: DrafterKind(
        RecurrentConfig,
        read_drafter_config,
        drafter_fields,
        Layout(RecurrentHead, recurrent_name, "num_draft_layers"),
    ),
    MEDUSA_MODEL_TYPE: DrafterKind(
        MedusaConfig,
        read_medusa_config,
        medusa_fields,
        Layout(MedusaHeads, medusa_name, "num_draft_layers"),
    ),
}


def load_drafter(
    name: str | Path, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
) -> LoadedHead:
    """Load a drafter from a folder or a hub id: a recurrent head, or Medusa heads.

    A recurrent head is in Apple's layout or beyond it. Medusa heads are what `save_drafter` writes
    or what their authors publish, `medusa_lm_head.pt` beside `config.json`. Arguments and errors
    are those of `load_target`.
    """
    if mesh is not None:
        check_mesh(mesh)
    return find_drafter(name).load(dtype, mesh)


def save_drafter(drafter: LoadedHead, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, in Apple's layout where it applies.

    Where it does not, `config.json` says what is different; see `RecurrentConfig.beyond_apple`. The
    weights of Medusa heads have the names that their authors gave them.
    """
    kind = next(kind for kind in DRAFTERS.values() if kind.config is type(drafter.config))
    save(Path(folder), drafter, kind.layout, kind.fields(drafter.config))


def find_drafter(name: str | Path) -> MatchedModel:
    """A drafter as `load_drafter` finds it, no weight read yet; errors are the same."""
    folder = locate(name)
    if is_gguf(folder):
        raise InputError(f"{folder} is a GGUF file, which holds a target; a drafter is a folder.")
    values = read_json(folder / "config.json")
    kind = drafter_kind(values)
    if kind is None:
        raise InputError(
            f"{folder / 'config.json'} states model_type {values.get('model_type')!r}; a drafter "
            f"folder states {' or '.join(map(repr, DRAFTERS))}."
        )
    check_method(values, folder / "config.json")
    # The sizes of published Medusa heads are in the weights alone.
    folder = locate_weights(name, folder)
    config, weights = kind.read_config(folder), find_weights(folder)
    return match_weights(folder, folder / "config.json", config, weights, kind.layout)


def drafter_kind(values: Mapping[str, Any]) -> DrafterKind | None:
    """The kind of drafter that the fields of a `config.json` state, None where it is no drafter's.

    Published Medusa heads are known by their number: they state no model_type.
    """
    model_type = values.get("model_type")
    if not model_type and "medusa_num_heads" in values:
        return DRAFTERS[MEDUSA_MODEL_TYPE]
    return DRAFTERS.get(model_type) if isinstance(model_type, str) else None
