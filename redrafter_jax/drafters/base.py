"""The interface of drafters: a drafter reads decided tokens and proposes trees of next tokens.

A drafter affects the speed of decoding, never the text. It is a frozen dataclass, decorated with
`@jax.tree_util.register_dataclass`; its leaves are `Model`s, and arrays that a mesh splits by rows
like a batch. It holds weights, but no tree and no state: trees and states are arguments.

To add a kind of drafter, write a subclass of `Drafter`. `drafters.lookup.PromptLookup` needs
nothing else. A kind with weights has four roles, in one file or in one file each:

* the drafter (`eagle.py`): `read`, `propose`, and `count_reads` for cost estimates;
* `_head` (`eagle_head.py`): configuration and parameters;
* `_files` (`eagle_files.py`): the layouts of its files;
* `_start` (`eagle_start.py`): defaults and initial weights of training.

Register these functions in a record of `drafters.kinds`. `MedusaDrafter` is the smallest example,
with all roles in `medusa.py`; `EagleDrafter` has a layer of its own in the cache. Helpers: `grow`
for a beam search, `tree.build_tree` for the tree of its beams, `own_layer` for a decoder layer that
reads decided tokens, `node_cache` for attention to drafted tokens. `parallel/mesh.py` splits
parameters by their names, so names should match its patterns.
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

# A trained head of any kind, from `load_drafter`; see `kinds` for the records.
LoadedHead = Model[Any, Any]


class Drafter(ABC):
    """The interface of a drafter.

    `own`, the state between two calls, may depend on the last decided token only; everything kept
    of earlier tokens is in the drafter's layers of the cache. This allows texts to share a cached
    prefix: `own` is `empty` when a request's first chunk is read, even if that starts above 0.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the drafter in reports."""

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        """Indices of the target layers whose outputs `read` gets besides the last hidden state."""
        del target
        return ()

    @property
    def cache(self) -> CacheShape | None:
        """The shape of the drafter's own layers in the cache; None if it has none."""
        return None

    @property
    def target_layers(self) -> int:
        """The number of leading target layers whose keys and values `propose` attends to."""
        return 0

    @property
    def reads_hidden(self) -> bool:
        """Whether the drafter reads the target's hidden states, rather than tokens only."""
        return True

    def apart(self) -> "Drafter":
        """The drafter for devices that do not hold the target's layers of the cache.

        A drafter that attends to these layers returns one with layers of its own.
        """
        return self

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        """The models whose parameters the drafter holds."""
        return ()

    @property
    def default_tree(self) -> TreeConfig | None:
        """The default tree; None is the root alone."""
        return TreeConfig()

    def check(self, target: TargetConfig) -> None:
        """Raise an error for a target that does not fit; checks `layers` by default."""
        check_context_layers(target, self.layers(target), "The drafter's context_layers")

    def check_tree(self, tree: TreeConfig) -> None:
        """Raise an error for a tree that cannot be drafted; `tree` has no `lookup_tokens`."""
        del tree

    def prepare(self, lender: Lender) -> "Drafter":
        """Return the drafter with what it borrows from the target, gathered once per engine."""
        del lender
        return self

    def empty(self, target: Decoder, rows: int) -> Any:
        """Return the state before any token is read, a pytree of arrays with B = `rows` rows."""
        del target, rows
        return ()

    def read(
        self, target: Decoder, own: Any, cache: KVCache, decided: Decided
    ) -> tuple[Any, KVCache]:
        """Read decided tokens: a chunk of a prompt, or the accepted path of a step.

        This is the only writer of the drafter's layers in the cache; rejected drafts never enter
        them. After a preemption, a text is read again from the start of a page.

        Args:
          target: the target, for its embedding.
          own: the state before these tokens.
          cache: the drafter's own layers, whose entries below `decided.start` are those of the same
            text. `lengths` are `decided.start`; the `lengths` of the result are ignored. The entry
            at position i may depend on the token at i + 1.
          decided: the tokens. A row with `count` 0 must keep its state.

        Returns:
          The state after these tokens, and the cache with their entries.
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
        """Propose a tree of `tree.budget` nodes for each row; siblings have distinct tokens.

        The engine calls this method on the result of `prepare`. On a mesh, all arrays are shards.

        Args:
          target: the target, for its embedding and vocabulary projection.
          own: the state, from `read`.
          cache: the `target_layers` followed by the drafter's own layers, with an entry for each
            decided token but the root.
          view: the rows.
          noise: the noise with which the target will choose the P tokens after the root.
          tree: the shape of the tree, static, without `lookup_tokens`; P is its `max_path`.
        """


def check_context_layers(target: TargetConfig, layers: Sequence[int], name: str) -> None:
    """Raise an error unless the layers ascend from 0 and lie below the target's last layer.

    `name` is what the error message calls the layers.
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
    """No drafter: the tree is the root alone, as in autoregressive decoding."""

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
    """Raise an error if a drafter does not fit the target, or cannot draft the tree."""
    drafter.check(target)
    if tree is not None:
        drafter.check_tree(tree.without_lookup)
        check_reach(target, tree)


def check_reach(target: TargetConfig, tree: TreeConfig) -> None:
    """Raise an error if the tree is deeper than the target has positions."""
    if tree.max_path > target.position_limit:
        lookup = f" and lookup_tokens {tree.lookup_tokens}" if tree.lookup_tokens else ""
        raise InputError(
            f"TreeConfig.draft_rounds is {tree.draft_rounds}{lookup}, but the target has "
            f"{target.position_limit} positions; draft fewer."
        )


def as_drafter(drafter: LoadedHead | Drafter | None) -> Drafter:
    """Return the `Drafter` for any kind of drafter argument.

    Args:
      drafter: a head or a model, from `load_drafter` or `load_target`; a `Drafter` such as
        `PromptLookup()`; or None for autoregressive decoding.

    Raises:
      InputError: the argument is something else.
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
    from redrafter_jax.drafters.kinds import find_weighted  # loads the modules of all kinds

    kind = find_weighted(drafter.config) if isinstance(drafter, Model) else None
    if kind is None:
        raise InputError(
            f"drafter is {drafter!r:.40}; give the result of load_drafter, a Drafter such as "
            "PromptLookup(), or None for autoregressive decoding."
        )
    return kind.drafter(drafter)


def check_pair(target: TargetConfig, drafter: object, tree: TreeConfig) -> None:
    """Raise an error if a drafter does not fit the target, or cannot draft the tree.

    `drafter` is the configuration of a drafter with weights, which need not be loaded yet.
    """
    check_drafting(target, outline(drafter), tree)


def outline(config: object) -> Drafter:
    """Return the drafter of a configuration without weights, for its properties and checks."""
    return as_drafter(Model(config, nnx.split(nnx.Module())[0], nnx.State({})))


def bind_drafter(
    drafter: LoadedHead | Drafter | None, tree: TreeConfig | None = None
) -> tuple[Drafter, TreeConfig | None]:
    """Return the drafter to use, and the tree that it drafts.

    Args:
      drafter: as in `as_drafter`.
      tree: the shape of the trees; None is the drafter's default.

    Raises:
      InputError: `drafter` or `tree` has the wrong type, or there is a tree but no drafter.
    """
    bound = as_drafter(drafter)
    if tree is None:
        return bound, bound.default_tree
    if not isinstance(tree, TreeConfig):
        raise InputError(f"tree is {tree!r}; give a TreeConfig.")
    if isinstance(bound, RootOnly):
        raise InputError(f"tree is {tree}, but there is no drafter; leave tree out.")
    return bound, tree
