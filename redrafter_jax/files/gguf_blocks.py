"""Quantized blocks of GGUF files as codes, scales and minima of groups of numbers.

Blocks are laid out as in ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A
block of Q8_0, Q4_0 or Q4_1 is one group of 32 numbers. A block of Q4_K has eight groups of 32
numbers, and a block of Q6_K has sixteen groups of 16. A scale of Q4_K or Q6_K is the product of two
numbers; here the product is rounded to float16.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from redrafter_jax.errors import InputError
from redrafter_jax.files.quantized import MINIMUM, SCALE
from redrafter_jax.files.stored import Index, StoredWeight

# A function from slices of rows and of blocks to bytes, [rows, blocks, bytes].
ReadBlocks = Callable[[slice, slice], np.ndarray]


class BlockKind(NamedTuple):
    """The layout of a quantized block.

    Attributes:
      numbers: count of numbers in a block.
      group: count of numbers that share a scale.
      dtype: dtype of the codes, "I8" or "I4".
      codes: function from blocks [..., bytes] to codes [..., numbers], one int8 per code.
      scale: function from blocks to the scales of their groups, [..., groups].
      minimum: function from blocks to the minima of their groups; None for formats without minima.
    """

    numbers: int
    group: int
    dtype: str
    codes: Callable[[np.ndarray], np.ndarray]
    scale: Callable[[np.ndarray], np.ndarray]
    minimum: Callable[[np.ndarray], np.ndarray] | None = None


def _half(blocks: np.ndarray, place: int) -> np.ndarray:
    """The float16 number at byte `place` of each block, [..., 1]."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view("<f2")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The low halves of all bytes followed by the high halves, minus 8."""
    halves = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return halves.astype(np.int8) - np.int8(8)


def _by_pairs(packed: np.ndarray) -> np.ndarray:
    """The result of `_nibbles` for each run of 32 bytes, as Q4_K stores them."""
    halves = _nibbles(packed.reshape(*packed.shape[:-1], -1, 32))
    return halves.reshape(*packed.shape[:-1], -1)


def _six_bits(blocks: np.ndarray, minima: bool) -> np.ndarray:
    """Scales or minima of the eight groups of Q4_K's blocks: six bits each, in twelve bytes."""
    low, high, mixed = (blocks[..., at : at + 4] for at in (4, 8, 12))
    if minima:
        return np.concatenate([high & 63, (mixed >> 4) | ((high >> 6) << 4)], axis=-1)
    return np.concatenate([low & 63, (mixed & 15) | ((low >> 6) << 4)], axis=-1)


def _q6_codes(blocks: np.ndarray) -> np.ndarray:
    """Codes of Q6_K: four low bits in 128 bytes and two high bits in 64, in two half blocks."""
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)) + np.int8(8)
    pairs = (
        blocks[..., 128:192].reshape(*shape, 2, 1, 32)
        >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    )
    high = (pairs & 3).astype(np.int8).reshape(*shape, 2, 128)
    return (low + 16 * high - np.int8(32)).reshape(*shape, 256)


def _q6_scales(blocks: np.ndarray) -> np.ndarray:
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _half(blocks, 208).astype(np.float32) * factors


BLOCK_KINDS = {
    "Q8_0": BlockKind(
        32, 32, "I8", lambda blocks: blocks[..., 2:].view(np.int8), partial(_half, place=0)
    ),
    "Q4_0": BlockKind(
        32, 32, "I4", lambda blocks: _nibbles(blocks[..., 2:]), partial(_half, place=0)
    ),
    "Q4_1": BlockKind(
        32,
        32,
        "I4",
        lambda blocks: _nibbles(blocks[..., 4:]),
        partial(_half, place=0),
        partial(_half, place=2),
    ),
    "Q4_K": BlockKind(
        256,
        32,
        "I4",
        lambda blocks: _by_pairs(blocks[..., 16:]),
        lambda blocks: _half(blocks, 0).astype(np.float32) * _six_bits(blocks, minima=False),
        lambda blocks: -_half(blocks, 2).astype(np.float32) * _six_bits(blocks, minima=True),
    ),
    "Q6_K": BlockKind(256, 16, "I8", _q6_codes, _q6_scales),
}


def kept_blocks(stored: StoredWeight, kind: str, read: ReadBlocks) -> dict[str, StoredWeight]:
    """Return the codes, scales and minima of a matrix in blocks, by the names of their weights.

    `weight_with_scales` reads weights of these names.

    Args:
      stored: the matrix.
      kind: the format of the matrix's blocks, one of `BLOCK_KINDS`.
      read: function that reads blocks of the matrix.
    """
    own = BLOCK_KINDS[kind]
    rows, columns = stored.shape
    groups = rows, columns // own.group

    def part(
        ending: str,
        dtype: str,
        shape: tuple[int, ...],
        take: Callable[[np.ndarray], np.ndarray],
        per_block: int,
    ) -> StoredWeight:
        name = stored.name + ending
        unpack = partial(_unpack_groups, name, read, take, per_block)
        return stored._replace(name=name, dtype=dtype, shape=shape, unpack=unpack)

    per_block = own.numbers // own.group
    parts = [
        part("", own.dtype, stored.shape, own.codes, own.numbers),
        part(SCALE, "F16", groups, own.scale, per_block),
    ]
    if own.minimum is not None:
        parts.append(part(MINIMUM, "F16", groups, own.minimum, per_block))
    return {one.name: one for one in parts}


def _unpack_groups(
    name: str,
    read: ReadBlocks,
    take: Callable[[np.ndarray], np.ndarray],
    per_block: int,
    index: Index,
) -> np.ndarray:
    """A part of the codes, scales or minima; `take` extracts them from blocks."""
    rows, columns = index
    start, stop = columns.start or 0, columns.stop
    first = start // per_block
    blocks = read(rows, slice(first, None if stop is None else -(-stop // per_block)))
    taken = take(blocks).reshape(len(blocks), -1)
    taken = taken[:, start - first * per_block : None if stop is None else stop - first * per_block]
    if taken.dtype == np.float32:
        with np.errstate(over="ignore"):
            taken = taken.astype(np.float16)
        if not np.isfinite(taken).all():
            raise InputError(
                f"{name!r} holds a number beyond the range of float16, the dtype of kept scales; "
                "load the file without keeping its blocks quantized."
            )
    return taken
