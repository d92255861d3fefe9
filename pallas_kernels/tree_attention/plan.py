"""Division of a call of the Mosaic GPU kernel into programs, computed from shapes."""

from typing import Any, NamedTuple

from pallas_kernels.tree_attention.reference import PAGE

TILE = 64  # query rows in one tile, the rows of wgmma
BLOCK = PAGE  # keys, or nodes, of one step
EIGHT = 8  # rows, or nodes, of the smallest copy
MAX_TILES = 3  # tiles that one program holds in registers
MAX_STAGES = 8
SHARED_MEMORY = 220 * 1024  # of a program's 227 KiB; the rest is for barriers and scratch
STARTUP = 128  # cost in keys of starting a program and loading its first block
CORES = 132  # cores of an H100 or H200


class Plan(NamedTuple):
    """Division of a call into programs; all fields are static."""

    splits: int  # programs along the cache
    groups: int  # programs along the rows
    tiles: int  # tiles of rows in one program
    ways: int  # warpgroups that share a tile, taking blocks in turn
    stages: int  # blocks in the ring buffer
    tree_steps: int  # blocks of nodes

    @property
    def warpgroups(self) -> int:
        """Number of computing warpgroups; one further warpgroup copies."""
        return self.tiles * self.ways

    @property
    def copier_registers(self) -> int:
        """Registers per copying thread."""
        return 40 if self.warpgroups == 2 else 56

    @property
    def registers(self) -> int:
        """Registers per computing thread, from the rest of a core's 65536 registers."""
        return 232 if self.warpgroups == 2 else 152


def why_unsupported(
    q: Any, k_cache: Any, v_cache: Any, k_tree: Any, v_tree: Any, window: int | None = None
) -> str | None:
    """The reason, as a clause, why the kernel cannot take these shapes and dtypes, or None."""
    H = q.shape[-1]
    dtypes = {str(array.dtype) for array in (q, k_cache, v_cache, k_tree, v_tree)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        names = " and ".join(sorted(dtypes))
        return f"its arrays must be all bfloat16 or all float16, but are {names}"
    if H not in (64, 128):
        return f"its head dimension must be 64 or 128, but is {H}"
    if window is not None:
        return f"it does not support a window, but the window is {window} positions"
    return None


def make_plan(B: int, T: int, N: int, Q: int, K: int, S: int, H: int, cores: int) -> Plan:
    """Choose the fewest reads of the cache, then splits that keep every core equally busy.

    Args:
      B: number of rows of the batch.
      T: number of nodes that attend.
      N: number of nodes.
      Q: number of query heads.
      K: number of key heads.
      S: number of cache slots per row.
      H: head dimension.
      cores: number of cores of the GPU.
    """
    rows = _ceil_div(T, EIGHT) * EIGHT * Q // K
    row_tiles = _ceil_div(rows, TILE)
    groups = _ceil_div(row_tiles, MAX_TILES)
    tiles = _ceil_div(row_tiles, groups)
    ways = 2 if tiles == 1 else 1

    def cost(splits: int) -> int:
        """Modelled cost, in keys read, of the core with the most programs."""
        waves = _ceil_div(B * K * groups * splits, cores)
        # Writing and reading a partial row moves as many bytes as two keys with their values.
        partial = 2 * min(tiles * TILE, rows) if splits > 1 else 0
        return waves * (_ceil_div(S, splits * BLOCK) * BLOCK + partial + STARTUP)

    stage = 2 * BLOCK * H * 2
    stages = min(MAX_STAGES, (SHARED_MEMORY - tiles * TILE * H * 2) // stage)
    return Plan(
        splits=min(range(1, _ceil_div(S, BLOCK) + 1), key=cost),
        groups=groups,
        tiles=tiles,
        ways=ways,
        stages=stages // ways * ways,  # a slot always belongs to the same warpgroup
        tree_steps=_ceil_div(N, BLOCK),
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
