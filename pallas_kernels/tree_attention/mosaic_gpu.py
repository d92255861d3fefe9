"""Tree attention for Hopper GPUs in Pallas' Mosaic GPU dialect.

Decoding is bound by reading the cache. So the cache is divided into splits until every core of the
GPU has one. One program reads the keys and values of its split once, for up to three tiles of 64
query rows. More tiles take more programs, which start together and share reads through the L2
cache. A row is one query head at one attending node. The rows of a key head are ordered by its G
query heads; nodes, and so rows, are padded to multiples of eight.

Each program runs one warpgroup that copies blocks of keys and values into a ring buffer in shared
memory, and two or three warpgroups that compute. Each tile has one computing warpgroup, but a
single tile has two, which take alternate blocks. The programs of the last split also process the
keys of the tree. Only these keys need the mask, which is packed as bits, 32 nodes per word. Every
program writes its unnormalised output with the running maximum and sum of the softmax in float32,
and `merge` combines the splits.
"""

import math
from itertools import product
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention.merge import merge
from pallas_kernels.tree_attention.plan import BLOCK, CORES, EIGHT, TILE, Plan, make_plan

WORD = 32  # nodes in one word of the mask
# The initial maximum is finite, to avoid infinity minus infinity in rows without visible keys.
_LOWEST = float(jnp.finfo(jnp.float32).min)
_TILE = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a tile


def mosaic_gpu(
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
    cores: int = CORES,
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """Implement `pallas_kernels.tree_attention.tree_attention`; see `why_unsupported` for limits.

    `cores` is the number of cores of the GPU. `interpret` runs the kernel on the CPU and detects
    races.
    """
    B, T, Q, H = q.shape
    K, M = k_cache.shape[1], table.shape[1]
    N, G = k_tree.shape[1], Q // K
    plan = make_plan(B, T, N, Q, K, M * BLOCK, H, cores)

    # Put the queries, key and value of every key head side by side: if a projection already made
    # them as one such array, XLA passes it on without a copy. If fewer nodes attend, zeros follow
    # the queries and are not read.
    q = _pad_to(q.reshape(B, T, K, G, H), 1, N)
    heads = jnp.concatenate([q, k_tree[:, :, :, None], v_tree[:, :, :, None]], axis=3)
    # Copies take eight rows at a time and fill with zeros past the end of an array.
    padded, attending = (pl.cdiv(count, EIGHT) * EIGHT for count in (N, T))
    heads = _pad_to(heads.reshape(B, N, K * (G + 2), H), 1, padded)
    words = jnp.tile(_pad_to(mask_words(mask), 1, attending), (1, G, 1)).transpose(0, 2, 1)
    words = _pad_to(words, 2, plan.groups * plan.tiles * TILE)

    kernel = _make_kernel(plan, (B, K, G, attending, H), q.dtype, scale, interpret)
    of_rows = table.astype(jnp.int32), lengths.astype(jnp.int32)
    output, maximum, total = kernel(*of_rows, heads, k_cache, v_cache, words)
    return merge(output, maximum, total, T, G, q.dtype, interpret=interpret)


def mask_words(mask: Bool[Array, "B T N"]) -> Int[Array, "B T words"]:
    """Pack the mask into words of 32 nodes: bit j % 32 of word j // 32 is mask[..., j].

    The nodes are padded to whole blocks.
    """
    B, T, N = mask.shape
    words = pl.cdiv(N, BLOCK) * (BLOCK // WORD)
    bits = _pad_to(mask, 2, words * WORD).reshape(B, T, words, WORD)
    values = jnp.where(bits, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), 0)
    return lax.bitcast_convert_type(values.sum(-1, dtype=jnp.uint32), jnp.int32)


def _pad_to(array: Array, axis: int, size: int) -> Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)


