"""The splits' results of the Mosaic GPU kernel as one softmax's."""

from functools import reduce
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Numbers that the threads of a program hold, one each; a row has as many.
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
    """The outputs of the N nodes, each over its sum of weights; by a kernel where H is 128.

    Rows are the G query heads of a key head, and of each its nodes, N and maybe more; rows past
    these are nobody's. Maxima are exponents of two, outputs and totals relative to them.
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
    """The specification of what the kernel computes of a row."""
    weights = jnp.exp2(maximum - maximum.max(axis=0))
    return (output * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]
