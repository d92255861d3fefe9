"""The specification in jnp: the CPU path and the oracle of the kernels' tests."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def reference(
    q: Float[Array, "B N Q H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    k_tree: Float[Array, "B N K H"],
    v_tree: Float[Array, "B N K H"],
    mask: Bool[Array, "B N N"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B N Q H"]:
    """See `pallas_kernels.tree_attention.tree_attention`.

    Past and tree keep their own scores, joined only in the softmax's maximum and sum: past keys
    need a length, tree keys need the mask, and the cache is never copied to append the tree.
    """
    B, N, Q, H = q.shape
    K, S = k_cache.shape[1:3]

    def head_major(x: Array, heads: int) -> Float[Array, "B K M H"]:
        """Rows of one key head together: its G query heads for every node, or its nodes."""
        x = x.reshape(B, N, K, heads // K, H).transpose(0, 2, 3, 1, 4)
        return x.reshape(B, K, heads // K * N, H)

    rows, k_tree, v_tree = head_major(q, Q), head_major(k_tree, K), head_major(v_tree, K)

    def scores(keys: Float[Array, "B K S H"], visible: Array) -> Float[Array, "B K M S"]:
        products = jnp.einsum("BKMH,BKSH->BKMS", rows, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible, products * scale, -jnp.inf)

    decided = jnp.arange(S) < lengths[:, None]
    seen = decided[:, None, None, :]
    if window is not None:
        depth = mask.sum(axis=-1) - 1
        mask &= depth[:, :, None] - depth[:, None, :] < window
        positions = lengths[:, None] + depth
        near = positions[:, :, None] - jnp.arange(S) < window
        seen &= jnp.tile(near, (1, Q // K, 1))[:, None]
    past = scores(k_cache, seen)
    tree = scores(k_tree, jnp.tile(mask, (1, Q // K, 1))[:, None])

    # The diagonal of the mask keeps the maximum finite where the cache is empty.
    maximum = tree.max(axis=-1, keepdims=True)
    maximum = jnp.maximum(maximum, past.max(axis=-1, keepdims=True, initial=-jnp.inf))
    past, tree = jnp.exp(past - maximum), jnp.exp(tree - maximum)
    total = past.sum(axis=-1, keepdims=True) + tree.sum(axis=-1, keepdims=True)

    def weighted(weights: Float[Array, "B K M S"], values: Float[Array, "B K S H"]) -> Array:
        weights = weights.astype(values.dtype)
        return jnp.matmul(weights, values, preferred_element_type=jnp.float32)

    # A weight of zero does not silence a NaN. The clean copy of the values is made only where one
    # came through: it takes as much memory traffic as the rest of the attention.
    from_cache = weighted(past, v_cache)
    from_cache = jax.lax.cond(
        jnp.isnan(from_cache.sum()),
        lambda: weighted(past, jnp.where(decided[:, None, :, None], v_cache, 0)),
        lambda: from_cache,
    )
    result = (from_cache + weighted(tree, v_tree)) / total
    result = result.reshape(B, K, Q // K, N, H).transpose(0, 3, 1, 2, 4)
    return result.reshape(B, N, Q, H).astype(q.dtype)
