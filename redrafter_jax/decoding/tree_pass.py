"""The target's pass over a drafted tree, without dead slots where these would cost time."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from redrafter_jax.config import DraftConfig
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import KVCache, TokenTree, Verified


def tree_pass(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    done: Bool[Array, " B"],
    draft: DraftConfig | None,
    context_layers: tuple[int, ...] = (),
) -> Verified:
    """The target's answers at every node; zeros at those it left out, which no row needs.

    A CPU's time grows with the nodes: there the pass is over the tree's first nodes, as many as
    the smallest of `prefix_sizes` that holds the live ones of all rows that are not done. A GPU's
    time is that of reading the weights, and it verifies all of them.

    Args:
      decoder: the target.
      tree: from `draft_tree`, or the root alone.
      cache: keys and values of the tokens above the root.
      done: rows whose answers nobody reads.
      draft: how the tree was drafted; None for the root alone.
      context_layers: as in `tree_forward`.
    """
    N = tree.tokens.shape[1]
    shorter = prefix_sizes(draft) if draft else ()
    sizes = (*(size for size in shorter if size < N), N)
    if len(sizes) == 1:
        return decoder.tree_forward(tree, cache, context_layers)
    live = (tree.tokens >= 0) & ~done[:, None]
    used = jnp.max(jnp.where(live, jnp.arange(1, N + 1), 0))

    def smallest(tree: TokenTree, cache: KVCache, used: Int[Array, ""]) -> Verified:
        passes = [partial(_verify_first, decoder, context_layers, size) for size in sizes]
        return jax.lax.switch(jnp.sum(used > jnp.asarray(sizes)), passes, tree, cache)

    return jax.lax.platform_dependent(
        tree,
        cache,
        used,
        cpu=smallest,
        default=lambda tree, cache, used: decoder.tree_forward(tree, cache, context_layers),
    )


def prefix_sizes(draft: DraftConfig) -> tuple[int, ...]:
    """Rising numbers of first nodes, below N, that often hold all live ones of a tree.

    Without a copy those are the beams' nodes. Those that lead to W final beams are R + W at least
    and all 1 + R * W at most; both are rare.
    """
    W, R = draft.beam_width, draft.draft_rounds
    sizes = {draft.beam_nodes}
    if draft.final_beams_only:
        sizes.add(min((R + W + 1 + R * W) // 2, draft.beam_nodes))
    return tuple(sorted(size for size in sizes if size < draft.budget))


def _verify_first(
    decoder: Decoder, context_layers: tuple[int, ...], size: int, tree: TokenTree, cache: KVCache
) -> Verified:
    """The pass over the first `size` nodes, and zeros at the others."""
    N = tree.tokens.shape[1]
    first = jax.tree.map(lambda nodes: nodes[:, :size], tree)
    first = first._replace(mask=first.mask[..., :size])

    def padded(nodes: Shaped[Array, "B first ..."]) -> Shaped[Array, "B N ..."]:
        return jnp.pad(nodes, ((0, 0), (0, N - size)) + ((0, 0),) * (nodes.ndim - 2))

    return jax.tree.map(padded, decoder.tree_forward(first, cache, context_layers))
