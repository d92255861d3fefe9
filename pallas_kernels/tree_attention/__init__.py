"""Attention of tree nodes over a key-value cache and over each other.

One contract for every implementation; `reference` is the specification.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention.reference import reference

Implementation = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]


def tree_attention(
    q: Float[Array, "B N Q H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    k_tree: Float[Array, "B N K H"],
    v_tree: Float[Array, "B N K H"],
    mask: Bool[Array, "B N N"],
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "B N Q H"]:
    """Softmax attention of N tree nodes, each over the cached tokens and its ancestors.

    Args:
      q: queries of the nodes.
      k_cache: keys of decided tokens; slots at and past `lengths` may hold anything, NaN included.
      v_cache: values of decided tokens, likewise.
      lengths: cached tokens per row, 0 allowed, at most S.
      k_tree: keys of the nodes themselves.
      v_tree: values of the nodes themselves.
      mask: mask[b, i, j] is True where node i sees node j; the diagonal is True.
      scale: factor on the scores before the softmax.
      implementation: a named one, or None for the best that this platform has.

    Returns:
      One output per node and query head, in q's dtype; softmax and sums are float32.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: the named implementation cannot run here.
    """
    _check_shapes(q, k_cache, v_cache, lengths, k_tree, v_tree, mask)
    if implementation in (None, "reference"):
        return reference(q, k_cache, v_cache, lengths, k_tree, v_tree, mask, scale=scale)
    raise NotImplementedError(
        f"tree_attention implementation {implementation!r} is not available in this version; "
        "use 'reference' or None."
    )


def _check_shapes(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    k_tree: Array,
    v_tree: Array,
    mask: Array,
) -> None:
    for name, array in {"q": q, "k_cache": k_cache}.items():
        if array.ndim != 4:
            raise ValueError(f"tree_attention: {name} has shape {array.shape}, not 4 axes.")
    B, N, Q, H = q.shape
    K, S = k_cache.shape[1:3]
    expected = {
        "k_cache": (k_cache, (B, K, S, H)),
        "v_cache": (v_cache, (B, K, S, H)),
        "lengths": (lengths, (B,)),
        "k_tree": (k_tree, (B, N, K, H)),
        "v_tree": (v_tree, (B, N, K, H)),
        "mask": (mask, (B, N, N)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(
                f"tree_attention: {name} has shape {array.shape}, but q {q.shape} and k_cache "
                f"{k_cache.shape} ask for {shape}."
            )
    if Q % K:
        raise ValueError(f"tree_attention: {K} key heads do not divide {Q} query heads.")
