"""Functions that make token trees from beams, ranks, a chain or a root, and that merge trees."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.types import Beams, TokenTree


def build_tree(root: Int[Array, " B"], beams: Beams, tree: TreeConfig) -> TokenTree:
    """Build the tree of a beam search, pruned to `tree.beam_nodes` nodes.

    The X (parent beam, token) pairs of a round are all distinct. So each pair is a node, and no
    search for shared prefixes is needed: pair x of round r is node `1 + r * X + x`. Pruning keeps
    the most likely nodes in their order. The ancestors of a kept node are also kept, because a
    child never scores above its parent and ties go to the lower index. With `final_beams_only`,
    padding nodes come last.
    """
    nodes = _trace_nodes(root, beams)
    if tree.final_beams_only:
        nodes = _keep_final_beams(nodes, tree)
    if tree.beam_nodes < nodes[0].shape[1]:
        nodes = _keep_best(nodes, tree.beam_nodes)
    return _with_mask(nodes, tree.draft_rounds)


def rank_tree(
    root: Int[Array, " B"],
    tokens: Int[Array, "B R W"],
    log_probs: Float[Array, "B R W"],
    paths: Sequence[tuple[int, ...]],
    budget: int,
) -> TokenTree:
    """Build the tree of the root and the N - 1 most probable of the given paths.

    The log-probability of a path is the sum of the log-probabilities of its tokens. The sum is
    taken in a fixed order, so rounding never puts a path above its own prefix. Ties go to the
    earlier path. So the tree holds the ancestors of all its nodes.

    Args:
      root: the last decided token.
      tokens: the W best tokens of each round, best first.
      log_probs: log-probabilities of `tokens`; at most 0, never NaN.
      paths: paths of ranks, one rank per round from the first round on; every path comes after its
        prefixes.
      budget: N, number of nodes including the root; at most the number of paths plus 1.
    """
    B, R, W = tokens.shape
    number = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
    parents = np.asarray([0, *(number[path[:-1]] for path in paths)])
    depth = np.asarray([len(path) for path in number])
    # Rank W, past the end of a path, adds 0.
    ranks = np.asarray([[*path, *[W] * (R - len(path))] for path in number], np.int32)
    padded = jnp.pad(log_probs, ((0, 0), (0, 0), (0, 1)))
    total = jnp.zeros((B, len(number)))
    for step in range(R):
        total += padded[:, step, ranks[:, step]]
    last = np.asarray([path[-1] for path in paths], np.int32)
    drafted = tokens[:, depth[1:] - 1, last]

    def in_every_row(values: np.ndarray) -> Int[Array, "B M"]:
        return jnp.broadcast_to(jnp.asarray(values, jnp.int32), total.shape)

    tokens = jnp.concatenate([root[:, None], drafted], axis=1)
    nodes = (tokens, in_every_row(parents), in_every_row(depth), total)
    return _with_mask(nodes if budget == len(number) else _keep_best(nodes, budget), R)


def chain_tree(
    root: Int[Array, " B"], drafted: Int[Array, "B C"], found: Bool[Array, " B"]
) -> TokenTree:
    """Build a chain of C drafted tokens below each root; rows without `found` get only the root."""
    B, C = drafted.shape
    depth = jnp.broadcast_to(jnp.arange(C + 1, dtype=jnp.int32), (B, C + 1))
    tokens = jnp.concatenate([root[:, None], drafted], axis=1)
    above = jnp.broadcast_to(jnp.tri(C + 1, dtype=bool), (B, C + 1, C + 1))
    parents, log_probs = jnp.maximum(depth - 1, 0), jnp.zeros((B, C + 1))
    tree = TokenTree(tokens, parents, depth, above, log_probs, _single_origin(tokens))
    return pad_nodes(tree, found[:, None] | (depth == 0))


def root_tree(root: Int[Array, " B"]) -> TokenTree:
    """Build the tree of autoregressive decoding, which is only the root."""
    return chain_tree(root, jnp.zeros((len(root), 0), jnp.int32), jnp.ones(len(root), bool))


def _with_mask(nodes: "_Kept", max_depth: int) -> TokenTree:
    """Build a tree from nodes; nodes of log-probability -inf become padding nodes."""
    tokens, parents, depth, log_probs = nodes
    live = log_probs > -jnp.inf
    mask = ancestor_mask(jnp.where(live, parents, 0), max_depth)
    tree = TokenTree(tokens, parents, depth, mask, log_probs, _single_origin(tokens))
    return pad_nodes(tree, live)


def pad_nodes(tree: TokenTree, live: Bool[Array, "B N"]) -> TokenTree:
    """Replace every node for which `live` is False by a padding node; see `TokenTree`.

    The root and all ancestors of a live node must be live.
    """
    return TokenTree(
        tokens=jnp.where(live, tree.tokens, -1),
        parents=jnp.where(live, tree.parents, 0),
        depth=jnp.where(live, tree.depth, 0),
        mask=jnp.where(live[:, :, None], tree.mask, jnp.eye(live.shape[1], dtype=bool)),
        log_probs=jnp.where(live, tree.log_probs, -jnp.inf),
        origin=jnp.where(live, tree.origin, -1),
    )


def share_nodes(
    tree: TokenTree, active: Bool[Array, " B"], total: int
) -> tuple[TokenTree, Int[Array, " M"]]:
    """Keep the M most likely nodes of all rows' trees, and replace the others by padding nodes.

    The likelihood of a node is the drafter's probability of its path, so the ancestors of a kept
    node are kept as well. The root of an active row is always kept; inactive rows keep no node.

    Args:
      tree: the trees.
      active: whether a row has a tree.
      total: M, number of nodes to keep; at least B.

    Returns:
      The trees, and M node numbers; the numbers of kept nodes come first. Node n of row b has the
      number b N + n.
    """
    is_root = jnp.arange(tree.tokens.shape[1]) == 0
    # A user's drafter may return NaN, which `top_k` would rank above the roots.
    scores = jnp.where(jnp.isnan(tree.log_probs), -jnp.inf, jnp.minimum(tree.log_probs, 0.0))
    scores = jnp.where(is_root, jnp.inf, scores)
    scores = jnp.where(active[:, None], scores, -jnp.inf)
    _, nodes = jax.lax.top_k(scores.reshape(-1), total)
    kept = jnp.zeros(scores.size, bool).at[nodes].set(True).reshape(scores.shape)
    return pad_nodes(tree, (kept & (scores > -jnp.inf)) | is_root), nodes


def _single_origin(tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Return the origins of the nodes of a tree that has a single source."""
    return jnp.zeros_like(tokens).at[:, 0].set(-1)


