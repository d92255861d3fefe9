"""Writing of rows into layers for Hopper GPUs in Pallas' Mosaic GPU dialect.

XLA first stacks the new rows of all layers into one array, in one kernel. Then each program, of one
warpgroup, writes all heads of one token into one layer. Programs write to different addresses and
share nothing.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def mosaic_gpu(
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    layers: tuple[Shaped[Array, "pages K page H"], ...],
    fresh: tuple[Shaped[Array, "B T K H"], ...],
    *,
    cores: int = 0,
    interpret: bool = False,
) -> tuple[Shaped[Array, "pages K page H"], ...]:
    """Implement `pallas_kernels.write_rows.write_rows`; see `why_unsupported` for limits.

    `cores` is not used. `interpret` runs the kernel on the CPU and detects races.
    """
    del cores
    pages, K, slots, H = layers[0].shape
    B, T = page.shape

    def body(
        place_ref: Any,  # [B T]
        fresh_ref: Any,  # [layers B T K H]
        *layer_refs: Any,  # [pages K page H]
    ) -> None:
        layer, batch, token = (lax.axis_index(name) for name in ("layer", "batch", "token"))
        place = place_ref[batch, token]
        page, slot = lax.div(place, slots), lax.rem(place, slots)
        layout = plgpu.Layout.WG_STRIDED((H,), vec_size=1)

        @pl.when(page < pages)
        def _write() -> None:
            # All loads come first, so that they wait for memory together.
            rows = [
                plgpu.load(fresh_ref.at[layer, batch, token, head], layout=layout)
                for head in range(K)
            ]
            for at, layer_ref in enumerate(layer_refs):

                @pl.when(layer == at)
                def _into(layer_ref: Any = layer_ref) -> None:
                    for head, row in enumerate(rows):
                        layer_ref[page, head, slot] = row

    kernel = plgpu.kernel(
        body,
        grid=(len(layers), B, T),
        grid_names=("layer", "batch", "token"),
        kernel_name="write_rows",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    # The kernel changes these in place; XLA copies a layer only if it is read afterwards.
    refs = tuple(map(jax.new_ref, layers))
    # One array of places, so that XLA computes pages and slots in one kernel.
    kernel(page * slots + slot, jnp.stack(fresh), *refs)
    return tuple(map(jax.freeze, refs))
