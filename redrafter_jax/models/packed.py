"""Target passes that pack the tokens of all rows into one row, except in attention.

The cost of the linear maps then depends only on the number of tokens, not on their distribution
over the rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from redrafter_jax.models.decoder_layer import Attend
from redrafter_jax.models.target import Decoder, Passed, chain_mask
from redrafter_jax.types import KVCache, TokenTree, Verified


def forward_nodes(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    nodes: Int[Array, " M"],
    context_layers: tuple[int, ...] = (),
) -> Verified:
    """Run `Decoder.tree_forward` for some nodes of a batch of trees.

    Args:
      decoder: the target.
      tree: the trees.
      cache: the target's layers of the cache.
      nodes: indices of the M nodes to run, among the B * N nodes of the batch, from `share_nodes`.
        Results at other nodes are garbage.
      context_layers: as in `Decoder.forward`.
    """
    B, N = tree.tokens.shape
    place = jnp.zeros(B * N, jnp.int32).at[nodes].set(jnp.arange(len(nodes)))

    def pack(whole: Shaped[Array, "B N ..."]) -> Shaped[Array, "1 M ..."]:
        return whole.reshape(B * N, *whole.shape[2:])[nodes][None]

    def unpack(packed: Shaped[Array, "1 M ..."]) -> Shaped[Array, "B N ..."]:
        return packed[0, place].reshape(B, N, *packed.shape[2:])

    below = _below_tree(decoder, tree, cache)

    def attend_in(layer: int) -> Attend:
        attend = below(layer)
        return lambda *heads: pack(attend(*map(unpack, heads)))

    positions = pack(cache.lengths[:, None] + tree.depth)
    tokens = pack(jnp.maximum(tree.tokens, 0))
    hidden, keys, values = decoder.run(tokens, positions, attend_in, context_layers)
    logits = unpack(decoder.logits(hidden))
    return Verified(logits, unpack(hidden), tuple(map(unpack, keys)), tuple(map(unpack, values)))


def forward_tree_and_chunk(
    decoder: Decoder,
    tree: TokenTree,
    cache: KVCache,
    chunk: Int[Array, "G C"],
    chunk_cache: KVCache,
    context_layers: tuple[int, ...] = (),
) -> tuple[Verified, Passed]:
    """Run `Decoder.tree_forward` and `Decoder.chunk_forward` as one pass, and return both results.

    The pass reads each weight only once.

    Args:
      decoder: the target.
      tree: the trees of B rows.
      cache: the target's layers of the cache of these rows.
      chunk: the next C tokens of the prompts of G other rows.
      chunk_cache: the target's layers of the cache of the G rows.
      context_layers: as in `Decoder.forward`.
    """
    shapes = tree.tokens.shape, chunk.shape

    def pack(*parts: Shaped[Array, "..."]) -> Shaped[Array, "1 M ..."]:
        return jnp.concatenate([part.reshape(1, -1, *part.shape[2:]) for part in parts], axis=1)

    def unpack(packed: Shaped[Array, "1 M ..."]) -> Sequence[Shaped[Array, "..."]]:
        parts = jnp.split(packed, [tree.tokens.size], axis=1)
        return [
            part.reshape(*shape, *packed.shape[2:])
            for part, shape in zip(parts, shapes, strict=True)
        ]

    below = (
        _below_tree(decoder, tree, cache),
        partial(decoder.attend_below, cache=chunk_cache, mask=chain_mask(*chunk.shape)),
    )

    def attend_in(layer: int) -> Attend:
        first, second = (attend(layer) for attend in below)

        def attend(
            q: Float[Array, "1 M Q H"], k: Float[Array, "1 M K H"], v: Float[Array, "1 M K H"]
        ) -> Float[Array, "1 M Q H"]:
            of_tree, of_chunk = zip(unpack(q), unpack(k), unpack(v), strict=True)
            return pack(first(*of_tree), second(*of_chunk))

        return attend

    positions = pack(
        cache.lengths[:, None] + tree.depth,
        chunk_cache.lengths[:, None] + jnp.arange(chunk.shape[1]),
    )
    # Padding nodes have token -1; their embedding is arbitrary, as no other node sees them.
    tokens = pack(jnp.maximum(tree.tokens, 0), chunk)
    hidden, keys, values = decoder.run(tokens, positions, attend_in, context_layers)
    states, chunk_states = unpack(hidden)
    tree_keys, chunk_keys = zip(*map(unpack, keys), strict=True)
    tree_values, chunk_values = zip(*map(unpack, values), strict=True)
    # Barrier: all reads of both rows' pages must precede the writes to either; see `finish`.
    both = decoder.logits(states), chunk_states
    logits, chunk_states = jax.lax.optimization_barrier(both)
    verified = Verified(logits, states, tree_keys, tree_values)
    return verified, (chunk_states, chunk_keys, chunk_values)


def _below_tree(decoder: Decoder, tree: TokenTree, cache: KVCache) -> Callable[[int], Attend]:
    """Return the attention of each layer for a tree; a padding node attends to itself as well."""
    mask = tree.mask | jnp.eye(tree.tokens.shape[1], dtype=bool)
    return partial(decoder.attend_below, cache=cache, mask=mask)
