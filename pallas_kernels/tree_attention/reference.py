"""The specification in jnp, for devices without a kernel and for the tests of the kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PAGE = 64  # slots of a page of the cache
# Number of pages per step. It is fixed, so that no bit of a row's result depends on the cache size
# or on longer rows: blocks after the text of a row add exact zeros.
_PAGES = 4
BLOCK = _PAGES * PAGE


class _Attended(NamedTuple):
    """The running softmax over some of the keys (arXiv 1805.02867), in float32."""

    maximum: Float[Array, "B K M 1"]
    total: Float[Array, "B K M 1"]
    weighted: Float[Array, "B K M H"]


def reference(
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
) -> Float[Array, "B T Q H"]:
    """Implement `pallas_kernels.tree_attention.tree_attention`.

    Queries attend to the tree first, and then to the cache block by block, from the first slot that
    any row attends to until the end of the longest row. So the cost depends on the lengths of the
    texts, and not on the size of the cache.
    """
    B, T, Q, H = q.shape
    K = k_cache.shape[1]
    # The depth of a node is the number of nodes before it that the query attends to.
    depths = jnp.cumsum(mask, axis=-1) - 1
    depth = depths[..., -1]

    def head_major(x: Float[Array, "B nodes heads H"]) -> Float[Array, "B K M H"]:
        """Group the heads of x by key head: G each if x holds queries, 1 each if it holds keys."""
        nodes, heads = x.shape[1:3]
        x = x.reshape(B, nodes, K, heads // K, H).transpose(0, 2, 3, 1, 4)
        return x.reshape(B, K, heads // K * nodes, H)

    rows = head_major(q)

    def attend(
        before: _Attended,
        keys: Float[Array, "B K M H"],
        values: Float[Array, "B K M H"],
        visible: Bool[Array, "B nodes M"],
    ) -> _Attended:
        scores = jnp.einsum("BKMH,BKSH->BKMS", rows, keys, preferred_element_type=jnp.float32)
        if visible.shape[1] > 1:
            visible = jnp.tile(visible, (1, Q // K, 1))
        scores = jnp.where(visible[:, None], scores * scale, -jnp.inf)
        maximum = jnp.maximum(before.maximum, scores.max(axis=-1, keepdims=True))
        weights, decay = jnp.exp(scores - maximum), jnp.exp(before.maximum - maximum)
        added = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        total = before.total * decay + weights.sum(axis=-1, keepdims=True)
        return _Attended(maximum, total, before.weighted * decay + added)

    def attend_block(index: Int[Array, ""] | int, before: _Attended) -> _Attended:
        slots = index * BLOCK + jnp.arange(BLOCK)
        decided = slots < lengths[:, None]
        visible = decided[:, None]
        if window is not None:
            positions = lengths[:, None] + depth
            visible = visible & (positions[:, :, None] - slots < window)
        # Zero weights do not cancel NaN.
        values = jnp.where(decided[:, None, :, None], _block(v_cache, table, index), 0)
        return attend(before, _block(k_cache, table, index), values, visible)

    if window is not None:
        mask = mask & (depth[..., None] - depths < window)
    # Every query attends to a node, so the maximum is finite.
    column = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    nothing = _Attended(column - jnp.inf, column, jnp.zeros(rows.shape, jnp.float32))
    attended = attend(nothing, head_major(k_tree), head_major(v_tree), mask)
    first = jnp.int32(0)
    if window is not None:
        # Rows without cached tokens attend to no block.
        shortest = jnp.min(lengths, where=lengths > 0, initial=table.shape[1] * PAGE)
        first = jnp.maximum(shortest - window + 1, 0) // BLOCK
    end = (jnp.max(lengths) + BLOCK - 1) // BLOCK
    attended = jax.lax.fori_loop(first, end, attend_block, attended)
    result = (attended.weighted / attended.total).reshape(B, K, Q // K, T, H)
    return result.transpose(0, 3, 1, 2, 4).reshape(B, T, Q, H).astype(q.dtype)


def _block(
    cached: Float[Array, "pages K page H"], table: Int[Array, "B M"], index: Int[Array, ""] | int
) -> Float[Array, "B K block H"]:
    """Gather a block of slots for every row; a row with fewer pages gets arbitrary slots."""
    B, (_, K, _, H) = len(table), cached.shape
    places = jnp.minimum(index * _PAGES + jnp.arange(_PAGES), table.shape[1] - 1)
    # With a page of one head as one row, XLA for CPUs copies whole pages in the final order.
    rows = table[:, None, places] * K + jnp.arange(K)[:, None]
    pages = cached.reshape(-1, PAGE * H).at[rows].get(mode="promise_in_bounds")
    return pages.reshape(B, K, BLOCK, H)
