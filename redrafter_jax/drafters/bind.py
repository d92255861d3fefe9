"""From what a user gives as the drafter to a `Drafter`."""

import jax
from flax import nnx

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, RootOnly, check_drafting
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.model import Model


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
