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

    `own` is the drafter's state between two calls. It may depend on the last decided token only;
    what the drafter keeps of earlier tokens is in its own layers of the cache. This lets texts
    share a cached prefix: when the first chunk of a request is read, `own` is `empty`, even if the
    chunk starts after a cached prefix.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the drafter in reports."""

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        """Indices of the target layers whose outputs `read` gets beside the last hidden state."""
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
        """The drafter in a form that needs no target layers of the cache, for other devices.

        A drafter that attends to the target's layers returns a drafter with layers of its own. The
        devices may be a mesh, so weights that were prepared for one device are left out.
        """
        return self

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        """The models whose parameters the drafter holds."""
        return ()

    @property
    def default_tree(self) -> TreeConfig | None:
        """The default shape of the trees; None if a tree is only the root."""
        return TreeConfig()

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit the drafter; by default only `layers` is checked."""
        check_context_layers(target, self.layers(target), "The drafter's context_layers")

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a tree that the drafter cannot draft; `tree` has no `lookup_tokens`."""
        del tree

    def prepare(self, lender: Lender) -> "Drafter":
        """Return the drafter with the parameters that it borrows from the target.

        The engine calls this once, so that the parameters are gathered only once.
        """
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

        Only this method writes the drafter's layers of the cache, so tokens of rejected nodes never
        enter them. After a preemption, a text is read again from the start of a page.

        Args:
          target: the target, whose embedding the drafter may use.
          own: the state before these tokens.
          cache: the drafter's own layers. `lengths` are `decided.start`, and the entries before it
            were computed for the same text. The entry at position i may depend on the token at i +
            1. The `lengths` of the returned cache are ignored.
          decided: the tokens. A row whose `count` is 0 must keep its state.

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
          target: the target, whose embedding and vocabulary projection the drafter may use.
          own: the state that `read` returned.
          cache: the first `target_layers` layers of the target, followed by the drafter's own
            layers. Every decided token but the root has an entry.
          view: the rows to draft for.
          noise: the noise with which the target will choose the P tokens after the root.
          tree: the shape of the tree, static, without `lookup_tokens`; P is its `max_path`.
        """


def check_context_layers(target: TargetConfig, layers: Sequence[int], name: str) -> None:
    """Refuse layers that do not ascend from 0 or do not lie below the target's last layer.

    `name` is the name of the layers in the error.
    """
    last = target.num_hidden_layers - 1
    for before, layer in pairwise((-1, *layers)):
        if layer <= before:
            raise InputError(f"{name} {out_of_order('layers', layer, before)}, counted from 0.")
        if layer >= last:
            raise InputError(
                f"{name} holds {layer}; the last layer of this target is {last} and is always "
                "read, so name lower layers."
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RootOnly(Drafter):
    """A drafter that drafts nothing: a tree is only the root, as in autoregressive decoding."""

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
    """Refuse a drafter that does not fit the target, or cannot draft the tree."""
    drafter.check(target)
    if tree is not None:
        drafter.check_tree(tree.without_lookup)
        check_reach(target, tree)


def check_reach(target: TargetConfig, tree: TreeConfig) -> None:
    """Refuse a tree that is deeper than the target's number of positions."""
    if tree.max_path > target.position_limit:
        lookup = f" and lookup_tokens {tree.lookup_tokens}" if tree.lookup_tokens else ""
        raise InputError(
            f"TreeConfig.draft_rounds is {tree.draft_rounds}{lookup}, but the target has "
            f"{target.position_limit} positions; draft fewer."
        )


def as_drafter(drafter: LoadedHead | Drafter | None) -> Drafter:
    """Return the `Drafter` for any value that users may pass as a drafter.

    Args:
      drafter: a head or a model, from `load_drafter` or `load_target`; a `Drafter` such as
        `PromptLookup()`; or None for autoregressive decoding.

    Raises:
      InputError: the argument is none of these.
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
    """Refuse a drafter that does not fit the target, or cannot draft the tree.

    `drafter` is the configuration of a drafter with weights; the weights need not be loaded yet.
    """
    check_drafting(target, outline(drafter), tree)


def outline(config: object) -> Drafter:
    """Return the drafter that a configuration describes, without parameters.

    Its properties and its checks work without parameters; it cannot read or propose.
    """
    return as_drafter(Model(config, nnx.split(nnx.Module())[0], nnx.State({})))


def bind_drafter(
    drafter: LoadedHead | Drafter | None, tree: TreeConfig | None = None
) -> tuple[Drafter, TreeConfig | None]:
    """Return the drafter to use, and the shape of the trees that it drafts.

    Args:
      drafter: any value that `as_drafter` takes.
      tree: the shape of the trees; None is the drafter's default.

    Raises:
      InputError: `drafter` or `tree` has the wrong type, or `tree` is given without a drafter.
    """
    bound = as_drafter(drafter)
    if tree is None:
        return bound, bound.default_tree
    if not isinstance(tree, TreeConfig):
        raise InputError(f"tree is {tree!r}; give a TreeConfig.")
    if isinstance(bound, RootOnly):
        raise InputError(f"tree is {tree}, but there is no drafter; leave tree out.")
    return bound, tree