def _make_kernel(
    plan: Plan,
    shape: tuple[int, int, int, int, int],
    dtype: Any,
    scale: float,
    interpret: bool,
) -> Any:
    """Make the kernel, a function of table, lengths, heads, cache and mask words."""
    B, K, G, nodes, H = shape
    rows, eights = G * nodes, nodes // EIGHT
    tiled_rows = plan.groups * plan.tiles * TILE

    def body(
        table_ref: Any,  # [B M]
        lengths_ref: Any,  # [B]
        heads_ref: Any,  # [B nodes K*(G+2) H]
        k_ref: Any,  # [pages K BLOCK H]
        v_ref: Any,
        words_ref: Any,  # [B words tiled_rows]
        output_ref: Any,  # [splits B K rows H]
        maximum_ref: Any,  # [splits B K tiled_rows]
        total_ref: Any,
        scratch: dict[str, Any],
        barriers: dict[str, Any],
    ) -> None:
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        split, group = lax.axis_index("split"), lax.axis_index("group")
        warpgroup = lax.axis_index("warpgroup")
        (keys, values), staged_output = scratch["ring"]

        # The row's cached tokens are divided evenly among the splits, in whole blocks.
        length = lengths_ref[batch]
        blocks = pl.cdiv(length, BLOCK)
        share = pl.cdiv(blocks, plan.splits)
        first = lax.min(split * share, blocks)
        past_steps = lax.min(first + share, blocks) - first
        tree_steps = lax.select(split == plan.splits - 1, plan.tree_steps, 0)
        steps = past_steps + tree_steps

        def decided(step: Any) -> Any:
            """Number of keys of cached tokens in a block."""
            return lax.min(length - (first + step) * BLOCK, BLOCK)

        @pl.when(warpgroup == plan.warpgroups)
        def _copy() -> None:
            plgpu.set_max_registers(plan.copier_registers, action="decrease")
            for tile, part in product(range(plan.tiles), range(TILE // EIGHT)):
                eight = (group * plan.tiles + tile) * (TILE // EIGHT) + part
                # Rows after the last query head are unused.
                own = head * (G + 2) + lax.min(lax.div(eight, eights), G - 1)
                plgpu.copy_gmem_to_smem(
                    heads_ref.at[batch, pl.ds(lax.rem(eight, eights) * EIGHT, EIGHT), own],
                    scratch["queries"].at[tile, pl.ds(part * EIGHT, EIGHT)],
                    barriers["queries"].at[tile],
                )

            def free_slot(step: Any) -> Any:
                slot = lax.rem(step, plan.stages)

                @pl.when(step >= plan.stages)
                def _() -> None:
                    plgpu.barrier_wait(barriers["free"].at[slot])

                return slot

            @pl.loop(0, past_steps)
            def _past(step: Any) -> None:
                slot = free_slot(step)
                high = decided(step)
                block = table_ref[batch, first + step], head
                loaded = barriers["values"].at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[block], keys.at[slot], barriers["keys"].at[slot])

                @pl.when(high == BLOCK)
                def _whole() -> None:
                    plgpu.copy_gmem_to_smem(v_ref.at[block], values.at[slot], loaded)

                @pl.when(high < BLOCK)
                def _edge() -> None:
                    plgpu.copy_gmem_to_smem(v_ref.at[block], values.at[slot], barriers["edge"])
                    plgpu.barrier_wait(barriers["edge"])
                    _clear(values.at[slot], high)
                    plgpu.barrier_arrive(loaded)

            @pl.loop(0, tree_steps)
            def _tree(tree_step: Any) -> None:
                slot = free_slot(past_steps + tree_step)
                for place, ring, loaded in (
                    (G, keys, barriers["keys"]),
                    (G + 1, values, barriers["values"]),
                ):
                    own = batch, pl.ds(tree_step * BLOCK, BLOCK), head * (G + 2) + place
                    plgpu.copy_gmem_to_smem(heads_ref.at[own], ring.at[slot], loaded.at[slot])

        @pl.when(warpgroup < plan.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(plan.registers, action="increase")
            tile, way = lax.div(warpgroup, plan.ways), lax.rem(warpgroup, plan.ways)
            first_row = (group * plan.tiles + tile) * TILE
            queries = scratch["queries"].at[tile]
            staged_weights = scratch["weights"].at[warpgroup] if interpret else None
            plgpu.barrier_wait(barriers["queries"].at[tile])

            def attend(step: Any, visible: Any, running: Any) -> Any:
                """Add one block to the running softmax."""
                output, maximum, total = running
                slot = lax.rem(step, plan.stages)
                plgpu.barrier_wait(barriers["keys"].at[slot])

                def products(products_ref: Any) -> Any:
                    plgpu.wgmma(products_ref, queries, keys.at[slot].transpose((1, 0)))
                    return products_ref[...]

                scores = pl.run_scoped(products, _accumulator(BLOCK))
                scores = jnp.where(visible(), scores * (scale * math.log2(math.e)), -jnp.inf)
                new_maximum = jnp.maximum(maximum, scores.max(axis=1))
                decay = jnp.exp2(maximum - new_maximum)
                weights = jnp.exp2(scores - _along_row(new_maximum, BLOCK))
                total = total * decay + weights.sum(axis=1)
                output = output * _along_row(decay, H)
                plgpu.barrier_wait(barriers["values"].at[slot])
                output = _add_product(
                    output, weights.astype(dtype), values.at[slot], staged_weights
                )

                # Arrive only if a copy waits: every phase of a barrier must be observed.
                @pl.when(step + plan.stages < steps)
                def _() -> None:
                    plgpu.barrier_arrive(barriers["free"].at[slot])

                return output, new_maximum, total

            def past(turn: Any, running: Any) -> Any:
                step = turn * plan.ways + way

                return attend(step, lambda: _columns() < decided(step), running)

            # The warpgroups go on taking turns from the blocks of the cache to those of the tree.
            past_turns = lax.div(past_steps - way + plan.ways - 1, plan.ways)
            first_tree = past_turns * plan.ways + way - past_steps
            tree_turns = lax.div(lax.max(tree_steps - first_tree, 0) + plan.ways - 1, plan.ways)

            def tree(turn: Any, running: Any) -> Any:
                tree_step = first_tree + turn * plan.ways
                rows_words = words_ref.at[batch, :, pl.ds(first_row, TILE)]
                return attend(past_steps + tree_step, lambda: _seen(rows_words, tree_step), running)

            running = (
                plgpu.layout_cast(jnp.zeros((TILE, H), jnp.float32), _TILE),
                plgpu.layout_cast(jnp.full((TILE,), _LOWEST, jnp.float32), _ROWS),
                plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _ROWS),
            )
            running = lax.fori_loop(0, past_turns, past, running)
            running = lax.fori_loop(0, tree_turns, tree, running)

            # The output reuses the ring buffer after the last read.
            plgpu.barrier_arrive(barriers["done"])
            plgpu.barrier_wait(barriers["done"])
            staged = [ref.at[tile] for ref in (staged_output, scratch["maximum"], scratch["total"])]

            def stage(*results: Any) -> None:
                for ref, result in zip(staged, results, strict=True):
                    ref[...] = result

            def write() -> None:
                plgpu.commit_smem()
                at = split, batch, head
                for ref, out in zip(staged, (output_ref, maximum_ref, total_ref), strict=True):
                    plgpu.copy_smem_to_gmem(ref, out.at[(*at, pl.ds(first_row, TILE))])
                plgpu.wait_smem_to_gmem(0)

            if plan.ways == 1:
                stage(*running)
                write()
                return

            @pl.when(way == 1)
            def _hand_over() -> None:
                stage(*running)
                plgpu.barrier_arrive(barriers["other"])

            @pl.when(way == 0)
            def _take_over() -> None:
                plgpu.barrier_wait(barriers["other"])
                layouts = _TILE, _ROWS, _ROWS
                other = [plgpu.load(r, layout=at) for r, at in zip(staged, layouts, strict=True)]
                stage(*_join(running, other))
                write()

    def entry(*refs: Any) -> None:
        ring = plgpu.SMEM((plan.stages, BLOCK, H), dtype)
        scratch = {
            "queries": plgpu.SMEM((plan.tiles, TILE, H), dtype),
            "ring": plgpu.RefUnion((ring, ring), plgpu.SMEM((plan.tiles, TILE, H), jnp.float32)),
            "maximum": plgpu.SMEM((plan.tiles, TILE), jnp.float32),
            "total": plgpu.SMEM((plan.tiles, TILE), jnp.float32),
        }
        if interpret:
            scratch["weights"] = plgpu.SMEM((plan.warpgroups, TILE, BLOCK), dtype)
        barriers = {
            "queries": plgpu.Barrier(num_arrivals=TILE // EIGHT, num_barriers=plan.tiles),
            "keys": plgpu.Barrier(num_barriers=plan.stages),
            "values": plgpu.Barrier(num_barriers=plan.stages),
            "edge": plgpu.Barrier(),
            "free": plgpu.Barrier(num_arrivals=plan.tiles, num_barriers=plan.stages),
            "done": plgpu.Barrier(num_arrivals=plan.warpgroups),
            "other": plgpu.Barrier(),
        }
        pl.run_scoped(
            lambda *scoped: body(*refs, *scoped), scratch, barriers, collective_axes="warpgroup"
        )

    partial = plan.splits, B, K
    per_row = jax.ShapeDtypeStruct((*partial, tiled_rows), jnp.float32)
    output = jax.ShapeDtypeStruct((*partial, rows, H), jnp.float32)
    return plgpu.kernel(
        entry,
        out_type=(output, per_row, per_row),
        # The last axis varies fastest, so that programs that read the same keys start together.
        grid=(B, K, plan.splits, plan.groups),
        grid_names=("batch", "head", "split", "group"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="tree_attention",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def _accumulator(columns: int) -> Any:
    return plgpu.WGMMAAccumulatorRef((TILE, columns), jnp.float32)


def _along_row(per_row: Any, columns: int) -> Any:
    return lax.broadcast_in_dim(per_row, (TILE, columns), [0])


def _columns() -> Any:
    """Column index of each score in its block."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1, layout=_TILE)


def _seen(words_ref: Any, tree_step: Any) -> Any:
    """Mask of the nodes of a block to which a tile's rows attend; words_ref is [words TILE]."""

    def spread(word: int) -> Any:
        of_rows = words_ref.at[tree_step * (BLOCK // WORD) + word]
        return _along_row(plgpu.load(of_rows, layout=_ROWS, optimized=False), BLOCK)

    node = _columns()
    word = jnp.where(node < WORD, spread(0), spread(1))
    return ((word >> (node & (WORD - 1))) & 1) == 1


def _add_product(output: Any, weights: Any, values: Any, staged: Any) -> Any:
    """Compute output + weights @ values; the interpreter needs the weights in shared memory."""
    if staged is None:

        def accumulate(output_ref: Any) -> None:
            plgpu.wgmma(output_ref, weights, values)

        return pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(output))

    staged[...] = weights
    plgpu.commit_smem()

    def product(product_ref: Any) -> Any:
        plgpu.wgmma(product_ref, staged, values)
        return product_ref[...]

    return output + pl.run_scoped(product, _accumulator(output.shape[1]))


def _clear(values: Any, high: Any) -> None:
    """Set the rows from `high` on to zero, because a weight of zero does not cancel NaN."""
    for column in range(0, values.shape[1], 64):
        part = values.at[:, pl.ds(column, 64)]
        row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, 64), 0, layout=_TILE)
        loaded = plgpu.load(part, layout=_TILE)
        part[...] = jnp.where(row < high, loaded, jnp.zeros_like(loaded))
    plgpu.commit_smem()


def _join(one: Any, other: Any) -> tuple[Any, Any, Any]:
    """Combine two running softmaxes."""
    maximum = jnp.maximum(one[1], other[1])
    output, total = 0, 0
    for own_output, own_maximum, own_total in (one, other):
        decay = jnp.exp2(own_maximum - maximum)
        output += own_output * _along_row(decay, own_output.shape[1])
        total += own_total * decay
    return output, maximum, total
