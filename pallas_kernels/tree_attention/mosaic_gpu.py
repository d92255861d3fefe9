"""Tree attention for Hopper GPUs in Pallas' Mosaic GPU dialect.

Decoding is bound by reading the cache, so the cache is cut into splits until every core of the
card has one, and one program reads the keys and values of its split once for up to three tiles of
64 query rows. A row is one node and one of the G query heads that share a key head, so grouped
heads share the reads too.

Each program runs one warpgroup that copies blocks of keys and values into a ring of shared memory,
and two or three that compute: one for each tile, or for a single tile two that take every other
block. The programs of the last split also take the tree's own keys, the only ones that need the
mask; it comes as bits, 32 nodes to a word. Every program writes its unnormalised output with the
running maximum and sum of the softmax in float32, and jnp merges the splits.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

CORES = 132  # of an H100 or H200; on another count the splits are only less even
TILE = 64  # rows of one wgmma
BLOCK = 64  # keys, or nodes, of one step
WORD = 32  # nodes in one word of the mask
MAX_TILES = 3  # tiles that one program holds in registers
SHARED_MEMORY = 220 * 1024  # of the 227 KiB of a program; the rest is for barriers and scratch

# Finite, so that a row that has seen nothing yet has no infinity minus infinity.
_LOWEST = float(jnp.finfo(jnp.float32).min)
_ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a tile, as wgmma lays them out


class Plan(NamedTuple):
    """How one call is cut into programs; everything is static."""

    splits: int  # programs along the cache
    groups: int  # programs along the rows
    tiles: int  # tiles of rows in one program
    ways: int  # warpgroups that share a tile, each with its own blocks
    stages: int  # blocks in flight
    tree_steps: int  # blocks of nodes

    @property
    def warpgroups(self) -> int:
        """That compute; one more copies."""
        return self.tiles * self.ways


def why_unsupported(q: Any, k_cache: Any) -> str | None:
    """The reason why this kernel cannot take these shapes and dtypes, None where it can."""
    H, S = q.shape[-1], k_cache.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_cache.dtype != q.dtype:
        return (
            f"queries are {q.dtype} and keys {k_cache.dtype}; both must be bfloat16 or both float16"
        )
    if H not in (64, 128):
        return f"the head dimension is {H}, not 64 or 128"
    if S < BLOCK:
        return f"the cache has {S} slots, fewer than the {BLOCK} of one block"
    return None


def make_plan(B: int, N: int, Q: int, K: int, S: int, H: int) -> Plan:  # noqa: N803
    """Choose splits that keep every core busy and the partial results few."""
    rows = N * Q // K
    row_tiles = pl.cdiv(rows, TILE)
    groups = pl.cdiv(row_tiles, MAX_TILES)
    tiles = pl.cdiv(row_tiles, groups)
    ways = 2 if tiles == 1 else 1

    def cost(splits: int) -> int:
        """In keys: those of the longest chain of programs, one at a time on a core."""
        waves = pl.cdiv(B * K * groups * splits, CORES)
        # A partial row is written and read in float32, as wide as one key and value each;
        # 128 keys stand for the latency of starting up.
        partial = 2 * tiles * min(TILE, rows) if splits > 1 else 0
        return waves * (pl.cdiv(S, splits * BLOCK) * BLOCK + partial + 128)

    splits = min(range(1, pl.cdiv(S, BLOCK) + 1), key=cost)
    fixed = tiles * TILE * H * (2 + 4)  # queries and staged output
    stages = (SHARED_MEMORY - fixed) // (2 * BLOCK * H * 2)
    return Plan(
        splits=splits,
        groups=groups,
        tiles=tiles,
        ways=ways,
        stages=min(4, stages // ways * ways),
        tree_steps=pl.cdiv(N, BLOCK),
    )


def mosaic_gpu(
    q: Float[Array, "B N Q H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    k_tree: Float[Array, "B N K H"],
    v_tree: Float[Array, "B N K H"],
    mask: Bool[Array, "B N N"],
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B N Q H"]:
    """See `pallas_kernels.tree_attention.tree_attention`.

    Args:
      q: bfloat16 or float16, H of 64 or 128.
      k_cache: S of at least 64; where it is no multiple of 64, the last block starts earlier.
      v_cache: as k_cache.
      lengths: as everywhere.
      k_tree: as everywhere.
      v_tree: as everywhere.
      mask: as everywhere.
      scale: as everywhere.
      interpret: run on the CPU, with detection of races.
    """
    B, N, Q, H = q.shape
    K, S = k_cache.shape[1:3]
    G = Q // K
    plan = make_plan(B, N, Q, K, S, H)
    padded = plan.groups * plan.tiles * TILE

    rows = q.reshape(B, N, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, N * G, H)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - N * G), (0, 0)))
    words = mask_words(mask, plan.tree_steps * BLOCK)
    words = jnp.repeat(words, G, axis=1)
    words = jnp.pad(words, ((0, 0), (0, padded - N * G), (0, 0))).transpose(0, 2, 1)
    nodes = ((0, 0), (0, plan.tree_steps * BLOCK - N), (0, 0), (0, 0))

    output, maximum, total = _call(plan, interpret, scale, rows.shape, S, N * G, q.dtype)(
        lengths.astype(jnp.int32),
        rows,
        k_cache,
        v_cache,
        jnp.pad(k_tree.astype(q.dtype), nodes),
        jnp.pad(v_tree.astype(q.dtype), nodes),
        words,
    )
    merged = merge(output, maximum[..., : output.shape[-2]], total[..., : output.shape[-2]])
    merged = merged[:, :, : N * G].reshape(B, K, N, G, H).transpose(0, 2, 1, 3, 4)
    return merged.reshape(B, N, Q, H).astype(q.dtype)


def mask_words(mask: Bool[Array, "B N M"], nodes: int) -> Int[Array, "B N words"]:
    """Bit j % 32 of word j // 32 is mask[..., j]; nodes past M are unseen."""
    B, N, M = mask.shape
    words = pl.cdiv(nodes, WORD)
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, words * WORD - M))).reshape(B, N, words, WORD)
    values = jnp.where(bits, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), 0)
    return lax.bitcast_convert_type(values.sum(-1, dtype=jnp.uint32), jnp.int32)


