"""Sections of settings; `TreeConfig` and `SamplingSettings` are the library's own dataclasses."""

import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, cast

import jax
from jax.sharding import Mesh
from pydantic import (
    AfterValidator,
    GetPydanticSchema,
    NonNegativeInt,
    PositiveInt,
    WrapSerializer,
    WrapValidator,
    model_validator,
)

from redrafter_jax.config import (
    Cell,
    Head,
    HeadConfig,
    MedusaConfig,
    RecurrentConfig,
    SamplingConfig,
    TargetConfig,
    TreeConfig,
)
from redrafter_jax.drafters.base import check_context_layers
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.settings.files import Settings

# Of "auto": a head to more tokens costs most of what drafting does, and gains hardly anything.
_DRAFT_TOKENS = 16384


class BuildableSettings(Settings):
    """Settings that stand for one of the library's values, and are refused as it would be."""

    @model_validator(mode="after")
    def _check_together(self) -> "BuildableSettings":
        self.build()
        return self

    @abstractmethod
    def build(self) -> Any:
        """The library's value.

        Raises:
          InputError: the settings do not go together.
        """


def _read_draft(value: Any, read: Callable[[Any], Any]) -> Any:
    return value if value == "auto" else read(_as_tuples(value))


def _as_tuples(value: Any) -> Any:
    # Pydantic has Python's lists at hand here, which it does not take for tuples.
    if isinstance(value, dict):
        return {name: _as_tuples(one) for name, one in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _write_draft(value: Any, write: Callable[[Any], Any]) -> Any:
    return value if value == "auto" else write(value)


# "auto" stands for the tree of `redrafter_jax.load_tree`. It is no member of a union here, whose
# every member pydantic would blame for a key that is wrong.
DraftSettings = Annotated[
    TreeConfig | Literal["auto"],
    GetPydanticSchema(lambda _, handler: handler(TreeConfig)),
    WrapValidator(_read_draft),
    WrapSerializer(_write_draft),
]
SamplingSettings = Annotated[SamplingConfig, AfterValidator(SamplingConfig.refuse_idle_filters)]


class MeshSettings(Settings):
    """Numbers of devices that share the work; see `redrafter_jax.make_mesh`."""

    data: PositiveInt = 1
    model: PositiveInt = 1

    def build(self) -> Mesh | None:
        """The mesh; None for a single device, unless several processes are one job.

        Raises:
          InputError: there are not as many devices, or a job of several processes has more.
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


class DrafterShape(BuildableSettings):
    """Shape of a drafter: the fields of `redrafter_jax.RecurrentConfig` that a target leaves open.

    Or with `kind: medusa` those of `redrafter_jax.MedusaConfig`, `num_draft_layers` and `head`;
    there are as many heads as draft rounds. `num_draft_layers` None is the papers': 2, or 1 of
    Medusa heads. `exit_dim` None is Apple's layout, twice the target's width. `draft_vocab_size`
    makes the head one to that many tokens; None makes it one to all, "auto" to 16,384 of a target
    that has more.
    """

    kind: Literal["recurrent", "medusa"] = "recurrent"
    exit_dim: PositiveInt | None = None
    num_draft_layers: NonNegativeInt | None = None
    cell: Cell = RecurrentConfig.cell
    head: Head = RecurrentConfig.head
    head_rank: PositiveInt | None = RecurrentConfig.head_rank
    context_layers: tuple[NonNegativeInt, ...] = RecurrentConfig.context_layers
    draft_vocab_size: PositiveInt | Literal["auto"] | None = None

    def count_draft_tokens(self, vocab_size: int) -> int | None:
        """Number of tokens that the head drafts for a vocabulary of this size; None for all."""
        if self.draft_vocab_size == "auto":
            return _DRAFT_TOKENS if vocab_size > _DRAFT_TOKENS else None
        return self.draft_vocab_size

    def build(
        self,
        vocab_size: int = sys.maxsize,
        hidden_size: int = sys.maxsize,
        rounds: int = 1,
        draft_tokens: tuple[int, ...] | None = None,
    ) -> HeadConfig:
        """The library's configuration; by default for a target as large as can be."""
        layers = self.num_draft_layers
        if self.kind == "medusa":
            for name in ("exit_dim", "cell", "head_rank", "context_layers"):
                if getattr(self, name) != DrafterShape.model_fields[name].default:
                    raise ValueError(
                        f"{name} is for a recurrent head; leave it out of kind: medusa"
                    )
            layers, head = 1 if layers is None else layers, cast(Any, self.head)
            return MedusaConfig(vocab_size, hidden_size, rounds, layers, draft_tokens, head)
        if self.head == "low_rank" and self.head_rank is None:
            raise ValueError("head_rank is None; head: low_rank needs one, less than exit_dim")
        own = self.model_dump(include={field.name for field in fields(RecurrentConfig)})
        own["exit_dim"] = self.exit_dim or 2 * hidden_size
        own["num_draft_layers"] = 2 if layers is None else layers
        return RecurrentConfig(vocab_size, hidden_size, draft_tokens=draft_tokens, **own)

    def build_for(
        self,
        target: TargetConfig,
        rounds: int,
        draft_tokens: tuple[int, ...] | None = None,
    ) -> HeadConfig:
        """The library's configuration of a drafter for this target.

        Args:
          target: the target's configuration.
          rounds: R, the tokens that it will draft at most, for which Medusa has a head each.
          draft_tokens: the tokens that can be drafted; None takes the first of as many as
            `count_draft_tokens` says.

        Raises:
          InputError: the target has not so many tokens, or not these layers.
        """
        count = self.count_draft_tokens(target.vocab_size)
        if count is not None and count > target.vocab_size:
            raise InputError(
                f"drafter.draft_vocab_size is {count}; the target has {target.vocab_size} tokens."
            )
        check_context_layers(target, self.context_layers, "drafter.context_layers")
        if draft_tokens is None and count is not None:
            draft_tokens = tuple(range(count))
        return self.build(target.vocab_size, target.hidden_size, rounds, draft_tokens)
