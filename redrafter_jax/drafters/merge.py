"""Two trees below one root, as one."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.types import TokenTree


def merge_trees(tree: TokenTree, other: TokenTree, count: int) -> TokenTree:
    """Append the first C nodes of another tree that this one lacks; padding nodes fill the rest.

    Nodes are the same if their paths from the root spell the same tokens, so that siblings stay
    distinct. A node comes after its parent in the other tree, so no appended node lacks its parent.
    Each tree is of one source, the other's the second.
    """
    B, N = tree.tokens.shape
    same = _same_nodes(other, tree)
    missing = (other.tokens >= 0) & ~same.any(axis=2)
    order = jnp.cumsum(missing, axis=1) - 1
    places = missing[:, None] & (order[:, None] == jnp.arange(count)[:, None])
    live, node = places.any(axis=2), jnp.argmax(places, axis=2)

    def take(values: Shaped[Array, "B M"]) -> Shaped[Array, "B C"]:
        return jnp.take_along_axis(values, node, axis=1)

    ours = jnp.argmax(same, axis=2)
    parents = take(jnp.take_along_axis(jnp.where(missing, N + order, ours), other.parents, axis=1))
    above = jnp.take_along_axis(other.mask, node[..., None], axis=1)
    # Of the nodes above, those that this tree has, and those that are appended with it.
    shared = (above[..., None] & same[:, None]).any(axis=2)
    appended = jnp.take_along_axis(above, node[:, None], axis=2) & live[:, None]
    alone = jnp.eye(N + count, dtype=bool)[N:]
    seen = jnp.where(live[..., None], jnp.concatenate([shared, appended], axis=2), alone)

    def score_of_deepest(tree: TokenTree, nodes: Bool[Array, "B C M"]) -> Float[Array, "B C"]:
        deepest = jnp.max(jnp.where(nodes, jnp.arange(nodes.shape[2]), 0), axis=2)
        return jnp.take_along_axis(tree.log_probs, deepest, axis=1)

    # The shared path counts as this tree scores it, the rest as the other does.
    further = take(other.log_probs) - score_of_deepest(other, above & same.any(axis=2)[:, None])
    scores = score_of_deepest(tree, shared) + further

    def beside(
        nodes: Shaped[Array, "B N"], more: Shaped[Array, "B C"], padding: int | float
    ) -> Shaped[Array, "B total"]:
        return jnp.concatenate([nodes, jnp.where(live, more, padding).astype(nodes.dtype)], axis=1)

    return TokenTree(
        tokens=beside(tree.tokens, take(other.tokens), -1),
        parents=beside(tree.parents, parents, 0),
        depth=beside(tree.depth, take(other.depth), 0),
        mask=jnp.concatenate([jnp.pad(tree.mask, ((0, 0), (0, 0), (0, count))), seen], axis=1),
        log_probs=beside(tree.log_probs, scores, -jnp.inf),
        origin=beside(tree.origin, 1 + take(other.origin), -1),
    )


def _same_nodes(tree: TokenTree, other: TokenTree) -> Bool[Array, "B N M"]:
    """Which nodes of two trees below the same root spell the same path."""

    def equal(ours: Int[Array, "B N"], theirs: Int[Array, "B M"]) -> Bool[Array, "B N M"]:
        return ours[:, :, None] == theirs[:, None, :]

    depth = equal(tree.depth, other.depth)
    alike = depth & equal(tree.tokens, other.tokens)
    # Two paths of one length are the same if they are alike at every depth: count where they are.
    pairs = jnp.einsum("BNK,BKL->BNL", tree.mask.astype(jnp.float32), alike.astype(jnp.float32))
    pairs = jnp.einsum("BNL,BML->BNM", pairs, other.mask.astype(jnp.float32))
    live = (tree.tokens >= 0)[:, :, None] & (other.tokens >= 0)[:, None, :]
    return live & depth & (pairs == tree.depth[:, :, None] + 1)
