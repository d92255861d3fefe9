"""A record for each kind of drafter with weights.

A record holds functions from the modules of its kind. Loading, training and evaluation use the
records and never name a kind themselves. `drafters.base` explains how to add a kind.

A kind has up to three ids. `Kind.name` is the value of `drafter.kind` in training files: "eagle3",
because only EAGLE-3 heads can be trained here. `FileLayout.model_type` is a `model_type` of
`config.json`: "eagle" for all versions, "dflash" for DFlash and DSpark heads. `Drafter.name` is the
name in reports: "eagle".
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters import (
    block,
    block_files,
    block_head,
    eagle,
    eagle_files,
    eagle_head,
    eagle_start,
    hydra,
    hydra_files,
    hydra_head,
    medusa,
    model_drafter,
    own_layer,
    published,
    recurrent,
    recurrent_files,
    recurrent_head,
    recurrent_start,
)
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import DraftReads

Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FileLayout:
    """The layout of a drafter's folder with `config.json` and weights.

    Attributes:
      fields: function from a configuration to the fields of `config.json`.
      stored_name: function from a configuration and a parameter's dotted name to its name in the
        files.
      layers: mapping from configuration fields to their names in `config.json`. The product of
        these fields is the number of layers, which cannot exceed the number of weights in files.
      model_type: a `model_type` of `config.json` by which folders of this kind are recognised.
      is_published: function from the fields of `config.json` to a bool: whether the folder is a
        published drafter of this kind. It serves folders with another `model_type` or none.
      holds: function from the shapes of the weights, by name, to a bool: whether the weights are of
        this kind. It serves folders whose `config.json` has the fields of a target.
      flatten: function from the fields of `config.json` to the flat fields that the other functions
        take. It raises `FieldError`.
      rotary: whether `config.json` states the rotary embedding as a target's file does. If so,
        `rope_theta` and `rope_scaling` are read from there.
      rename: function that renames stored weights to the names that `stored_name` gives.
      ignored: regular expressions for names of stored weights that the module does not have.
      tables: names of stored arrays of integers or bools that are not weights.
      read_tables: function from the fields and the stored `tables` to configuration fields. It
        raises `FieldError`.
      write_tables: function from a configuration to its tables by name.
      own_fields: fields of `config.json` that are required besides the fields of the configuration,
        with their types.
      read: function from the fields of `config.json` and the shapes of the weights to the
        configuration fields that `config.json` states under other names or not at all.
        `own_fields` are checked before the call. It raises `FieldError`.
      weight_files: names of weight files besides `model.safetensors` and `pytorch_model.bin`.
      beyond_apple: function from a configuration to the names of its features that Apple's layout
        does not support; None if Apple's code does not have this kind.
    """

    fields: Callable[[Any], Fields]
    stored_name: Callable[[Any, str], str]
    layers: Mapping[str, str]
    model_type: str
    is_published: Callable[[Fields], bool] = lambda stated: False
    holds: Callable[[Shapes], bool] = lambda shapes: False
    flatten: Callable[[Fields], Fields] = lambda stated: stated
    rotary: bool = False
    rename: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda stored: stored
    ignored: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    read_tables: Callable[[Fields, Mapping[str, Any]], Fields] = lambda stated, tables: {}
    write_tables: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    own_fields: Mapping[str, type] = field(default_factory=dict)
    read: Callable[[Fields, Shapes], Fields] = lambda stated, shapes: {}
    weight_files: tuple[str, ...] = ()
    beyond_apple: Callable[[Any], Iterable[str]] | None = None


@dataclass(frozen=True)
class Training:
    """How a kind is trained; the losses use the scores that `unroll` of its module yields.

    Attributes:
      settings: configuration fields that the `drafter:` section of a training file may set.
      defaults: function that returns values for unset fields. Its arguments are the set fields, the
        target's configuration and R, the number of draft rounds.
      start_from_target: function that initialises a module from the columns of the target's
        vocabulary projection for the U draftable tokens, [D U]. It raises `FieldError`.
      additions: fields of an optional part that may be added to a trained drafter. A part that has
        just been added must not change what the drafter computes.
      raw_layers: whether the head reads the outputs of the target's layers unchanged; otherwise the
        target's final norm is applied to them.
    """

    settings: tuple[str, ...]
    defaults: Callable[[Fields, TargetConfig, int], Fields]
    start_from_target: Callable[[Any, Any], None]
    additions: tuple[str, ...] = ()
    raw_layers: bool = False


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """The record of a drafter with weights, which is a head or a model.

    Attributes:
      config: class of the drafter's configuration.
      drafter: function from a loaded model to a `Drafter`.
      count_reads: function from a configuration, parameters and a tree to the `DraftReads` of
        drafting the tree.
    """

    config: type[Any]
    drafter: Callable[..., Drafter]
    count_reads: Callable[[Any, Any, TreeConfig], DraftReads]


@dataclass(frozen=True, kw_only=True)
class Kind(Weighted):
    """The record of a kind of head; its `config` class has the method `check_tree`.

    Attributes:
      name: value of `drafter.kind` in training files.
      title: words for the kind in sentences, such as "a recurrent head".
      module: class of the head's parameters, called with a configuration.
      files: layout of the head's files.
      training: how the kind is trained; None if it cannot be trained here.
    """

    name: str
    title: str
    module: Callable[..., nnx.Module]
    files: FileLayout
    training: Training | None


RECURRENT = Kind(
    name="recurrent",
    title="a recurrent head",
    config=recurrent_head.RecurrentConfig,
    module=recurrent_head.RecurrentHead,
    drafter=recurrent.RecurrentDrafter,
    files=FileLayout(
        fields=recurrent_files.to_files,
        stored_name=recurrent_files.stored_name,
        layers={"num_draft_layers": "num_draft_layers"},
        model_type=recurrent_files.MODEL_TYPE,
        own_fields={"rnn": bool},
        read=recurrent_files.from_files,
        beyond_apple=lambda config: config.beyond_apple,
    ),
    training=Training(
        settings=(
            *("exit_dim", "num_draft_layers", "cell", "head", "head_rank", "context_layers"),
            *("attention", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            "head_dim",
        ),
        defaults=recurrent_start.train_defaults,
        start_from_target=recurrent_start.start_from_target,
        additions=("attention", *own_layer.LAYER_FIELDS),
    ),
    count_reads=recurrent.count_reads,
)
MEDUSA = Kind(
    name="medusa",
    title="Medusa heads",
    config=medusa.MedusaConfig,
    module=medusa.MedusaHeads,
    drafter=medusa.MedusaDrafter,
    files=FileLayout(
        fields=medusa.to_files,
        stored_name=medusa.stored_name,
        layers={"num_heads": "medusa_num_heads", "num_draft_layers": "medusa_num_layers"},
        model_type=medusa.MODEL_TYPE,
        is_published=medusa.is_published,
        own_fields={"medusa_num_heads": int, "medusa_num_layers": int},
        read=medusa.from_files,
        weight_files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ),
    training=Training(
        settings=("num_draft_layers", "head"),
        defaults=lambda told, target, rounds: {"num_heads": rounds, "num_draft_layers": 1},
        start_from_target=medusa.start_from_target,
    ),
    count_reads=medusa.count_reads,
)
EAGLE = Kind(
    name="eagle3",
    title="an EAGLE head",
    config=eagle_head.EagleConfig,
    module=eagle_head.EagleHead,
    drafter=eagle.EagleDrafter,
    files=FileLayout(
        fields=eagle_files.to_files,
        stored_name=eagle_files.stored_name,
        layers={},
        model_type=eagle_files.MODEL_TYPE,
        is_published=eagle_files.is_published,
        holds=eagle_files.holds,
        flatten=eagle_files.flatten,
        own_fields=dict.fromkeys(eagle_files.STATED, int),
        rotary=True,
        read=eagle_files.from_files,
        rename=eagle_files.rename,
        ignored=eagle_files.IGNORED,
        tables=published.TABLES,
        read_tables=eagle_files.READER.draft_tokens,
        write_tables=published.to_tables,
    ),
    training=Training(
        settings=(
            *("head", "context_layers", "intermediate_size", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "fc_norm", "norm_output"),
        ),
        defaults=eagle_start.train_defaults,
        start_from_target=eagle_start.start_from_target,
        raw_layers=True,
    ),
    count_reads=eagle.count_reads,
)
BLOCK = Kind(
    name="block",
    title="a DFlash or DSpark head",
    config=block_head.BlockConfig,
    module=block_head.BlockHead,
    drafter=block.BlockDrafter,
    files=FileLayout(
        fields=block_files.to_files,
        stored_name=block_files.stored_name,
        layers={"num_layers": "num_hidden_layers"},
        model_type=block_files.MODEL_TYPE,
        is_published=block_files.is_published,
        flatten=block_files.flatten,
        own_fields=dict.fromkeys(block_files.STATED, int),
        rotary=True,
        read=block_files.from_files,
        ignored=block_files.IGNORED,
        tables=published.TABLES,
        read_tables=block_files.READER.draft_tokens,
        write_tables=published.to_tables,
    ),
    training=None,
    count_reads=block.count_reads,
)
HYDRA = Kind(
    name="hydra",
    title="Hydra heads",
    config=hydra_head.HydraConfig,
    module=hydra_head.HydraHeads,
    drafter=hydra.HydraDrafter,
    files=FileLayout(
        fields=hydra_files.to_files,
        stored_name=hydra_files.stored_name,
        layers={"num_heads": "hydra_num_heads"},
        model_type=hydra_files.MODEL_TYPE,
        is_published=hydra_files.is_published,
        own_fields=hydra_files.STATED,
        read=hydra_files.from_files,
        rename=hydra_files.rename,
        ignored=hydra_files.IGNORED,
        weight_files=("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    ),
    training=None,
    count_reads=hydra.count_reads,
)
# If a folder fits several kinds, the first of them is used.
KINDS = (RECURRENT, MEDUSA, HYDRA, BLOCK, EAGLE)
# A model is loaded and trained as a target.
MODEL = Weighted(
    config=TargetConfig,
    drafter=model_drafter.ModelDrafter,
    count_reads=model_drafter.count_reads,
)
# Keyed by `drafter.kind`.
TRAINING = {kind.name: kind.training for kind in KINDS if kind.training is not None}


def find_kind(config: object) -> Kind | None:
    """Return the record for the configuration of a head; None for models and other objects."""
    return next((kind for kind in KINDS if type(config) is kind.config), None)


def find_weighted(config: object) -> Weighted | None:
    """Return the record for the configuration of a head or a model; None for other objects."""
    return next((one for one in (*KINDS, MODEL) if type(config) is one.config), None)


def kind_of(config: HeadConfig) -> Kind:
    """Return the record for the configuration of a head."""
    kind = find_kind(config)
    assert kind is not None, f"{type(config).__name__} has no record"
    return kind


def init_drafter(config: HeadConfig, seed: int) -> LoadedHead:
    """Return a head with random float32 parameters, for training."""
    return Model.split(config, kind_of(config).module(config, rngs=nnx.Rngs(seed)))


def recognise(stated: Fields, shapes: Shapes | None = None) -> Kind | None:
    """Return the record for a folder that holds a drafter; None for other folders.

    Args:
      stated: fields of the folder's `config.json`.
      shapes: shapes of the weights by name, used only if the fields do not decide; None if unknown.
    """
    for kind in KINDS:
        if stated.get("model_type") == kind.files.model_type or kind.files.is_published(stated):
            return kind
    return next((kind for kind in KINDS if shapes and kind.files.holds(shapes)), None)
