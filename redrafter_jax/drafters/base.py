"""The interface of drafters: a drafter reads decided tokens and proposes trees of next tokens.

Decided tokens are the tokens of the prompt and those that the target has chosen. A drafter affects
the speed of decoding, never the text. Every drafter is a frozen dataclass, decorated with
`@jax.tree_util.register_dataclass`. Weights are in fields of type `Model`; a mesh splits any other
array field by rows, like a batch. Trees and states are not fields, but arguments of the methods.

To add a kind of drafter, write a subclass of `Drafter`. A drafter without weights, such as
`drafters.lookup.PromptLookup`, needs nothing else. A kind with weights has four parts, in one file
or in one file each:

* the drafter (`eagle.py`): `read`, `propose`, and `count_reads` for cost estimates;
* `_head` (`eagle_head.py`): configuration and parameters;
* `_files` (`eagle_files.py`): the layouts of its files;
* `_start` (`eagle_start.py`): defaults and initial weights of training.

Register the parts in a record of `drafters.kinds`. `MedusaDrafter` is the smallest example, with
all parts in `medusa.py`. `EagleDrafter` has a layer of its own in the cache. These helpers exist:

* `grow.grow` runs a beam search, and `tree.build_tree` builds the tree of its beams.
* `own_layer` has a decoder layer that reads decided tokens.
* `node_cache` has the attention to drafted tokens.

`parallel/mesh.py` splits a parameter over a mesh only if the parameter's name matches one of its
patterns.
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

    The argument `own` of the methods is the drafter's state between two calls. The state that
    `read` returns must not depend on the previous state: what the drafter keeps of earlier tokens
    is in its own layers of the cache. Texts can therefore share a cached prefix: the first chunk of
    a request is read with the state of `empty`, even if the chunk starts after a cached prefix.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the drafter in reports."""

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        """The indices of the target layers whose outputs `read` gets.

        `read` always gets the last hidden state too, which the result does not name.
        """
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

        A drafter that attends to the target's layers returns a drafter with layers of its own. The
        devices may form a mesh, so the result leaves out weights that `prepare` made for one
        device.
        """
        return self

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        """The models whose parameters the drafter holds."""
        return ()

    @property
    def default_tree(self) -> TreeConfig | None:
        """The default shape of the trees; None for a drafter whose trees are only the root."""
        return TreeConfig()

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit the drafter; by default only `layers` is checked."""
        check_context_layers(target, self.layers(target), "The drafter's context_layers")

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a tree that the drafter cannot draft; `tree.lookup_tokens` is always 0."""
        del tree

    def prepare(self, lender: Lender) -> "Drafter":
        """Return the drafter with the parameters that it borrows from the target.

        The engine calls this method once, so the parameters are gathered only once. `lender`
        gathers parts of the target's vocabulary projection.
        """
        del lender
        return self

    def empty(self, target: Decoder, rows: int) -> Any:
        """Return the state before any token is read: a pytree of arrays with `rows` rows."""
        del target, rows
        return ()

    def read(
        self, target: Decoder, own: Any, cache: KVCache, decided: Decided
    ) -> tuple[Any, KVCache]:
        """Read decided tokens, which are a chunk of a prompt or the accepted path of a step.

        Only this method writes the drafter's layers of the cache, so tokens of rejected nodes never
        enter them. When a preempted request resumes, its text is read again from the start of a
        cache page.

        Args:
          target: the target, whose embedding the drafter may use.
          own: the state before these tokens.
          cache: the drafter's own layers. `lengths` equals `decided.start`. The entries (keys and
            values) before this position were computed for the same text. The entry at position i
            may depend on the token at position i + 1.
          decided: the tokens. A row whose `count` is 0 must keep its state.

        Returns:
          The state after these tokens, and the cache with their entries. The caller ignores the
          `lengths` of this cache.
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
        """Propose a tree of `tree.budget` nodes for each row; siblings must have distinct tokens.

        The engine calls this method on the result of `prepare`. On a mesh, all arrays are this
        device's shards.

        Args:
          target: the target, whose embedding and vocabulary projection the drafter may use.
          own: the state that `read` returned.
          cache: the first `target_layers` layers of the target, followed by the drafter's own
            layers. Every decided token but the root has an entry.
          view: the rows to draft for.
          noise: the noise with which the target will choose the P tokens after the root.
          tree: the static shape of the tree. Its `lookup_tokens` is 0, and its `max_path` is P.
        """


def check_context_layers(target: TargetConfig, layers: Sequence[int], name: str) -> None:
    """Check that context layers are in increasing order and below the last layer.

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
    """A drafter that drafts nothing: each tree is only the root, as in autoregressive decoding."""

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
    """Refuse a drafter that does not fit the target or cannot draft the tree."""
    drafter.check(target)
    if tree is not None:
        drafter.check_tree(tree.without_lookup)
        check_reach(target, tree)


def check_reach(target: TargetConfig, tree: TreeConfig) -> None:
    """Refuse a tree whose longest path has more nodes than the target has positions."""
    if tree.max_path > target.position_limit:
        lookup = f" and lookup_tokens {tree.lookup_tokens}" if tree.lookup_tokens else ""
        raise InputError(
            f"TreeConfig.draft_rounds is {tree.draft_rounds}{lookup}, but the target has "
            f"{target.position_limit} positions; draft fewer tokens."
        )


def as_drafter(drafter: LoadedHead | Drafter | None) -> Drafter:
    """Return the `Drafter` for any value that users may pass as a drafter.

    Args:
      drafter: a head or a model, from `load_drafter` or `load_target`; a `Drafter` such as
        `PromptLookup()`; or None for autoregressive decoding.

    Raises:
      InputError: the argument is none of these, or its class is not registered as a pytree.
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
    """Refuse a drafter that does not fit the target or cannot draft the tree.

    `drafter` is the configuration of a drafter with weights; the weights need not be loaded yet.
    """
    check_drafting(target, outline(drafter), tree)


def outline(config: object) -> Drafter:
    """Return the drafter that a configuration describes, without parameters.

    The properties and checks of the result work without parameters; its `read` and `propose` do
    not.
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
