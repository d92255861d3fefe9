"""The contract of a drafter: it proposes the tokens that a target call verifies.

A drafter changes how fast the text arrives, never the text. It is a frozen dataclass that JAX knows
as a pytree: its leaves are `Model`s, and arrays that a mesh splits by rows like a batch; all that
decides shapes is static. To add a kind of drafter, write one file with a subclass. If its model
comes from files, add a record to `redrafter_jax.drafters.kinds`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from jaxtyping import Array, Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.limits import out_of_order
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import DecodeState, StepTrace, TokenTree, Verified


class Drafter(ABC):
    """What every drafter states and does; shapes follow from the static properties alone."""

    @property
    @abstractmethod
    def max_path(self) -> int:
        """P, the longest path of a tree, root included: tokens that one target call can gain."""

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes of every tree, root and padding nodes included; of a chain, P."""
        return self.max_path

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What reports call the sources of the nodes; `TokenTree.origin` counts them from 0."""

    @property
    def context_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the drafter reads beside the last one."""
        return ()

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        """The models whose parameters it holds."""
        return ()

    def check(self, target: TargetConfig) -> None:
        """Refuse a target of too few positions or layers; overriding methods refuse these too."""
        check_context_layers(target, self.context_layers, "The drafter's context_layers")
        if self.max_path > target.position_limit:
            raise InputError(
                f"The drafter's trees are {self.max_path - 1} tokens deep, but the target has "
                f"{target.position_limit} positions; draft fewer tokens."
            )

    def prepare(self, lender: Lender) -> "Drafter":
        """The drafter with what it borrows of the target, gathered once for all of its steps."""
        del lender
        return self

    def init(self, hidden: Float[Array, "B Z"]) -> Any:
        """The drafter's own state after prefill, a pytree whose arrays have B rows.

        The last prompt token is all that a drafter learns of the prompt: one with a cache of its
        own over the prompt does not fit this contract yet.

        Args:
          hidden: the target's hidden state at the last prompt token: those of the context layers,
            then the last one.
        """
        del hidden
        return ()

    @abstractmethod
    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        """A tree of N nodes below each row's root; siblings carry distinct tokens.

        Loops call it on what `prepare` returns, a single step on the drafter as it is. On a mesh
        all arrays are this device's parts.

        Args:
          decoder: the target, for its embedding and vocabulary projection.
          state: before the step; `state.drafter` is the drafter's own, `state.sampling` how the
            target will choose.
          noise: of the P positions after the root, the noise that the target will choose with.
        """

    def observe(self, drafter_state: Any, verified: Verified, trace: StepTrace) -> Any:
        """The drafter's own state after a step, from the one before it.

        Args:
          drafter_state: before the step.
          verified: hidden states of all nodes, [B N Z]. Those that the next step starts from are at
            node `trace.accepted.path[b, trace.gained[b] - 1]`.
          trace: what the step gained; a row that is done gains 0 and must keep its state.
        """
        del verified, trace
        return drafter_state


def check_context_layers(target: TargetConfig, layers: Sequence[int], name: str) -> None:
    """Refuse layers that do not rise from 0, or that the target does not have below its last.

    The sentence calls them by `name`.
    """
    last = target.num_hidden_layers - 1
    for before, layer in pairwise((-1, *layers)):
        if layer <= before:
            raise InputError(f"{name} {out_of_order('layers', layer, before)}, counted from 0.")
        if layer >= last:
            raise InputError(
                f"{name} holds {layer}; the target has {last + 1} layers, counted from 0, of which "
                f"the last, {last}, is always read: name lower ones."
            )


def check_together(drafters: Sequence[Drafter], target: TargetConfig) -> None:
    """Refuse a target that one of the drafters refuses, and drafters that read different layers."""
    layers: tuple[int, ...] = ()
    for drafter in drafters:
        if not isinstance(drafter, Drafter):
            raise InputError(
                f"{drafter!r:.40} is not a Drafter; pass a loaded head through bind_drafter."
            )
        drafter.check(target)
        if layers and drafter.context_layers not in ((), layers):
            raise InputError(
                f"The drafters read the target's layers {layers} and {drafter.context_layers}; "
                "combine drafters that read the same ones."
            )
        layers = layers or drafter.context_layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RootOnly(Drafter):
    """No drafter: the one-node tree, which makes autoregressive decoding the same program."""

    @property
    def max_path(self) -> int:
        return 1

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        del decoder, noise
        return root_tree(state.root)
