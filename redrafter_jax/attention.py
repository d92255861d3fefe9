"""Attention as the target uses it; the only module that knows the kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import tree_attention as tree_attention_kernel

# Queries per block: bounds the scores to [B, Q, 128, T] and skips the keys after the block.
_BLOCK = 128


def prefill_attention(
    q: Float[Array, "B T Q H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
) -> Float[Array, "B T Q H"]:
    """Causal self-attention over left-aligned sequences, float32 softmax.

    Rows may end in padding: the causal mask already hides it from every real position.
    """
    T = q.shape[1]
    blocks = [
        _causal_block(q[:, start : start + _BLOCK], k[:, :end], v[:, :end], start)
        for start in range(0, T, _BLOCK)
        for end in (min(start + _BLOCK, T),)
    ]
    return jnp.concatenate(blocks, axis=1)


def _causal_block(
    q: Float[Array, "B block Q H"],
    k: Float[Array, "B end K H"],
    v: Float[Array, "B end K H"],
    start: int,
) -> Float[Array, "B block Q H"]:
    B, block, Q, H = q.shape
    end, K = k.shape[1:3]
    grouped = q.reshape(B, block, K, Q // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    visible = start + jnp.arange(block)[:, None] >= jnp.arange(end)
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weighted = jnp.einsum(
        "BKGTS,BSKH->BTKGH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    total = weights.sum(axis=-1).transpose(0, 3, 1, 2)[..., None]
    return (weighted / total).reshape(B, block, Q, H).astype(q.dtype)


def tree_attention(
    q: Float[Array, "B N Q H"],
    k: Float[Array, "B N K H"],
    v: Float[Array, "B N K H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    mask: Bool[Array, "B N N"],
) -> Float[Array, "B N Q H"]:
    """Each node attends to the first `lengths` cached tokens and to the nodes its mask shows."""
    scale = q.shape[-1] ** -0.5
    return tree_attention_kernel(q, k_cache, v_cache, lengths, k, v, mask, scale=scale)
