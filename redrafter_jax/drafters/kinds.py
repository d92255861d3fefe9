"""The kinds of drafters that have weights: one record each.

A kind's own file holds what its record names. Files, training and evaluation read the records, and
nothing but them and those files names a kind. To add one, write its file and its record.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters import medusa, recurrent
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.types import DraftReads

Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FileLayout:
    """How drafters of a kind lie in a folder of `config.json` and weights.

    Attributes:
      fields: from a configuration to what `config.json` states of it.
      stored_name: from a configuration and a parameter's dotted name to its name in the files.
      layers: fields of the configuration whose product counts the layers; there cannot be more than
        weights in the files.
      model_type: what `config.json` states of a folder that is saved here.
      is_published: whether a folder that states another `model_type`, or none, is of this kind, by
        the fields of its `config.json` and the names of its weights. Of a repository on the hub it
        is asked before the weights are downloaded, with no names.
      own_fields: what `config.json` must state beside fields of the configuration, with its types.
      read: from the fields of `config.json`, in which `own_fields` are checked, and the weights'
        shapes by name to the fields of the configuration that have another name or meaning in
        files. It raises `FieldError`.
      weight_files: names of files that hold the weights beside `model.safetensors` and
        `pytorch_model.bin`.
      beyond_apple: what a model has that Apple's layout does not; None where Apple's code knows
        nothing of the kind.
    """

    fields: Callable[[Any], Fields]
    stored_name: Callable[[Any, str], str]
    layers: tuple[str, ...]
    model_type: str = ""
    is_published: Callable[[Fields, Collection[str]], bool] = lambda stated, names: False
    own_fields: Mapping[str, type] = field(default_factory=dict)
    read: Callable[[Fields, Shapes], Fields] = lambda stated, shapes: {}
    weight_files: tuple[str, ...] = ()
    beyond_apple: Callable[[Any], Iterable[str]] | None = None


@dataclass(frozen=True)
class Training:
    """How a kind is trained; losses compare what its module's `unroll` yields.

    Attributes:
      settings: fields of the configuration that the `drafter:` section of a training file may set.
      defaults: from the target's width D and the rounds R to the fields without default, as they
        are where that section does not set them.
      start_from_target: starts a fresh module from the target's vocabulary projection of the tokens
        to draft, [D U]. It raises `FieldError`.
    """

    settings: tuple[str, ...]
    defaults: Callable[[int, int], Fields]
    start_from_target: Callable[[Any, Any], None]


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    Attributes:
      name: what `drafter.kind` of a training file calls it.
      title: what sentences call it.
      config: its configuration, whose `check_draft` refuses trees that the kind cannot draft.
      module: its weights, made from a configuration.
      drafter: from a loaded model and a tree to a drafter.
      files: its files; None where they are those of a target.
      training: None where it is not trained here.
      count_reads: from a configuration, parameters and a tree to what drafting the tree reads.
    """

    name: str
    title: str
    config: type[Any]
    module: Callable[..., nnx.Module]
    drafter: Callable[..., Drafter]
    files: FileLayout | None
    training: Training | None
    count_reads: Callable[[Any, Any, TreeConfig], DraftReads]


RECURRENT = Kind(
    name="recurrent",
    title="a recurrent head",
    config=recurrent.RecurrentConfig,
    module=recurrent.RecurrentHead,
    drafter=recurrent.RecurrentDrafter,
    files=FileLayout(
        fields=recurrent.to_files,
        stored_name=recurrent.stored_name,
        layers=("num_draft_layers",),
        model_type=recurrent.MODEL_TYPE,
        own_fields={"rnn": bool},
        read=recurrent.from_files,
        beyond_apple=lambda config: config.beyond_apple,
    ),
    training=Training(
        settings=("exit_dim", "num_draft_layers", "cell", "head", "head_rank", "context_layers"),
        defaults=lambda width, rounds: {"exit_dim": 2 * width, "num_draft_layers": 2},
        start_from_target=recurrent.start_from_target,
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
        layers=("num_heads", "num_draft_layers"),
        model_type=medusa.MODEL_TYPE,
        is_published=medusa.is_published,
        own_fields={"medusa_num_heads": int, "medusa_num_layers": int},
        read=medusa.from_files,
        weight_files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ),
    training=Training(
        settings=("num_draft_layers", "head"),
        defaults=lambda width, rounds: {"num_heads": rounds, "num_draft_layers": 1},
        start_from_target=medusa.start_from_target,
    ),
    count_reads=medusa.count_reads,
)
KINDS = (RECURRENT, MEDUSA)
# By `drafter.kind`, those that are trained here.
TRAINED = {kind.name: kind.training for kind in KINDS if kind.training is not None}


def kind_of(config: object) -> Kind | None:
    """The kind that has such a configuration; None where no drafter's weights have it."""
    return next((kind for kind in KINDS if type(config) is kind.config), None)


def recognise(stated: Fields, names: Collection[str] = ()) -> Kind | None:
    """The kind of a folder by the fields of its `config.json` and the names of its weights."""
    for kind in KINDS:
        files = kind.files
        if files and (
            stated.get("model_type") == files.model_type or files.is_published(stated, names)
        ):
            return kind
    return None
