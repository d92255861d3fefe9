"""The contract of a drafter: it reads decided tokens, and proposes trees of the next ones.

A drafter changes how fast the text arrives, never the text. It is a frozen dataclass that JAX knows
as a pytree: its leaves are `Model`s, and arrays that a mesh splits by rows like a batch. It holds
weights, no tree and no state: the tree comes with the call, the state goes in and comes out.
`as_drafter` makes one of what a user gives. To add a kind of drafter, write one file with a
subclass; where its weights come from files, add a record to `redrafter_jax.drafters.kinds`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.config.limits import out_of_order
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import CacheShape, Decided, KVCache, TokenTree, View

# A trained head of any kind, from `load_drafter`; `kinds` has their records.
LoadedHead = Model[Any, Any]


class Drafter(ABC):
    """What every drafter states and does.

    `own`, its state between two calls, is what the last decided token leaves; whatever it keeps of
    earlier ones lies in its layers of the cache. So a beginning that another text left in the cache
    serves it too: `own` is empty when a request's first chunk is read, which then starts above 0.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What reports call it."""

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        """Layers of the target whose outputs the drafter reads beside the last hidden state."""
        del target
        return ()

    @property
    def cache(self) -> CacheShape | None:
        """The layers of its own in the cache; None for a drafter that keeps nothing there."""
        return None

    @property
    def target_layers(self) -> int:
        """How many of the target's first layers it attends to in the cache."""
        return 0

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads hidden states of the target, or tokens alone."""
        return True

    def apart(self) -> "Drafter":
        """The drafter for a place where the target's layers of the cache are not.

        One that attends to these reads the text into layers of its own instead.
        """
        return self

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        """The models whose parameters it holds."""
        return ()

    @property
    def default_tree(self) -> TreeConfig | None:
        """The tree that is drafted where none is asked for; None is the root alone."""
        return TreeConfig()

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that it was not made for; a target of too few layers, by default."""
        check_context_layers(target, self.layers(target), "The drafter's context_layers")

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse trees that it cannot draft; `tree` has no tokens of prompt lookup."""
        del tree

    def prepare(self, lender: Lender) -> "Drafter":
        """The drafter with what it borrows of the target, gathered once for all of its steps."""
        del lender
        return self

    def empty(self, target: Decoder, rows: int) -> Any:
        """The state before anything is read, a pytree whose arrays have B `rows`."""
        del target, rows
        return ()

    def read(
        self, target: Decoder, own: Any, cache: KVCache, decided: Decided
    ) -> tuple[Any, KVCache]:
        """Take in decided tokens: of a chunk of a prompt, or of the path of a step.

        The only writer of its layers of the cache: what was drafted and rejected never enters them.
        A text that has lost its slot is read again, from the beginning of a page on.

        Args:
          target: the target, for its embedding.
          own: its state before.
          cache: its own layers alone; entries below `decided.start` are those of the same text. Its
            `lengths` are `decided.start`; those that are returned are not looked at.
            An entry at position i may depend on the token at i + 1.
          decided: the tokens; a row whose `count` is 0 must keep its state.

        Returns:
          The state, and its layers with the entries of these tokens.
        """
        del target, decided
        return own, cache

    @abstractmethod
    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        """A tree of `tree.budget` nodes below each row's root; siblings carry distinct tokens.

        The engine calls it on what `prepare` returns. On a mesh all arrays are this device's parts.

        Args:
          target: the target, for its embedding and vocabulary projection.
          own: its state, from `read`.
          cache: the `target_layers` and behind them its own, with an entry for each decided token
            but the root.
          view: the rows.
          noise: noise of the P positions after the root, which the target will choose with.
          tree: the shape of the tree, static, without tokens of prompt lookup; P is its `max_path`.
        """


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RootOnly(Drafter):
    """No drafter: the one-node tree, which makes autoregressive decoding the same program."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def default_tree(self) -> None:
        return None

    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del target, own, cache, noise, tree
        return root_tree(view.root)


def check_drafting(target: TargetConfig, drafter: Drafter, tree: TreeConfig | None) -> None:
    """Refuse a drafter of another target, and trees that it cannot draft or that reach too far."""
    drafter.check(target)
    if tree is not None:
        drafter.check_tree(tree.without_lookup)
        check_reach(target, tree)


def check_reach(target: TargetConfig, tree: TreeConfig) -> None:
    """Refuse a tree that is deeper than the target has positions."""
    if tree.max_path > target.position_limit:
        lookup = f" and lookup_tokens {tree.lookup_tokens}" if tree.lookup_tokens else ""
        raise InputError(
            f"TreeConfig.draft_rounds is {tree.draft_rounds}{lookup}, but the target has "
            f"{target.position_limit} positions; draft fewer."
        )


def as_drafter(drafter: LoadedHead | Drafter | None) -> Drafter:
    """The drafter that decoding takes.

    Args:
      drafter: from `load_drafter`; or a model, from `load_target`; or a drafter as it is, such as
        `PromptLookup()`; or None for autoregressive decoding.

    Raises:
      InputError: it is something else.
    """
    if drafter is None:
        return RootOnly()
    if isinstance(drafter, Drafter):
        if any(leaf is drafter for leaf in jax.tree.leaves(drafter)):
            raise InputError(
                f"{type(drafter).__name__} is not a pytree; decorate the class with "
                "jax.tree_util.register_dataclass."
            )
        return drafter
    from redrafter_jax.drafters.kinds import find_weighted  # all kinds' modules, for heads alone

    kind = find_weighted(drafter.config) if isinstance(drafter, Model) else None
    if kind is None:
        raise InputError(
            f"drafter is {drafter!r:.40}; give what load_drafter returns, a Drafter such as "
            "PromptLookup(), or None for autoregressive decoding."
        )
    return kind.drafter(drafter)


def check_pair(target: TargetConfig, drafter: object, tree: TreeConfig) -> None:
    """Refuse a drafter of another target, and trees that it cannot draft or that reach too far.

    `drafter` is the configuration of one that has weights, which may not be loaded yet.
    """
    check_drafting(target, outline(drafter), tree)


def outline(config: object) -> Drafter:
    """The drafter of such a configuration without its weights: what it states and refuses."""
    return as_drafter(Model(config, nnx.split(nnx.Module())[0], nnx.State({})))


def bind_drafter(
    drafter: LoadedHead | Drafter | None, tree: TreeConfig | None = None
) -> tuple[Drafter, TreeConfig | None]:
    """The drafter that decoding takes, and the tree that it drafts.

    Args:
      drafter: as `as_drafter` takes it.
      tree: the shape of its trees; None is the drafter's default.

    Raises:
      InputError: `drafter` is something else, `tree` is no tree, or there is no drafter for it.
    """
    bound = as_drafter(drafter)
    if tree is None:
        return bound, bound.default_tree
    if not isinstance(tree, TreeConfig):
        raise InputError(f"tree is {tree!r}; give a TreeConfig.")
    if isinstance(bound, RootOnly):
        raise InputError(f"tree is {tree}, but there is no drafter; leave tree out.")
    return bound, tree
