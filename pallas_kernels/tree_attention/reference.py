"""The specification in jnp: the CPU path and the oracle of the kernels' tests."""

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
) -> Float[Array, "B N Q H"]:
    """See `pallas_kernels.tree_attention.tree_attention`.

    Past and tree keep their own scores, joined only in the softmax's maximum and sum: past keys
    need a length, tree keys need the mask, and the cache is never copied to append the tree.
    """
    B, N, Q, H = q.shape
    K, S = k_cache.shape[1:3]
    grouped = q.reshape(B, N, K, Q // K, H)

    def scores(equation: str, keys: Array, visible: Array) -> Array:
        products = jnp.einsum(equation, grouped, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible, products * scale, -jnp.inf)

    decided = jnp.arange(S) < lengths[:, None]
    past = scores("BNKGH,BKSH->BKGNS", k_cache, decided[:, None, None, None, :])
    tree = scores("BNKGH,BMKH->BKGNM", k_tree, mask[:, None, None])

    # The diagonal of the mask keeps the maximum finite where the cache is empty.
    maximum = tree.max(axis=-1, keepdims=True)
    maximum = jnp.maximum(maximum, past.max(axis=-1, keepdims=True, initial=-jnp.inf))
    past, tree = jnp.exp(past - maximum), jnp.exp(tree - maximum)
    total = past.sum(axis=-1) + tree.sum(axis=-1)

    # Zero weight does not silence a NaN, so undecided values are cleared.
    clean = jnp.where(decided[:, None, :, None], v_cache, 0)
    weighted = jnp.einsum(
        "BKGNS,BKSH->BNKGH", past.astype(v_cache.dtype), clean, preferred_element_type=jnp.float32
    ) + jnp.einsum(
        "BKGNM,BMKH->BNKGH", tree.astype(v_tree.dtype), v_tree, preferred_element_type=jnp.float32
    )
    normalised = weighted / total.transpose(0, 3, 1, 2)[..., None]
    return normalised.reshape(B, N, Q, H).astype(q.dtype)
