"""Sections of settings that several commands share."""

import sys
from abc import abstractmethod
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, cast

import jax
from jax.sharding import Mesh
from pydantic import (
    AfterValidator,
    PositiveInt,
    create_model,
    field_validator,
    model_validator,
)

from redrafter_jax.config import SamplingConfig, TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import FieldError, field_docs
from redrafter_jax.drafters.base import check_context_layers
from redrafter_jax.drafters.kinds import KINDS, TRAINING, Kind
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.settings.files import Settings

# A target that is larger than any real one, for checks before the real target is known. Its number
# of heads has many divisors.
_ANY = TargetConfig(
    vocab_size=sys.maxsize,
    hidden_size=sys.maxsize,
    intermediate_size=sys.maxsize,
    num_hidden_layers=sys.maxsize,
    num_attention_heads=720720,
    num_key_value_heads=1,
    head_dim=2,
    rope_theta=1.0,
    rms_norm_eps=1.0,
    max_position_embeddings=sys.maxsize,
    tie_word_embeddings=True,
    eos_token_ids=(),
)
# The number of draftable tokens for "auto": with more tokens, the head takes most of the drafting
# time, and hardly any more tokens are accepted.
_DRAFT_TOKENS = 16384


class BuildableSettings(Settings):
    """Settings from which one value of the library is built; building it checks the settings."""

    @model_validator(mode="after")
    def _check_together(self) -> "BuildableSettings":
        self.build()
        return self

    @abstractmethod
    def build(self) -> Any:
        """Build the library's value.

        Raises:
          InputError: the settings contradict each other.
        """


def _refuse_adjustments(sampling: SamplingConfig) -> SamplingConfig:
    if sampling.adjusts:
        raise ValueError(
            "penalties, logit_bias and min_tokens are for generate, chat and serve; leave them out"
        )
    return sampling


# The comparison of texts takes only temperature and filters into account, so adjustments are
# refused.
SamplingSettings = Annotated[
    SamplingConfig,
    AfterValidator(SamplingConfig.refuse_idle_filters),
    AfterValidator(_refuse_adjustments),
]


class MeshSettings(Settings):
    """Numbers of devices that share the work: `data` for the rows of a batch, `model` for weights.

    The mesh is that of `redrafter_jax.make_mesh`, with `data` times `model` devices.
    """

    data: PositiveInt = 1
    model: PositiveInt = 1

    def build(self) -> Mesh | None:
        """Build the mesh; None for a single device, unless several processes are one job.

        Raises:
          InputError: there are too few devices, or a job of several processes would leave some of
            its devices unused.
        """
        if self.data == self.model == 1 and jax.process_count() == 1:
            return None
        mesh = make_mesh(self.data, self.model)
        if jax.process_count() > 1 and mesh.size != jax.device_count():
            raise InputError(
                f"mesh.data={self.data} and mesh.model={self.model} take {mesh.size} of the "
                f"{jax.device_count()} devices of this job; use all of them, or fewer processes."
            )
        return mesh


def _takers(name: str) -> list[Kind]:
    """The kinds of drafters for which a training file may set this field."""
    return [kind for kind in KINDS if kind.training and name in kind.training.settings]


def _shape_fields() -> dict[str, Any]:
    """The annotation and the default of each field that a training file may set.

    If several kinds have a field, the first of them provides both.
    """
    found: dict[str, Any] = {}
    for kind in KINDS:
        declared: dict[str, Any] = {one.name: one for one in fields(kind.config)}
        for name in kind.training.settings if kind.training else ():
            kept, default = declared[name].type, declared[name].default
            found.setdefault(name, (kept | None, None) if default is MISSING else (kept, default))
    return found


def _shape_docs() -> str:
    """A docstring that documents each field with the text of every kind that has the field."""
    lines = ["Fields of the kinds' configurations.", "", "Attributes:"]
    for name in _SHAPE:
        texts = (f"{kind.name}: {field_docs(kind.config)[name]}" for kind in _takers(name))
        lines.append(f"  {name}: {'; '.join(texts)}")
    return "\n".join(lines)


_SHAPE = _shape_fields()
_KindFields: Any = create_model(
    "_KindFields",
    __base__=BuildableSettings,
    __doc__=_shape_docs(),
    kind=(cast(Any, Literal)[tuple(TRAINING)], next(iter(TRAINING))),
    **_SHAPE,
)


class DrafterShape(_KindFields):
    """The `kind` of a drafter, and the fields that the target does not determine.

    A field that the kind does not have is refused. `draft_vocab_size` is the number of tokens that
    the head can draft: null for all tokens of the target, "auto" for at most 16,384.
    """

    draft_vocab_size: PositiveInt | Literal["auto"] | None = None

    @field_validator("kind", mode="before")
    @classmethod
    def _refuse_untrained(cls, name: object) -> object:
        for kind in KINDS:
            if kind.name == name and kind.training is None:
                raise ValueError(
                    f"{kind.title} can be loaded from files but not trained here; train one of "
                    f"{', '.join(TRAINING)}"
                )
        return name

    def count_draft_tokens(self, vocab_size: int) -> int | None:
        """The number of tokens that the head can draft from `vocab_size` tokens; None for all."""
        if self.draft_vocab_size == "auto":
            return _DRAFT_TOKENS if vocab_size > _DRAFT_TOKENS else None
        return self.draft_vocab_size

    def build(
        self,
        target: TargetConfig = _ANY,
        rounds: int = 1,
        draft_tokens: tuple[int, ...] | None = None,
    ) -> HeadConfig:
        """Build the configuration of the head; by default for a target larger than any real one.

        Raises:
          ValueError: a field belongs to another kind.
          FieldError: fields contradict each other.
        """
        kind = next(kind for kind in KINDS if kind.name == self.kind)
        training = TRAINING[self.kind]
        for name, (_, default) in _SHAPE.items():
            if name not in training.settings and getattr(self, name) != default:
                takers = " or ".join(kind.title for kind in _takers(name))
                raise ValueError(f"{name} is for {takers}; leave it out of kind: {self.kind}")
        told = {name: getattr(self, name) for name in training.settings}
        told = {name: value for name, value in told.items() if value is not None}
        own = {**training.defaults(told, target, rounds), **told}
        sizes = target.vocab_size, target.hidden_size
        return kind.config(*sizes, draft_tokens=draft_tokens, **own)

    def build_for(
        self,
        target: TargetConfig,
        rounds: int,
        draft_tokens: tuple[int, ...] | None = None,
    ) -> HeadConfig:
        """Build the configuration of a head for this target.

        Args:
          target: the target's configuration.
          rounds: R, the maximum number of draft rounds.
          draft_tokens: ids of the tokens that the head can draft; None takes the first
            `count_draft_tokens` ids.

        Raises:
          InputError: the target has too few tokens or lacks a context layer, or a field contradicts
            a field that comes from the target.
        """
        count = self.count_draft_tokens(target.vocab_size)
        if count is not None and count > target.vocab_size:
            raise InputError(
                f"drafter.draft_vocab_size is {count}, but the target has {target.vocab_size} "
                "tokens; give that number or fewer."
            )
        if draft_tokens is None and count is not None:
            draft_tokens = tuple(range(count))
        try:
            config = self.build(target, rounds, draft_tokens)
        except FieldError as error:
            raise InputError(f"drafter.{error.field} {error.problem}") from None
        check_context_layers(target, config.layers_of(target), "drafter.context_layers")
        return config
