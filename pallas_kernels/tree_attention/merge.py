"""Merges the softmax results of all splits of the cache, from the Mosaic GPU kernel, into one."""

from functools import reduce
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# The number of elements of a row; a program has one thread for each.
ROW = 128


def merge(
    output: Float[Array, "splits B K rows H"],
    maximum: Float[Array, "splits B K tiled_rows"],
    total: Float[Array, "splits B K tiled_rows"],
    N: int,
    G: int,
    dtype: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "B N Q H"]:
    """Merge the splits and normalize the outputs of the N nodes; a kernel does this if H is 128.

    The rows of a key head are those of its G query heads, in order. Each query head has a row for
    each of the N nodes, and may have padding rows. The last tiled rows may be unused.

    Args:
      output: sum of the weighted values of each row; the weight of a key is `2**(score - maximum)`.
      maximum: maximum of each row's scores, which are scaled by log2(e).
      total: sum of each row's weights.
      N: number of nodes that attend.
      G: number of query heads per key head.
      dtype: dtype of the result.
      interpret: whether the kernel runs in the interpreter, which detects races.
    """
    splits, B, K, rows, H = output.shape
    nodes = rows // G
    if H != ROW:
        merged = merge_rows(output, maximum[..., :rows], total[..., :rows]).astype(dtype)
        merged = merged.reshape(B, K, G, nodes, H)[:, :, :, :N]
        return merged.transpose(0, 3, 1, 2, 4).reshape(B, N, K * G, H)

    def body(output_ref: Any, maximum_ref: Any, total_ref: Any, result_ref: Any) -> None:
        batch, node, query = (lax.axis_index(name) for name in ("batch", "node", "query"))
        head, row = lax.div(query, G), lax.rem(query, G) * nodes + node
        at = [(split, batch, head, row) for split in range(splits)]
        highest = reduce(lax.max, (maximum_ref[one] for one in at))
        merged, whole = jnp.float32(0), jnp.float32(0)
        for one in at:
            weight = jnp.exp2(maximum_ref[one] - highest)
            layout = plgpu.Layout.WG_STRIDED((H,), vec_size=1)
            merged += plgpu.load(output_ref.at[one], layout=layout) * weight
            whole += total_ref[one] * weight
        result_ref[batch, node, query] = (merged / whole).astype(dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, N, K * G, H), dtype),
        grid=(B, N, K * G),
        grid_names=("batch", "node", "query"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_attention",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(output, maximum, total)


def merge_rows(
    output: Float[Array, "splits B K rows H"],
    maximum: Float[Array, "splits B K rows"],
    total: Float[Array, "splits B K rows"],
) -> Float[Array, "B K rows H"]:
    """Merge splits in jnp; this function is the specification of the kernel."""
    weights = jnp.exp2(maximum - maximum.max(axis=0))
    return (output * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]
