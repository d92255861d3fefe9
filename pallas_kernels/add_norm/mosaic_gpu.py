"""Residual sum and norm for Hopper GPUs in Pallas' Mosaic GPU dialect.

A program processes one row. Each of its warpgroups keeps a share of the row in registers. The
warpgroups add the parts, exchange their sums of squares through shared memory, and scale their
shares. Programs are independent of each other.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.add_norm.plan import THREADS, WARPGROUPS, vector_size


def mosaic_gpu(
    x: Float[Array, "rows D"],
    parts: Float[Array, "splits rows D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float,
    zero_centered: bool = False,
    cores: int = 0,
    interpret: bool = False,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Implement `pallas_kernels.add_norm.add_norm`; see `why_unsupported` for limits.

    `cores` is not used. `interpret` runs the kernel on the CPU and detects races.
    """
    del cores
    (rows, D), dtype = x.shape, x.dtype
    share = D // WARPGROUPS
    layout = plgpu.Layout.WG_STRIDED((share,), vec_size=vector_size(share))
    one_each = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

    def body(
        x_ref: Any,  # [rows D]
        parts_ref: Any,  # [splits rows D]
        weight_ref: Any,  # [D]
        added_ref: Any,  # [rows D]
        normed_ref: Any,
        squares_ref: Any,  # [WARPGROUPS THREADS], each row one number
        barrier: Any,
    ) -> None:
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        own = pl.ds(warpgroup * share, share)

        def load(ref: Any) -> Any:
            return plgpu.load(ref, layout=layout)

        total = load(parts_ref.at[0, row, own])
        for split in range(1, parts.shape[0]):
            total += load(parts_ref.at[split, row, own])
        # Both are rounded, as a product and a sum in this dtype are.
        sum_in_full = load(x_ref.at[row, own]).astype(jnp.float32) + _rounded(total, dtype)
        added = sum_in_full.astype(dtype)
        added_ref[row, own] = added
        wide = added.astype(jnp.float32)

        squares = jnp.full((THREADS,), (wide * wide).sum(), jnp.float32)
        squares_ref[warpgroup] = plgpu.layout_cast(squares, one_each)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        mean = jnp.float32(0)
        for other in range(WARPGROUPS):
            mean += squares_ref[other, 0]
        scaled = wide * lax.rsqrt(mean / D + epsilon)
        factor = load(weight_ref.at[own])
        if zero_centered:
            normed = scaled * (1 + factor.astype(jnp.float32))
        else:
            normed = _rounded(scaled, dtype) * factor.astype(jnp.float32)
        normed_ref[row, own] = normed.astype(dtype)

    like = jax.ShapeDtypeStruct((rows, D), dtype)
    kernel = plgpu.kernel(
        body,
        out_type=(like, like),
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, THREADS), jnp.float32),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(rows,),
        grid_names=("row",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="add_norm",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    added, normed = kernel(x, parts, weight)
    return added, normed


def _rounded(numbers: Any, dtype: Any) -> Any:
    return numbers.astype(dtype).astype(jnp.float32)
