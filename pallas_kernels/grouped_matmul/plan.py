"""How a product is cut into programs; arithmetic on shapes alone."""

from typing import Any, NamedTuple

TILE = 64  # outputs of one warpgroup, the rows of its wgmma
WARPGROUPS = 2  # that compute, each a tile of outputs; one more copies
WIDTH = WARPGROUPS * TILE  # outputs of one program
BLOCK = 128  # inputs of one step
MAX_ROWS = 64  # of one program
GROUPS = (16, 32, 64, 128)  # inputs that may share a scale
MAX_STAGES = 8
MAX_SPLITS = 8  # each writes its own part of the output, of many rows in a prompt
SHARED_MEMORY = 220 * 1024  # of the 227 KiB of a program; the rest is for barriers and scratch
STARTUP = 4  # steps that one core takes while a program starts and its first block arrives
PARTIAL = 4  # steps in which a partial output is written and read again
COPIER_REGISTERS, REGISTERS = 40, 232  # of each thread, of the 65536 of a core


class Plan(NamedTuple):
    """How a product is cut; all fields are static."""

    splits: int  # programs along the inputs
    columns: int  # programs along the outputs
    tiles: int  # programs along the rows
    rows: int  # of one program
    stages: int  # steps in the ring
    steps: int  # of one split, the last may have fewer

    @property
    def padded_rows(self) -> int:
        """How many rows all programs compute, padding included."""
        return self.tiles * self.rows


def why_unsupported(x: Any, codes: Any, scale: Any, _: Any) -> str | None:
    """Why the kernel cannot take these shapes and dtypes, as half a sentence; None if it can."""
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
    if inputs % 8:  # copies have whole multiples of 16 bytes
        return f"it needs a multiple of 8 inputs, but there are {inputs}"
    multiple = 32 if str(codes.dtype) == "int4" else 16
    if outputs % multiple:
        return f"it needs a multiple of {multiple} outputs in {codes.dtype}, but has {outputs}"
    return None


def make_plan(
    N: int, inputs: int, outputs: int, bits: int, group: int, minimum: bool, cores: int
) -> Plan:
    """Splits that keep every core busy, whatever the N rows; then rows in as few programs as fit.

    Codes have so many bits, and a group of inputs shares a scale and maybe a minimum.
    """
    columns, blocks = _ceil_div(outputs, WIDTH), _ceil_div(inputs, BLOCK)

    def cost(splits: int) -> int:
        """In steps of one core, over the longest chain of programs on it; a model.

        It knows nothing of the rows: they must not change the order in which inputs are summed.
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
