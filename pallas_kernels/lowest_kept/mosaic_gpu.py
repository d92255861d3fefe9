"""The lowest kept logit for Hopper GPUs in Pallas' Mosaic GPU dialect.

One program of one warpgroup handles a row. It finds the thresholds of top-k and top-p two bits at a
time. Three scores divide the remaining range into quarters, and a pass over the row sums the
weights of the logits at or above each score. A weight is 1 for top-k, and a probability for top-p.
Passes read the row from the L1 and L2 caches, 16 bytes per thread. Programs are independent of each
other.

The search compares logits as they are stored. Division by the temperature may make different logits
equal, so further passes, with the division, find these ties.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.lowest_kept.plan import AHEAD, BLOCK, vector_size

_SIGN = 1 << 31
# The key of minus infinity. Keys are unsigned integers in the order of the floats; lower keys than
# this one stand for NaN.
_LOWEST = 0x007FFFFF


def mosaic_gpu(
    logits: Float[Array, "B M V"],
    unit: Float[Array, " B"],
    top_k: Float[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    *,
    cores: int = 0,
    interpret: bool = False,
) -> Float[Array, "B M"]:
    """Implement `pallas_kernels.lowest_kept.lowest_kept`; see `why_unsupported` for limits.

    `cores` is not used. `interpret` runs the kernel on the CPU and detects races.
    """
    del cores
    B, M, V = logits.shape
    whole, rest = divmod(V, BLOCK)
    layout = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=vector_size(V))

    def body(
        logits_ref: Any,  # [B M V]
        unit_ref: Any,  # [B]
        top_k_ref: Any,
        top_p_ref: Any,
        log_min_p_ref: Any,
        lowest_ref: Any,  # [B M]
    ) -> None:
        batch, row = lax.axis_index("batch"), lax.axis_index("row")
        unit = unit_ref[batch]
        inverse = 1 / unit

        def filled(number: Any, dtype: Any = jnp.float32) -> Any:
            return plgpu.layout_cast(jnp.full((BLOCK,), number, dtype), layout)

        def score_of(key: Any) -> Any:
            """Return the float with this key, in every element of a block.

            A key below the key of minus infinity counts as minus infinity.
            """
            sign, key = jnp.uint32(_SIGN), jnp.maximum(key, jnp.uint32(_LOWEST))
            bits = jnp.where(key >= sign, key ^ sign, ~key)
            return lax.bitcast_convert_type(filled(bits, jnp.uint32), jnp.float32)

        def over_row(running: Any, update: Callable[[Any, Any], Any], neutral: float) -> Any:
            """Fold `update` over the blocks of the row; `neutral` pads the last block."""

            def block(start: Any) -> Any:
                return plgpu.load(logits_ref.at[batch, row, pl.ds(start, BLOCK)], layout=layout)

            def several(turn: Any, running: Any) -> Any:
                starts = [(turn * AHEAD + at) * BLOCK for at in range(AHEAD)]
                for one in [block(start) for start in starts]:
                    running = update(running, one)
                return running

            turns = whole // AHEAD
            running = lax.fori_loop(0, turns, several, running)
            for at in range(turns * AHEAD, whole):
                running = update(running, block(at * BLOCK))
            if rest:
                place = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=layout)
                last = jnp.where(place >= BLOCK - rest, block(V - BLOCK), neutral)
                running = update(running, last)
            return running

        highest = over_row(filled(-jnp.inf), jnp.maximum, -jnp.inf).max()

        def search(bound: Any, weigh: Callable[[Any], Any]) -> Any:
            """Return the lowest score such that the weights above it sum to less than `bound`."""

            def two_bits(step: Any, lowest: Any) -> Any:
                quarter = jnp.uint32(1) << (30 - 2 * step).astype(jnp.uint32)
                marks = [score_of(lowest + quarter * jnp.uint32(times)) for times in (1, 2, 3)]

                def add(sums: Any, block: Any) -> Any:
                    weights = weigh(block)
                    return tuple(
                        total + jnp.where(block >= mark, weights, 0.0)
                        for total, mark in zip(sums, marks, strict=True)
                    )

                sums = over_row((filled(0.0),) * 3, add, -jnp.inf)
                first, second, third = (~(total.sum() < bound) for total in sums)
                then = jnp.where(second, third, first)
                return (
                    lowest
                    + jnp.where(second, quarter * jnp.uint32(2), jnp.uint32(0))
                    + jnp.where(then, quarter, jnp.uint32(0))
                )

            return score_of(lax.fori_loop(0, 16, two_bits, jnp.uint32(0)))

        def lowest_from(score: Any, above: Any) -> Any:
            """Return the lowest logit >= `above` whose quotient by `unit` is >= `score`."""

            def update(lowest: Any, block: Any) -> Any:
                kept = (block / unit >= score) & (block >= above)
                return jnp.minimum(lowest, jnp.where(kept, block, jnp.inf))

            return over_row(filled(jnp.inf), update, jnp.inf).min()

        top_k, top_p, none = top_k_ref[batch], top_p_ref[batch], filled(-jnp.inf)

        def cut_by_count() -> Any:
            ones = filled(1.0)
            return filled(lowest_from(search(top_k, lambda _: ones) / unit, none))

        above = lax.cond(top_k < jnp.inf, cut_by_count, lambda: none)

        def cut_by_probability() -> Any:
            def weigh(block: Any) -> Any:
                return jnp.where(block >= above, jnp.exp((block - highest) * inverse), 0.0)

            total = over_row(filled(0.0), lambda sum, block: sum + weigh(block), -jnp.inf).sum()
            return search(top_p * total, weigh) / unit

        score = lax.cond(top_p < jnp.inf, cut_by_probability, lambda: none)
        score = jnp.maximum(score, highest / unit + log_min_p_ref[batch])
        lowest_ref[batch, row] = lowest_from(score, above)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, M), jnp.float32),
        grid=(B, M),
        grid_names=("batch", "row"),
        kernel_name="lowest_kept",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(logits, unit, top_k, top_p, jnp.log(min_p))