def matching_paths(tree: TokenTree, matches: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """Return which nodes match and have only ancestors that match."""
    return ~(tree.mask & ~matches[:, None, :]).any(axis=-1)


def ancestor_mask(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """Return mask[b, i, j]: whether node j is node i or one of its ancestors.

    Only ancestors at most `max_depth` levels above a node are marked.
    """
    B, N = parents.shape
    nodes = jnp.arange(N)
    # Each turn doubles the number of known ancestors of a node: it adds the known ancestors of the
    # farthest one. If a turn added one parent, XLA's compile time would grow exponentially with the
    # depth.
    path = jnp.broadcast_to(nodes[:, None], (B, N, 1))
    farthest = parents
    for _ in range(max_depth.bit_length()):
        above = jnp.take_along_axis(path, farthest[..., None], axis=1)
        path = jnp.concatenate([path, above], axis=2)
        farthest = jnp.take_along_axis(farthest, farthest, axis=1)
    return (path[..., : max_depth + 1, None] == nodes).any(axis=2)


def merge_trees(tree: TokenTree, other: TokenTree, count: int) -> TokenTree:
    """Append to `tree` the nodes of `other` that it lacks, at most C = `count`, then padding nodes.

    Two nodes are equal if the paths from the root to them have the same tokens, so siblings stay
    distinct. The nodes of `other` are appended in their order, so a parent always precedes its
    child. `other` must have a single source; the appended nodes get the second source of `SOURCES`.
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
    # The ancestors that this tree has, and those that are appended.
    shared = (above[..., None] & same[:, None]).any(axis=2)
    appended = jnp.take_along_axis(above, node[:, None], axis=2) & live[:, None]
    alone = jnp.eye(N + count, dtype=bool)[N:]
    seen = jnp.where(live[..., None], jnp.concatenate([shared, appended], axis=2), alone)

    def score_of_deepest(tree: TokenTree, nodes: Bool[Array, "B C M"]) -> Float[Array, "B C"]:
        deepest = jnp.max(jnp.where(nodes, jnp.arange(nodes.shape[2]), 0), axis=2)
        return jnp.take_along_axis(tree.log_probs, deepest, axis=1)

    # This tree scores the part of a path that both trees have; the other tree scores the rest.
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


# Tokens, parents, depth and log-probabilities, of all drafted nodes and of the kept nodes.
_Nodes = tuple[Int[Array, "B M"], Int[Array, "B M"], Int[Array, "B M"], Float[Array, "B M"]]
_Kept = tuple[Int[Array, "B N"], Int[Array, "B N"], Int[Array, "B N"], Float[Array, "B N"]]


def _trace_nodes(root: Int[Array, " B"], beams: Beams) -> _Nodes:
    """Return tokens, parents, depth and log-probabilities of the root and all drafted nodes."""
    B, R, X = beams.tokens.shape
    rounds = jnp.arange(R, dtype=jnp.int32)[:, None]
    parents = jnp.where(rounds == 0, 0, 1 + (rounds - 1) * X + beams.parents)
    depth = jnp.broadcast_to(rounds + 1, (B, R, X))

    def below(first: Array, rest: Array) -> Array:
        return jnp.concatenate([first[:, None], rest.reshape(B, R * X)], axis=1)

    zeros = jnp.zeros_like(root)
    return (
        below(root, beams.tokens),
        below(zeros, parents),
        below(zeros, depth),
        below(zeros.astype(jnp.float32), beams.log_probs),
    )


def _keep_final_beams(nodes: _Nodes, tree: TreeConfig) -> _Nodes:
    """Move the nodes without a descendant in the last round's beams to the end, in order.

    Their log-probability is set to -inf.
    """
    tokens, parents, depth, log_probs = nodes
    mask = ancestor_mask(parents, tree.draft_rounds)
    kept = mask[:, -tree.beam_width :].any(axis=1) & (log_probs > -jnp.inf)
    order = jnp.argsort(~kept, axis=1, stable=True)
    return _take((tokens, parents, depth, jnp.where(kept, log_probs, -jnp.inf)), order)


def _keep_best(nodes: _Nodes, budget: int) -> _Kept:
    """Keep the `budget` most likely nodes in their order."""
    *_, log_probs = nodes
    _, best = jax.lax.top_k(log_probs, budget)
    return _take(nodes, jnp.sort(best, axis=1))


def _take(nodes: _Nodes, order: Int[Array, "B N"]) -> _Kept:
    """Select nodes by index, in the given order, and renumber parents."""
    tokens, parents, depth, log_probs = (
        jnp.take_along_axis(values, order, axis=1) for values in nodes
    )
    places = order[:, :, None] == jnp.arange(nodes[0].shape[1])
    number = (places * jnp.arange(order.shape[1])[:, None]).sum(axis=1)
    return tokens, jnp.take_along_axis(number, parents, axis=1), depth, log_probs


def _same_nodes(tree: TokenTree, other: TokenTree) -> Bool[Array, "B N M"]:
    """Return which nodes of two trees with the same root have the same path."""

    def equal(ours: Int[Array, "B N"], theirs: Int[Array, "B M"]) -> Bool[Array, "B N M"]:
        return ours[:, :, None] == theirs[:, None, :]

    depth = equal(tree.depth, other.depth)
    alike = depth & equal(tree.tokens, other.tokens)
    # Two paths of one length are equal if they agree at every depth, so count the agreements.
    pairs = jnp.einsum("BNK,BKL->BNL", tree.mask.astype(jnp.float32), alike.astype(jnp.float32))
    pairs = jnp.einsum("BNL,BML->BNM", pairs, other.mask.astype(jnp.float32))
    live = (tree.tokens >= 0)[:, :, None] & (other.tokens >= 0)[:, None, :]
    return live & depth & (pairs == tree.depth[:, :, None] + 1)
