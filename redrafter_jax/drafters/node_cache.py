"""Attention in a tree that grows: its nodes see the decided tokens, their ancestors, themselves.

The nodes that a drafter has read in earlier rounds lie in a buffer of M = 1 + W * (R - 1) places:
the root in place 0, beam w of round r in place `1 + (r - 1) * W + w`. Tokens of the last round are
drafted and not read.
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
    """Keys and values of the nodes that were read, a tuple over layers, in their places.

    It belongs to `Grown.nodes`. Places of later rounds hold zeros.
    """

    keys: tuple[Float[Array, "B M K H"], ...]
    values: tuple[Float[Array, "B M K H"], ...]


def init_nodes(shape: CacheShape, rows: int, tree: TreeConfig, dtype: DTypeLike) -> NodeCache:
    """The cache of a tree of which nothing is read; on a mesh, this device's part of it.

    Args:
      shape: the drafter's layers.
      rows: B.
      tree: W and R, which make M.
      dtype: of the keys and values.
    """

    def zeros() -> tuple[Float[Array, "B M K H"], ...]:
        one = (rows, _places(tree), shard_size(shape.heads), shape.head_dim)
        return tuple(jnp.zeros(one, dtype) for _ in range(shape.layers))

    return NodeCache(zeros(), zeros())


def init_seen(rows: int, tree: TreeConfig) -> Bool[Array, "B 1 M"]:
    """What the root sees of the nodes that were read: nothing."""
    return jnp.zeros((rows, 1, _places(tree)), bool)


def see_themselves(seen: Bool[Array, "B w M"], round: Int[Array, ""] | int) -> Bool[Array, "B w M"]:
    """The places of each beam's ancestors, and its own.

    What it returns belongs to `Grown.beams`, so that the next round's beams see their parents' of
    this one.

    Args:
      seen: what the beams have of their parents.
      round: the round whose tokens are read.
    """
    _, w, M = seen.shape
    own = first_place(round, w) + jnp.arange(w)
    return seen | (own[:, None] == jnp.arange(M))


def first_place(round: Int[Array, ""] | int, beams: int) -> Int[Array, ""] | int:
    """The place of the first of w beams of a round."""
    # The first round has one beam: its place is 0.
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
    """Attention of a round's tokens in one layer, from their queries, keys and values.

    Args:
      cache: the drafter's layers alone, with the decided tokens above the root.
      nodes: of the rounds before.
      layer: number of the layer among the drafter's.
      seen: of `see_themselves`.
      round: the round whose tokens are read.
      scale: factor on the scores before the softmax.
      window: positions that a token sees, its own included; None for all before it.
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
    """The cache with the keys and values of a round's tokens, of every layer."""

    def write(
        places: tuple[Float[Array, "B M K H"], ...], fresh: _PerLayer
    ) -> tuple[Float[Array, "B M K H"], ...]:
        return tuple(_write(*pair, round) for pair in zip(places, fresh, strict=True))

    return NodeCache(write(nodes.keys, keys), write(nodes.values, values))


def _write(
    places: Float[Array, "B M K H"], fresh: Float[Array, "B w K H"], round: Int[Array, ""] | int
) -> Float[Array, "B M K H"]:
    # For a layer's attention and for the next round: small enough for XLA to write it twice.
    start = first_place(round, fresh.shape[1])
    return jax.lax.dynamic_update_slice_in_dim(places, fresh, start, axis=1)


def _places(tree: TreeConfig) -> int:
    """M."""
    return 1 + tree.beam_width * (tree.draft_rounds - 1)
