"""The target's pass over a drafted tree, without its dead slots where these would cost time."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from redrafter_jax.config import DraftConfig
from redrafter_jax.target import Decoder
from redrafter_jax.types import KVCache, TokenTree, Verified


def tree_pass(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    draft: DraftConfig | None,
    context_layers: tuple[int, ...] = (),
) -> Verified:
    """`Decoder.tree_forward`, of which dead slots at the tree's end may come out as zeros.

    A CPU's time grows with the nodes, so there the pass ends after the first of `prefix_sizes` that
    holds every row's live nodes. A GPU reads its weights in the time that a few nodes more take,
    and would ask the host which branch to run: it verifies all slots.

    Args:
      decoder: the target.
      tree: from `draft_tree`, or the root alone.
      cache: keys and values of the tokens above the root.
      draft: how the tree was drafted; None for the root alone.
      context_layers: as in `tree_forward`.
    """
    widths = (1,) if draft is None else prefix_sizes(draft)
    whole = partial(_first, decoder, context_layers, widths[-1])
    if len(widths) == 1:
        return whole(tree, cache)

    def shortest(tree: TokenTree, cache: KVCache) -> Verified:
        used = jnp.max(jnp.where(tree.tokens >= 0, jnp.arange(1, widths[-1] + 1), 0))
        passes = [partial(_first, decoder, context_layers, width) for width in widths]
        return jax.lax.switch(jnp.searchsorted(jnp.asarray(widths), used), passes, tree, cache)

    return jax.lax.platform_dependent(tree, cache, cpu=shortest, default=whole)


def prefix_sizes(draft: DraftConfig) -> tuple[int, ...]:
    """Rising numbers of a tree's first nodes, the last of them N, that may hold all live ones.

    Copied nodes come last and live together. Those that lead to W final beams are R + W at least,
    which seldom suffice, and as many as the beams have at most, which are seldom needed.
    """
    widths = {draft.beam_nodes, draft.budget}
    if draft.final_beams_only:
        fewest = min(draft.beam_width + draft.draft_rounds, draft.beam_nodes)
        widths.add((fewest + draft.beam_nodes) // 2)
    return tuple(sorted(widths))


def _first(
    decoder: Decoder, context_layers: tuple[int, ...], width: int, tree: TokenTree, cache: KVCache
) -> Verified:
    """The pass over the first `width` nodes; zeros at the others."""
    N = tree.tokens.shape[1]
    first = jax.tree.map(lambda nodes: nodes[:, :width], tree)
    first = first._replace(mask=first.mask[..., :width])

    def padded(nodes: Shaped[Array, "B first ..."]) -> Shaped[Array, "B N ..."]:
        return jnp.pad(nodes, ((0, 0), (0, N - width)) + ((0, 0),) * (nodes.ndim - 2))

    return jax.tree.map(padded, decoder.tree_forward(first, cache, context_layers))
