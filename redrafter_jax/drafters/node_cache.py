"""Attention in a growing tree: a node attends to decided tokens, its ancestors and itself.

The keys and values of nodes that the drafter has read are in a buffer. For W beams and R rounds,
the buffer has M = 1 + W * (R - 1) places: the root is in place 0, and beam w of round r is in place
`1 + (r - 1) * W + w`. EAGLE heads leave place 0 empty, because `read` writes the root's entry to
the cache of the text. Tokens of the last round are drafted but never read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import TreeConfig
from redrafter_jax.models.attention import tree_attention
from redrafter_jax.models.decoder_layer import Attend
from redrafter_jax.parallel.collectives import shard_size
from redrafter_jax.types import CacheShape, KVCache

_PerLayer = tuple[Float[Array, "B T K H"], ...]


class NodeCache(NamedTuple):
    """Keys and values of the nodes read so far, as a tuple over layers.

    A drafter keeps this cache in `Grown.nodes`. The M places are those of the module's text; places
    of later rounds hold zeros.
    """

    keys: tuple[Float[Array, "B M K H"], ...]
    values: tuple[Float[Array, "B M K H"], ...]


def init_nodes(shape: CacheShape, rows: int, tree: TreeConfig, dtype: DTypeLike) -> NodeCache:
    """Create the cache of a tree before any node is read; on a mesh, this device's shard.

    Args:
      shape: shape of the drafter's layers.
      rows: B, number of rows.
      tree: the shape of the tree; W and R determine M.
      dtype: dtype of keys and values.
    """

    def zeros() -> tuple[Float[Array, "B M K H"], ...]:
        one = (rows, _places(tree), shard_size(shape.heads), shape.head_dim)
        return tuple(jnp.zeros(one, dtype) for _ in range(shape.layers))

    return NodeCache(zeros(), zeros())


def init_seen(rows: int, tree: TreeConfig) -> Bool[Array, "B 1 M"]:
    """Return the mask of the places that the root attends to before the first round: no place."""
    return jnp.zeros((rows, 1, _places(tree)), bool)


def see_themselves(seen: Bool[Array, "B w M"], round: Int[Array, ""] | int) -> Bool[Array, "B w M"]:
    """Return the mask of the places that each beam attends to: its ancestors' and its own.

    A drafter puts the result in `Grown.beams`; beams of the next round then start with their
    parents' masks.

    Args:
      seen: masks of the parents of the beams.
      round: round whose tokens are read.
    """
    _, w, M = seen.shape
    own = first_place(round, w) + jnp.arange(w)
    return seen | (own[:, None] == jnp.arange(M))


def first_place(round: Int[Array, ""] | int, beams: int) -> Int[Array, ""] | int:
    """Return the place of the first beam of a round with w beams."""
    # The first round has one beam, in place 0.
    return 1 + (round - 1) * beams


def attend_to_ancestors(
    cache: KVCache,
    nodes: NodeCache,
    layer: int,
    seen: Bool[Array, "B w M"],
    round: Int[Array, ""] | int,
    *,
    scale: float,
    window: int | None = None,
) -> Attend:
    """Return the attention of the tokens of one round, in one layer.

    Args:
      cache: the drafter's layers, with the decided tokens before the root.
      nodes: the nodes of earlier rounds.
      layer: index of the layer, counted among the drafter's layers.
      seen: masks from `see_themselves`.
      round: round whose tokens are read.
      scale: factor on the scores before the softmax.
      window: number of positions that a token attends to, including its own; None for all.
    """

    def attend(
        q: Float[Array, "B w Q H"], k: Float[Array, "B w K H"], v: Float[Array, "B w K H"]
    ) -> Float[Array, "B w Q H"]:
        return tree_attention(
            q,
            k_cache=cache.keys[layer],
            v_cache=cache.values[layer],
            table=cache.table,
            lengths=cache.lengths,
            k_tree=_write(nodes.keys[layer], k, round),
            v_tree=_write(nodes.values[layer], v, round),
            mask=seen,
            scale=scale,
            window=window,
        )

    return attend


def add_nodes(
    nodes: NodeCache, keys: _PerLayer, values: _PerLayer, round: Int[Array, ""] | int
) -> NodeCache:
    """Return the cache with the keys and values of a round's tokens, in every layer."""

    def write(
        places: tuple[Float[Array, "B M K H"], ...], fresh: _PerLayer
    ) -> tuple[Float[Array, "B M K H"], ...]:
        return tuple(_write(*pair, round) for pair in zip(places, fresh, strict=True))

    return NodeCache(write(nodes.keys, keys), write(nodes.values, values))


def _write(
    places: Float[Array, "B M K H"], fresh: Float[Array, "B w K H"], round: Int[Array, ""] | int
) -> Float[Array, "B M K H"]:
    # This runs twice, for attention in a layer and for the next round; the buffer is small.
    start = first_place(round, fresh.shape[1])
    return jax.lax.dynamic_update_slice_in_dim(places, fresh, start, axis=1)


def _places(tree: TreeConfig) -> int:
    """Return M, the number of places."""
    return 1 + tree.beam_width * (tree.draft_rounds - 1)