def merge(
    output: Float[Array, "splits B K M H"],
    maximum: Float[Array, "splits B K M"],
    total: Float[Array, "splits B K M"],
) -> Float[Array, "B K M H"]:
    """One softmax out of the splits', whose maximum is a power of two."""
    weights = jnp.exp2(maximum - maximum.max(axis=0))
    return (output * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]


def _call(
    plan: Plan,
    interpret: bool,
    scale: float,
    rows_shape: tuple[int, ...],
    S: int,  # noqa: N803
    rows: int,
    dtype: Any,
) -> Any:
    """The kernel: the arguments of its body in, output, maximum and sum of every split out."""
    B, K, padded, H = rows_shape
    copier = plan.warpgroups
    written = pl.cdiv(rows, 8) * 8  # rows of the output
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    swizzled_float32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    def body(
        lengths_ref: Any,
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        k_tree_ref: Any,
        v_tree_ref: Any,
        words_ref: Any,
        output_ref: Any,
        maximum_ref: Any,
        total_ref: Any,
        scratch: Any,
        barriers: Any,
    ) -> None:
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        split, group = lax.axis_index("split"), lax.axis_index("group")
        warpgroup = lax.axis_index("warpgroup")

        # This program's keys: the row's own length is cut evenly, in whole blocks.
        length = lengths_ref[batch]
        blocks = pl.cdiv(length, BLOCK)
        share = pl.cdiv(blocks, plan.splits)
        first = lax.min(split * share, blocks)
        steps = lax.min(first + share, blocks) - first
        tree_steps = lax.select(split == plan.splits - 1, plan.tree_steps, 0)

        def span(step: Any) -> tuple[Any, Any, Any]:
            """Where block `step` starts, and its new, decided keys: from `low` to `high`."""
            wanted = (first + step) * BLOCK
            start = lax.min(wanted, S - BLOCK)
            return start, wanted - start, lax.min(length - start, BLOCK)

        @pl.when(warpgroup == copier)
        def _copy() -> None:
            plgpu.set_max_registers(_copier_registers(plan), action="decrease")
            keys, values = scratch["keys"], scratch["values"]

            for tile in range(plan.tiles):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[batch, head, pl.ds((group * plan.tiles + tile) * TILE, TILE)],
                    scratch["queries"].at[tile],
                    barriers["queries"].at[tile],
                )

            def wait_until_free(step: Any) -> Any:
                slot = lax.rem(step, plan.stages)

                @pl.when(step >= plan.stages)
                def _() -> None:
                    plgpu.barrier_wait(barriers["free"].at[slot])

                return slot

            @pl.loop(0, steps)
            def _past(step: Any) -> None:
                slot = wait_until_free(step)
                start, _, high = span(step)
                source = batch, head, pl.ds(start, BLOCK)
                plgpu.copy_gmem_to_smem(
                    k_ref.at[source], keys.at[slot], barriers["keys"].at[slot]
                )

                @pl.when(high == BLOCK)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[source], values.at[slot], barriers["values"].at[slot]
                    )

                @pl.when(high < BLOCK)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(v_ref.at[source], values.at[slot], barriers["edge"])
                    plgpu.barrier_wait(barriers["edge"])
                    _clear(values.at[slot], high)
                    plgpu.barrier_arrive(barriers["values"].at[slot])

            @pl.loop(0, tree_steps)
            def _tree(tree_step: Any) -> None:
                slot = wait_until_free(steps + tree_step)
                source = batch, pl.ds(tree_step * BLOCK, BLOCK), head
                plgpu.copy_gmem_to_smem(
                    k_tree_ref.at[source], keys.at[slot], barriers["keys"].at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    v_tree_ref.at[source], values.at[slot], barriers["values"].at[slot]
                )

        @pl.when(warpgroup < copier)
        def _compute() -> None:
            plgpu.set_max_registers(_compute_registers(plan), action="increase")
            tile, way = lax.div(warpgroup, plan.ways), lax.rem(warpgroup, plan.ways)
            first_row = (group * plan.tiles + tile) * TILE
            queries = scratch["queries"].at[tile]
            weights = scratch["weights"].at[warpgroup] if interpret else None
            plgpu.barrier_wait(barriers["queries"].at[tile])

            def attend(step: Any, visible: Any, carry: Any) -> Any:
                """One block into the running softmax."""
                output, maximum, total = carry
                slot = lax.rem(step, plan.stages)
                keys, values = scratch["keys"].at[slot], scratch["values"].at[slot]
                plgpu.barrier_wait(barriers["keys"].at[slot])

                def products(scores_ref: Any) -> Any:
                    plgpu.wgmma(scores_ref, queries, keys.transpose((1, 0)))
                    return scores_ref[...]

                scores = pl.run_scoped(products, plgpu.ACC((TILE, BLOCK), jnp.float32))
                scores = jnp.where(visible(), scores * (scale * math.log2(math.e)), -jnp.inf)
                new_maximum = jnp.maximum(maximum, scores.max(axis=1))
                decay = jnp.exp2(maximum - new_maximum)
                scores = jnp.exp2(scores - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
                total = total * decay + scores.sum(axis=1)
                output = output * lax.broadcast_in_dim(decay, output.shape, [0])
                plgpu.barrier_wait(barriers["values"].at[slot])
                output = _add_product(output, scores.astype(dtype), values, weights)
                # Only for a copy to come: no phase of a barrier goes unobserved.
                @pl.when(step + plan.stages < steps + tree_steps)
                def _() -> None:
                    plgpu.barrier_arrive(barriers["free"].at[slot])

                return output, new_maximum, total

            def past(turn: Any, carry: Any) -> Any:
                step = turn * plan.ways + way

                def visible() -> Any:
                    _, low, high = span(step)
                    position = _columns()
                    decided = position < high
                    return decided if S % BLOCK == 0 else decided & (position >= low)

                return attend(step, visible, carry)

            # The turns go on over the tree's blocks.
            past_turns = lax.div(steps - way + plan.ways - 1, plan.ways)
            first_tree = past_turns * plan.ways + way - steps
            tree_turns = lax.div(
                lax.max(tree_steps - first_tree, 0) + plan.ways - 1, plan.ways
            )

            def tree(turn: Any, carry: Any) -> Any:
                tree_step = first_tree + turn * plan.ways

                def visible() -> Any:
                    return _bits(words_ref.at[batch], first_row, tree_step)

                return attend(steps + tree_step, visible, carry)

            carry = (
                _full((TILE, H), 0, plgpu.Layout.WGMMA),
                _full((TILE,), _LOWEST, _ROWS),
                _full((TILE,), 0, _ROWS),
            )
            carry = lax.fori_loop(0, past_turns, past, carry)
            carry = lax.fori_loop(0, tree_turns, tree, carry)

            staged = [scratch[name].at[tile] for name in ("output", "maximum", "total")]

            def stage(output: Any, maximum: Any, total: Any) -> None:
                for ref, value in zip(staged, (output, maximum, total), strict=True):
                    ref[...] = value

            def write() -> None:
                plgpu.commit_smem()
                at = split, batch, head
                for ref, out in zip(staged[1:], (maximum_ref, total_ref), strict=True):
                    plgpu.copy_smem_to_gmem(ref, out.at[(*at, pl.ds(first_row, TILE))])
                _copy_rows(staged[0], output_ref.at[at], first_row, written)
                plgpu.wait_smem_to_gmem(0)

            if plan.ways == 1:
                stage(*carry)
                write()
            else:

                @pl.when(way == 1)
                def _() -> None:
                    stage(*carry)
                    plgpu.barrier_arrive(barriers["other"])

                @pl.when(way == 0)
                def _() -> None:
                    plgpu.barrier_wait(barriers["other"])
                    layouts = plgpu.Layout.WGMMA, _ROWS, _ROWS
                    other = (
                        plgpu.load(ref, layout=layout)
                        for ref, layout in zip(staged, layouts, strict=True)
                    )
                    stage(*_join(carry, tuple(other)))
                    write()

    def entry(*refs: Any) -> None:
        ring = plan.stages, BLOCK, H
        scratch = {
            "queries": plgpu.SMEM((plan.tiles, TILE, H), dtype, transforms=swizzled),
            "keys": plgpu.SMEM(ring, dtype, transforms=swizzled),
            "values": plgpu.SMEM(ring, dtype, transforms=swizzled),
            "output": plgpu.SMEM(
                (plan.tiles, TILE, H), jnp.float32, transforms=swizzled_float32
            ),
            "maximum": plgpu.SMEM((plan.tiles, TILE), jnp.float32),
            "total": plgpu.SMEM((plan.tiles, TILE), jnp.float32),
        }
        if interpret:
            scratch["weights"] = plgpu.SMEM(
                (plan.warpgroups, TILE, BLOCK), dtype, transforms=swizzled
            )
        barriers = {
            "queries": plgpu.Barrier(num_arrivals=1, num_barriers=plan.tiles),
            "keys": plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
            "values": plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
            "edge": plgpu.Barrier(num_arrivals=1),
            "free": plgpu.Barrier(num_arrivals=plan.tiles, num_barriers=plan.stages),
            "other": plgpu.Barrier(num_arrivals=1),
        }
        pl.run_scoped(
            lambda *scoped: body(*refs, *scoped),
            scratch,
            barriers,
            collective_axes="warpgroup",
        )

    partial = plan.splits, B, K
    return plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((*partial, written, H), jnp.float32),
            jax.ShapeDtypeStruct((*partial, padded), jnp.float32),
            jax.ShapeDtypeStruct((*partial, padded), jnp.float32),
        ),
        # The last axis runs fastest: programs that read the same keys start together.
        grid=(B, K, plan.splits, plan.groups),
        grid_names=("batch", "head", "split", "group"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="tree_attention",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def _copier_registers(plan: Plan) -> int:
    return 40 if plan.warpgroups == 2 else 56


def _compute_registers(plan: Plan) -> int:
    """The 65536 registers of a core, less those of the copying warpgroup."""
    return 232 if plan.warpgroups == 2 else 152


def _full(shape: tuple[int, ...], value: float, layout: Any) -> Any:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _columns() -> Any:
    """Each score's place in its block."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1, layout=plgpu.Layout.WGMMA)


def _bits(words_ref: Any, first_row: Any, tree_step: Any) -> Any:
    """What the rows of a tile see of one block of nodes."""

    def spread(word: int) -> Any:
        at = words_ref.at[tree_step * (BLOCK // WORD) + word, pl.ds(first_row, TILE)]
        of_row = plgpu.load(at, layout=_ROWS, optimized=False)
        return lax.broadcast_in_dim(of_row, (TILE, BLOCK), [0])

    column = _columns()
    word = jnp.where(column < WORD, spread(0), spread(1))
    return ((word >> (column & (WORD - 1))) & 1) == 1


def _add_product(output: Any, weights: Any, values: Any, staged: Any) -> Any:
    """output + weights @ values; the interpreter takes weights from shared memory alone."""
    if staged is None:

        def accumulate(output_ref: Any) -> None:
            plgpu.wgmma(output_ref, weights, values)

        return pl.run_state(accumulate)(plgpu.ACC.init(output))

    staged[...] = weights
    plgpu.commit_smem()

    def product(product_ref: Any) -> Any:
        plgpu.wgmma(product_ref, staged, values)
        return product_ref[...]

    return output + pl.run_scoped(product, plgpu.ACC(output.shape, jnp.float32))


def _clear(values: Any, high: Any) -> None:
    """Zero in the rows from `high` on: no weight, not even zero, silences a NaN."""
    block, H = values.shape
    for half in range(0, H, 64):
        part = values.at[:, pl.ds(half, 64)]
        row = plgpu.broadcasted_iota(jnp.int32, (block, 64), 0, layout=plgpu.Layout.WGMMA)
        loaded = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(row < high, loaded, jnp.zeros_like(loaded))
    plgpu.commit_smem()


def _join(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """The running softmax over the keys of both."""
    maximum = jnp.maximum(one[1], other[1])
    outputs, totals = [], []
    for output, own_maximum, total in (one, other):
        decay = jnp.exp2(own_maximum - maximum)
        outputs.append(output * lax.broadcast_in_dim(decay, output.shape, [0]))
        totals.append(total * decay)
    return outputs[0] + outputs[1], maximum, totals[0] + totals[1]


def _copy_rows(tile: Any, output_ref: Any, first_row: Any, rows: int) -> None:
    """A tile to its rows of the output, which ends at `rows`."""

    @pl.when(first_row + TILE <= rows)
    def _() -> None:
        plgpu.copy_smem_to_gmem(tile, output_ref.at[pl.ds(first_row, TILE)])

    if rest := rows % TILE:

        @pl.when(first_row == rows - rest)
        def _() -> None:
            plgpu.copy_smem_to_gmem(
                tile.at[pl.ds(0, rest)], output_ref.at[pl.ds(first_row, rest)]
            )
