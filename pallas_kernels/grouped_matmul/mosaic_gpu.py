"""Products with grouped codes for Hopper GPUs, in Pallas' Mosaic GPU dialect.

Decoding takes as long as reading the weight. So each program reads its part of the weight once, and
multiplies it by up to 64 rows of x. The part has 128 outputs and one split of the inputs. The
weight is the left operand of wgmma, the matrix instruction: 64 outputs fill the instruction's rows,
and the rows of x, padded to a multiple of eight, are its columns.

Each program runs one warpgroup that copies blocks of 128 inputs into a ring buffer in shared
memory, and two warpgroups that compute 64 outputs each. The computing warpgroups convert the codes
of a group to bfloat16 in registers, which is exact, and multiply. The products of a group are
scaled when they are added to the float32 accumulator. With minima, the sums of each row's inputs by
group are an additional operand, which is computed once for all outputs.

The order of summation for a row does not depend on the other rows. The matrix instruction sums the
inputs of a group, then the groups of a split are added in order, and then the splits.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.plan import (
    BLOCK,
    COPIER_REGISTERS,
    MAX_ROWS,
    REGISTERS,
    TILE,
    WARPGROUPS,
    WIDTH,
    Plan,
    make_plan,
)

_TILE = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_OUTPUTS = plgpu.Layout.WGMMA.reduce(1)  # one value per output of a tile
_ROWS = plgpu.Layout.WGMMA.reduce(0)  # one value per row of x


def mosaic_gpu(
    x: Float[Array, "N I"],
    codes: Int[Array, "I O"],
    scale: Float[Array, "groups O"],
    minimum: Float[Array, "groups O"] | None,
    *,
    cores: int,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """Implement `pallas_kernels.grouped_matmul.grouped_matmul`; see `why_unsupported` for limits.

    `cores` is the number of cores of the GPU. `interpret` runs the kernel on the CPU and detects
    races.
    """
    N, inputs = x.shape
    bits = jnp.iinfo(codes.dtype).bits
    group = inputs // len(scale)
    plan = make_plan(N, inputs, codes.shape[1], bits, group, minimum is not None, cores)
    rows = jnp.pad(x, ((0, plan.padded_rows - N), (0, 0)))
    arrays = [rows, codes, scale]
    if minimum is not None:
        arrays += [minimum, group_sums(rows, len(scale)).T]
    partial = _make_kernel(plan, codes, scale, minimum, interpret)(*arrays)
    total = partial[0, :N]
    for split in range(1, plan.splits):
        total += partial[split, :N]
    return total


def group_sums(x: Float[Array, "N I"], groups: int) -> Float[Array, "N groups"]:
    """Sum each group of a row by adding halves elementwise; XLA may reorder a reduction."""
    sums = x.astype(jnp.float32).reshape(len(x), groups, -1)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _make_kernel(plan: Plan, codes: Any, scale: Any, minimum: Any, interpret: bool) -> Any:
    """Make the kernel: a function that returns the products of every split.

    Its arguments are rows, codes, scales and, with minima, the minima and the sums of the rows.
    """
    inputs, outputs = codes.shape
    group = inputs // len(scale)
    groups = BLOCK // group  # per block
    blocks = pl.cdiv(inputs, BLOCK)
    lowest = float(jnp.iinfo(codes.dtype).min)

    def body(sources: Any, output_ref: Any, scratch: dict[str, Any], barriers: Any) -> None:
        split, column = lax.axis_index("split"), lax.axis_index("column")
        row, warpgroup = lax.axis_index("tile") * plan.rows, lax.axis_index("warpgroup")
        first = lax.min(split * plan.steps, blocks)
        steps = lax.min(first + plan.steps, blocks) - first

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

            @pl.loop(0, steps)
            def _step(step: Any) -> None:
                slot = lax.rem(step, plan.stages)

                @pl.when(step >= plan.stages)
                def _() -> None:
                    plgpu.barrier_wait(barriers["free"].at[slot])

                def copy(name: str, *index: Any, part: tuple[int, ...] = ()) -> None:
                    target = scratch[name].at[(slot, *part)]
                    loaded = barriers["loaded"].at[slot]
                    plgpu.copy_gmem_to_smem(sources[name].at[index], target, loaded)

                block = pl.ds((first + step) * BLOCK, BLOCK)
                scales = pl.ds((first + step) * groups, groups)
                own = pl.ds(column * WIDTH, WIDTH)
                for part in range(WARPGROUPS):
                    copy("codes", block, pl.ds(column * WIDTH + part * TILE, TILE), part=(part,))
                copy("rows", pl.ds(row, plan.rows), block)
                copy("scale", scales, own)
                if minimum is not None:
                    copy("minimum", scales, own)
                    copy("sums", scales, pl.ds(row, MAX_ROWS))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            staged = scratch["weights"].at[warpgroup] if interpret else None

            def per_output(name: str, slot: Any, index: int) -> Any:
                ref = scratch[name].at[slot, index, pl.ds(warpgroup * TILE, TILE)]
                values = plgpu.load(ref, layout=_OUTPUTS, optimized=False)
                return values.astype(jnp.float32)

            def add_block(step: Any, total: Any) -> Any:
                slot = lax.rem(step, plan.stages)
                plgpu.barrier_wait(barriers["loaded"].at[slot])
                for index in range(groups):
                    own = pl.ds(index * group, group)
                    tile = scratch["codes"].at[slot, warpgroup, own].transpose((1, 0))
                    weights = plgpu.load(tile, layout=_TRANSPOSED)
                    weights = plgpu.layout_cast(weights.astype(jnp.bfloat16), _TILE)
                    rows = scratch["rows"].at[slot, :, own].transpose((1, 0))
                    step_size = per_output("scale", slot, index)
                    total += _product(weights, rows, staged) * _broadcast(step_size, plan.rows, 0)
                    if minimum is not None:
                        # The value of code 0.
                        zero = per_output("minimum", slot, index) - lowest * step_size
                        sums = scratch["sums"].at[slot, index, pl.ds(0, plan.rows)]
                        sums = plgpu.load(sums, layout=_ROWS, optimized=False)
                        total += _broadcast(zero, plan.rows, 0) * _broadcast(sums, plan.rows, 1)

                # Arrive only if a copy waits: every phase of a barrier must be observed.
                @pl.when(step + plan.stages < steps)
                def _() -> None:
                    plgpu.commit_smem()  # the next copy must come after these reads
                    plgpu.barrier_arrive(barriers["free"].at[slot])

                return total

            zeros = plgpu.layout_cast(jnp.zeros((TILE, plan.rows), jnp.float32), _TILE)
            total = lax.fori_loop(0, steps, add_block, zeros)
            output = scratch["output"].at[warpgroup]
            output.transpose((1, 0))[...] = plgpu.layout_cast(total, _TRANSPOSED)
            plgpu.commit_smem()
            own = pl.ds(column * WIDTH + warpgroup * TILE, TILE)
            plgpu.copy_smem_to_gmem(output, output_ref.at[split, pl.ds(row, plan.rows), own])
            plgpu.wait_smem_to_gmem(0)

    def entry(*refs: Any) -> None:
        *sources, output_ref = refs
        names = ("rows", "codes", "scale", "minimum", "sums")[: len(sources)]
        scratch = {
            "rows": plgpu.SMEM((plan.stages, plan.rows, BLOCK), jnp.bfloat16),
            "codes": plgpu.SMEM((plan.stages, WARPGROUPS, BLOCK, TILE), codes.dtype),
            "scale": plgpu.SMEM((plan.stages, groups, WIDTH), scale.dtype),
            "output": plgpu.SMEM((WARPGROUPS, plan.rows, TILE), jnp.float32),
        }
        if minimum is not None:
            scratch["minimum"] = plgpu.SMEM((plan.stages, groups, WIDTH), minimum.dtype)
            # Copies need multiples of 128 bytes; sums of fewer rows are smaller.
            scratch["sums"] = plgpu.SMEM((plan.stages, groups, MAX_ROWS), jnp.float32)
        if interpret:
            scratch["weights"] = plgpu.SMEM((WARPGROUPS, TILE, group), jnp.bfloat16)
        copies = len(sources) + WARPGROUPS - 1
        barriers = {
            "loaded": plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.stages),
        }
        pl.run_scoped(
            lambda *scoped: body(dict(zip(names, sources, strict=True)), output_ref, *scoped),
            scratch,
            barriers,
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((plan.splits, plan.padded_rows, outputs), jnp.float32),
        # The last axis varies fastest, so that programs that read the same codes start together.
        grid=(plan.splits, plan.columns, plan.tiles),
        grid_names=("split", "column", "tile"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def _product(weights: Any, rows: Any, staged: Any) -> Any:
    """Compute weights @ rows; the interpreter needs the weights in shared memory."""
    if staged is not None:
        staged[...] = weights
        plgpu.commit_smem()
        weights = staged

    def product(product_ref: Any) -> Any:
        plgpu.wgmma(product_ref, weights, rows)
        return product_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE, rows.shape[1]), jnp.float32))


def _broadcast(values: Any, rows: int, axis: int) -> Any:
    return lax.broadcast_in_dim(values, (TILE, rows), [axis])
