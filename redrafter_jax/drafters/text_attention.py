"""Attention in the layers of a drafter: to the text so far, and between the given tokens."""

from jaxtyping import Array, Bool, Float

from redrafter_jax.models.attention import tree_attention
from redrafter_jax.models.decoder_layer import Attend
from redrafter_jax.types import KVCache


def attend_to_text(cache: KVCache, layer: int, mask: Bool[Array, "B C C"], scale: float) -> Attend:
    """Return the attention of C tokens to the cache, and to each other where the mask allows it.

    Args:
      cache: the drafter's layers of the cache, with the tokens before these C tokens.
      layer: index of the layer, counted among the drafter's layers.
      mask: mask[b, i, j] is True if token i attends to token j; every token attends to itself.
      scale: factor on the scores before the softmax.
    """

    def attend(
        q: Float[Array, "B C Q H"], k: Float[Array, "B C K H"], v: Float[Array, "B C K H"]
    ) -> Float[Array, "B C Q H"]:
        return tree_attention(
            q,
            k_cache=cache.keys[layer],
            v_cache=cache.values[layer],
            table=cache.table,
            lengths=cache.lengths,
            k_tree=k,
            v_tree=v,
            mask=mask,
            scale=scale,
        )

    return in_dtype_of(cache, attend)


def in_dtype_of(cache: KVCache, attend: Attend) -> Attend:
    """Return the attention computed in the dtype of the cache, which is the target's dtype."""
    dtype = cache.keys[0].dtype

    def cast(
        q: Float[Array, "B T Q H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> Float[Array, "B T Q H"]:
        return attend(*(one.astype(dtype) for one in (q, k, v))).astype(q.dtype)

    return cast
