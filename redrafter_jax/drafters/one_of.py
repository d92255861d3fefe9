"""Several drafters over one decode state, of which one proposes at a time."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.base import Drafter, check_together
from redrafter_jax.drafters.tree import pad_nodes
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import DecodeState, StepTrace, TokenTree, Verified


class OneOfState(NamedTuple):
    """The state of `OneOf`."""

    speculates: Bool[Array, " B"]  # rows for which a tree is drafted; all at first
    own: tuple[Any, ...]  # every drafter's own state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneOf(Drafter):
    """One of several drafters proposes and all observe, so that the next step may take another."""

    drafters: tuple[Drafter, ...]  # their trees may differ in size
    chosen: int = field(metadata={"static": True})  # which of them proposes

    @property
    def max_path(self) -> int:
        return self.drafters[self.chosen].max_path

    @property
    def longest_path(self) -> int:
        """P of a state that serves every choice."""
        return max(drafter.max_path for drafter in self.drafters)

    @property
    def num_nodes(self) -> int:
        return self.drafters[self.chosen].num_nodes

    @property
    def names(self) -> tuple[str, ...]:
        return self.drafters[self.chosen].names

    @property
    def context_layers(self) -> tuple[int, ...]:
        return max((drafter.context_layers for drafter in self.drafters), key=len)

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return tuple(model for drafter in self.drafters for model in drafter.models)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that any of them refuses, and drafters that read different layers."""
        check_together(self.drafters, target)

    def prepare(self, lender: Lender) -> "OneOf":
        return replace(self, drafters=tuple(one.prepare(lender) for one in self.drafters))

    def init(self, hidden: Float[Array, "B Z"]) -> OneOfState:
        # The state is donated: no buffer may lie in it twice.
        own = [jax.tree.map(jnp.copy, drafter.init(hidden)) for drafter in self.drafters]
        return OneOfState(jnp.ones(len(hidden), bool), tuple(own))

    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        drafter, own = self.drafters[self.chosen], state.drafter.own[self.chosen]
        tree = drafter.propose(decoder, state._replace(drafter=own), noise)
        return pad_nodes(tree, state.drafter.speculates[:, None] | (tree.depth == 0))

    def observe(
        self, drafter_state: OneOfState, verified: Verified, trace: StepTrace
    ) -> OneOfState:
        states = zip(self.drafters, drafter_state.own, strict=True)
        own = tuple(drafter.observe(state, verified, trace) for drafter, state in states)
        return drafter_state._replace(own=own)
