"""Target, drafter and trees that fit each other."""

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, RootOnly, check_drafting
from redrafter_jax.drafters.bind import as_drafter, bind_drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_same_mesh
from redrafter_jax.parallel.model import Model


def bind_models(
    target: Target, drafter: LoadedHead | Drafter | None, tree: TreeConfig | TreeTable | None
) -> tuple[Drafter, tuple[TreeConfig | None, ...]]:
    """The drafter that decoding takes, and the trees that it may draft.

    Raises:
      InputError: a model is something else, or they do not fit each other.
    """
    if isinstance(tree, TreeTable):
        bound = as_drafter(drafter)
        if isinstance(bound, RootOnly):
            raise InputError("tree is a table of trees, but there is no drafter; leave tree out.")
        trees = tuple(dict.fromkeys(tuned.tree for tuned in tree.trees))
    else:
        bound, one = bind_drafter(drafter, tree)
        trees = (one,)
    if not (isinstance(target, Model) and isinstance(target.config, TargetConfig)):
        raise InputError(
            f"target is {target!r:.40}; give what load_target returns, then its drafter."
        )
    for one in trees:
        check_drafting(target.config, bound, one)
    check_same_mesh(target, *bound.models)
    return bound, trees
