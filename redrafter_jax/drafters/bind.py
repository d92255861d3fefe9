"""From what a user gives as the drafter to a `Drafter`."""

from dataclasses import replace

import jax
from flax import nnx

from redrafter_jax.config import HeadConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.combined import Combined
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.model import Model


def init_drafter(config: HeadConfig, seed: int) -> LoadedHead:
    """A head with random float32 parameters, where training starts."""
    from redrafter_jax.drafters.kinds import kind_of  # all kinds' modules, for heads alone

    return Model.split(config, kind_of(config).module(config, rngs=nnx.Rngs(seed)))


def bind_drafter(drafter: LoadedHead | Drafter | None, tree: TreeConfig | None = None) -> Drafter:
    """The drafter that decoding takes.

    Args:
      drafter: from `load_drafter`; or a drafter as it is, such as `PromptLookup()`; or None for
        autoregressive decoding.
      tree: how a loaded model drafts, None for `TreeConfig()`; with `lookup_tokens` it is
        combined with prompt lookup. The others take none.

    Raises:
      InputError: `drafter` is something else, or has no use for `tree`.
    """
    if tree is not None and not isinstance(tree, TreeConfig):
        raise InputError(f"tree is {tree!r}; give a TreeConfig.")
    if drafter is None or isinstance(drafter, Drafter):
        if tree is not None:
            what = "there is no drafter" if drafter is None else f"{drafter!r:.60} takes none"
            raise InputError(f"tree is {tree}, but {what}; leave tree out.")
        if isinstance(drafter, Drafter) and any(
            leaf is drafter for leaf in jax.tree.leaves(drafter)
        ):
            raise InputError(
                f"{type(drafter).__name__} is not a pytree; decorate the class with "
                "jax.tree_util.register_dataclass."
            )
        return RootOnly() if drafter is None else drafter
    from redrafter_jax.drafters.kinds import find_kind

    kind = find_kind(drafter.config) if isinstance(drafter, Model) else None
    if kind is None:
        raise InputError(
            f"drafter is {drafter!r:.40}; give what load_drafter returns, a Drafter such as "
            "PromptLookup(), or None for autoregressive decoding."
        )
    tree = tree or TreeConfig()
    if not tree.lookup_tokens:
        return kind.drafter(drafter, tree)
    nodes = None if tree.num_nodes is None else tree.beam_nodes
    head = kind.drafter(drafter, replace(tree, num_nodes=nodes, lookup_tokens=0))
    # The head may propose the first tokens of the lookup too; a longer one still adds C nodes.
    lookup = PromptLookup(head.max_path - 1 + tree.lookup_tokens)
    return Combined(head, lookup, tree.lookup_tokens)
