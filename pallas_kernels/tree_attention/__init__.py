"""Attention of tree nodes over a key-value cache and over each other.

One contract for every implementation; `reference` is the specification.
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
    """Softmax attention of tree nodes, each over the cached tokens and its ancestors.

    The T nodes that attend are all N of a tree, or the newest of one that grows.

    Args:
      q: queries of the nodes that attend.
      k_cache: keys of decided tokens in pages of `PAGE` slots; slots at and past `lengths` may
        hold anything, NaN included.
      v_cache: values of decided tokens, likewise.
      table: numbers of each row's pages, in the order of its text; rows may share pages. Numbers of
        pages past `lengths` are those of any page.
      lengths: cached tokens per row, 0 allowed, at most `PAGE` times M.
      k_tree: keys of all nodes of the tree, a parent before its children.
      v_tree: values of all nodes, likewise.
      mask: mask[b, i, j] is True where query i sees node j: it itself is one, others its ancestors.
        A node that no query sees may hold any number, but not NaN or infinity.
      scale: factor on the scores before the softmax.
      window: positions that a node sees, its own included; None for all before it. A node stands
        as many positions after the cached tokens as it sees other nodes.
      implementation: a named one, or None for the best that this platform has: "mosaic_gpu" on
        Hopper GPUs for the shapes and dtypes it takes, else "reference". "mosaic_gpu_interpret"
        is the same kernel on the CPU, slow, watched for races.

    Returns:
      One output per node and query head, in q's dtype; softmax and sums are float32.

    Raises:
      ValueError: shapes do not fit together, or the window holds no position.
      NotImplementedError: the named implementation cannot run here.
    """
    arrays = q, k_cache, v_cache, table, lengths, k_tree, v_tree, mask
    _check_shapes(*arrays)
    if window is not None and window < 1:
        raise ValueError(f"tree_attention: window is {window}, but a node sees at least itself.")
    # No position lies further back: what follows is the program without a window.
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
                f"{k_cache.shape} and {N} nodes in k_tree ask for {shape}."
            )
    if Q % K:
        raise ValueError(f"tree_attention: {K} key heads do not divide {Q} query heads.")
