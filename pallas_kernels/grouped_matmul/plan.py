"""Division of a product into programs, computed from shapes."""

from typing import Any, NamedTuple

TILE = 64  # outputs of one warpgroup, the rows of its wgmma
WARPGROUPS = 2  # computing warpgroups, each with a tile of outputs; one more copies
WIDTH = WARPGROUPS * TILE  # outputs of one program
BLOCK = 128  # inputs of one step
MAX_ROWS = 64  # rows of one program
GROUPS = (16, 32, 64, 128)  # inputs that may share a scale
MAX_STAGES = 8
MAX_SPLITS = 8  # each split writes a partial output, which is large for prompts
SHARED_MEMORY = 220 * 1024  # of a program's 227 KiB; the rest is for barriers and scratch
STARTUP = 4  # cost in steps of starting a program and loading its first block
PARTIAL = 4  # cost in steps of writing and reading a partial output
COPIER_REGISTERS, REGISTERS = 40, 232  # per thread, of a core's 65536


class Plan(NamedTuple):
    """Division of a product into programs; all fields are static."""

    splits: int  # programs along the inputs
    columns: int  # programs along the outputs
    tiles: int  # programs along the rows
    rows: int  # rows of one program
    stages: int  # steps in the ring buffer
    steps: int  # steps of one split; the last split may have fewer

    @property
    def padded_rows(self) -> int:
        """Number of rows that all programs compute, including padding."""
        return self.tiles * self.rows


def why_unsupported(x: Any, codes: Any, scale: Any, _: Any) -> str | None:
    """The reason, as a clause, why the kernel cannot take these shapes and dtypes, or None."""
    inputs, outputs = codes.shape
    if str(x.dtype) != "bfloat16":
        return f"its rows must be bfloat16, but are {x.dtype}"
    if str(codes.dtype) not in ("int4", "int8"):
        return f"its codes must be int4 or int8, but are {codes.dtype}"
    if not len(x):
        return "it needs a row or more"
    group = inputs // len(scale)
    if group not in GROUPS:
        return f"its groups must have 16, 32, 64 or 128 inputs, but have {group}"
    if inputs % 8:  # copies need multiples of 16 bytes
        return f"it needs a multiple of 8 inputs, but there are {inputs}"
    multiple = 32 if str(codes.dtype) == "int4" else 16
    if outputs % multiple:
        return f"it needs a multiple of {multiple} outputs in {codes.dtype}, but has {outputs}"
    return None


def make_plan(
    N: int, inputs: int, outputs: int, bits: int, group: int, minimum: bool, cores: int
) -> Plan:
    """Choose splits of the inputs that keep every core busy, and the fewest programs for N rows.

    The splits do not depend on N.

    Args:
      N: number of rows of x.
      inputs: number of inputs of the weight.
      outputs: number of outputs of the weight.
      bits: size of a code in bits.
      group: number of inputs that share a scale.
      minimum: whether each group also has a minimum.
      cores: number of cores of the GPU.
    """
    columns, blocks = _ceil_div(outputs, WIDTH), _ceil_div(inputs, BLOCK)

    def cost(splits: int) -> int:
        """Return the modelled cost, in steps, of the core with the most programs.

        The number of rows must not change the order of summation, so it is not an argument.
        """
        waves = _ceil_div(columns * splits, cores)
        return waves * (_ceil_div(blocks, splits) + STARTUP + (PARTIAL if splits > 1 else 0))

    splits = min(range(1, min(blocks, MAX_SPLITS) + 1), key=cost)
    tiles = _ceil_div(N, MAX_ROWS)
    rows = 8 * _ceil_div(_ceil_div(N, tiles), 8)
    groups = BLOCK // group
    stage = BLOCK * WIDTH * bits // 8 + rows * BLOCK * 2
    stage += groups * (2 * WIDTH + MAX_ROWS if minimum else WIDTH) * 4
    stages = min(MAX_STAGES, (SHARED_MEMORY - rows * WIDTH * 4) // stage)
    return Plan(splits, columns, tiles, rows, stages, _ceil_div(blocks, splits))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
