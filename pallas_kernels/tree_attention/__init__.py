"""Attention of tree nodes over a key-value cache and over the nodes' ancestors.

All implementations have the same interface; `reference` is the specification.
"""

import functools
from collections.abc import Callable

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.tree_attention.reference import PAGE, reference

__all__ = ["PAGE", "tree_attention"]


def tree_attention(
    q: Float[Array, "B T Q H"],
    k_cache: Float[Array, "pages K page H"],
    v_cache: Float[Array, "pages K page H"],
    table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    k_tree: Float[Array, "B N K H"],
    v_tree: Float[Array, "B N K H"],
    mask: Bool[Array, "B T N"],
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T Q H"]:
    """Compute softmax attention of each tree node over the cached tokens and the node's ancestors.

    The T nodes that attend are all N nodes of a tree, or the newest nodes of a growing tree. A node
    attends to itself too.

    Args:
      q: queries of the T nodes, with Q query heads of dimension H.
      k_cache: keys of the text before the tree, with K key heads, in pages of `PAGE` slots. Slots
        at and after `lengths` may hold anything, including NaN.
      v_cache: values of the text before the tree, in the same form.
      table: numbers of the M pages of each row, in text order; rows may share pages. Entries for
        slots at and after `lengths` may be any valid page number.
      lengths: number of cached tokens per row, from 0 to `PAGE` times M.
      k_tree: keys of all N nodes, parents before their children.
      v_tree: values of all N nodes, in the same order.
      mask: mask[b, i, j] is True if query i attends to node j: the query's own node, or an ancestor
        of this node. Keys and values of nodes that no query attends to may be any finite numbers.
      scale: factor of the scores before the softmax.
      window: number of positions that a node attends to, including its own; None for all. A node's
        position is the number of cached tokens plus its number of ancestors.
      implementation: a named implementation, or None for the platform's best: "mosaic_gpu" on
        Hopper GPUs for supported shapes and dtypes, else "reference". "mosaic_gpu_interpret" runs
        the same kernel slowly on the CPU, with race detection.

    Returns:
      The outputs of each node and query head, in q's dtype. Softmax and sums are computed in
      float32.

    Raises:
      ValueError: shapes do not fit together, or the window holds no position.
      NotImplementedError: the named implementation cannot run here.
    """
    arrays = q, k_cache, v_cache, table, lengths, k_tree, v_tree, mask
    _check_shapes(*arrays)
    if window is not None and window < 1:
        raise ValueError(f"tree_attention: window is {window}, but must be 1 or more.")
    # A window that covers all positions runs the program without a window.
    if window is not None and window >= table.shape[1] * PAGE + k_tree.shape[1]:
        window = None

    def kernel() -> Callable[..., Array]:
        from pallas_kernels.tree_attention.mosaic_gpu import mosaic_gpu

        return functools.partial(mosaic_gpu, scale=scale)

    def unsupported(*arrays: Array) -> str | None:
        from pallas_kernels.tree_attention.plan import why_unsupported

        q, k_cache, v_cache, _, _, k_tree, v_tree, _ = arrays
        return why_unsupported(q, k_cache, v_cache, k_tree, v_tree, window)

    return dispatch(
        "tree_attention",
        arrays,
        implementation,
        reference=functools.partial(reference, scale=scale, window=window),
        unsupported=unsupported,
        kernel=kernel,
    )


def _check_shapes(q: Array, k_cache: Array, *others: Array) -> None:
    names: list[str] = ["k_cache", "v_cache", "table", "lengths", "k_tree", "v_tree", "mask"]
    given = dict(zip(names, (k_cache, *others), strict=True))
    for name, array in {"q": q, "k_cache": k_cache, "k_tree": given["k_tree"]}.items():
        if array.ndim != 4:
            raise ValueError(f"tree_attention: {name} has shape {array.shape}, not 4 axes.")
    B, T, Q, H = q.shape
    pages, K = k_cache.shape[:2]
    N = given["k_tree"].shape[1]
    table = given["table"]
    expected: dict[str, tuple[int, ...]] = {
        "k_cache": (pages, K, PAGE, H),
        "v_cache": (pages, K, PAGE, H),
        "table": (B, *table.shape[1:2]),
        "lengths": (B,),
        "k_tree": (B, N, K, H),
        "v_tree": (B, N, K, H),
        "mask": (B, T, N),
    }
    for name, shape in expected.items():
        if given[name].shape != shape:
            raise ValueError(
                f"tree_attention: {name} has shape {given[name].shape}, but q {q.shape}, k_cache "
                f"{k_cache.shape} and {N} nodes in k_tree need {shape}."
            )
    if Q % K:
        raise ValueError(f"tree_attention: {K} key heads do not divide {Q} query heads.")
