"""Linear maps whose weights are plain arrays, or codes of 8 or 4 bits with scales."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.dispatch import fewest_rows
from redrafter_jax.config import WeightFormat
from redrafter_jax.parallel.collectives import all_reduce, shard_start

# Of int4, the first that divides the inputs.
GROUP_SIZES = (128, 64, 32)


class QuantizedWeight(NamedTuple):
    """A weight of 8 or 4 bits per number.

    A matrix lies [in, out], and its numbers are quantized in groups along the inputs; a table of
    embeddings lies [V, D], in groups along D. Each group has a scale; a single group is all inputs
    of an output channel. Scales and minima have the matrix's axes, with one entry per group along
    the grouped one.

    Attributes:
      codes: int8, int4 or float8_e4m3fn. A number is `scale * code`, or of whole numbers with a
        minimum `minimum + scale * (code - lowest)`, lowest being the least that the dtype can hold.
      scale: of every group.
      minimum: the number that the lowest code stands for; None where 0 stands for 0.
    """

    codes: Num[Array, "..."]
    scale: Float[Array, "..."]
    minimum: Float[Array, "..."] | None = None


Weight: TypeAlias = Float[Array, "..."] | QuantizedWeight


def linear(
    x: Float[Array, "... I"], weight: Weight, dtype: DTypeLike | None = None
) -> Float[Array, "... O"]:
    """`x @ weight`.

    Of a quantized weight, codes are multiplied as they are, in x's dtype, which holds them exactly;
    float32 sums of the products are scaled, so that no dequantized weight is made. On Hopper GPUs a
    kernel does this for weights of several groups; see `grouped_matmul`.

    Args:
      x: float32 or bfloat16.
      weight: [in, out], plain or quantized.
      dtype: of the result; None is x's.
    """
    if not isinstance(weight, QuantizedWeight):
        return by_rows(lambda rows: jnp.matmul(rows, weight, preferred_element_type=dtype), x)
    from pallas_kernels.grouped_matmul import grouped_matmul  # of quantized weights alone

    product = grouped_matmul(x.reshape(-1, x.shape[-1]), *weight)
    return product.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def by_rows(
    product: Callable[[Float[Array, "... I"]], Float[Array, "... O"]], x: Float[Array, "... I"]
) -> Float[Array, "... O"]:
    """A product of x, of whose rows there are at least as many as the device takes at once."""
    rows = x.reshape(-1, x.shape[-1])
    missing = fewest_rows() - len(rows)
    if missing <= 0:
        return product(x)
    of_all = product(jnp.pad(rows, ((0, missing), (0, 0))))
    return of_all[: len(rows)].reshape(*x.shape[:-1], -1)


def read_rows(
    table: Weight, rows: Int[Array, "..."], size: int, dtype: DTypeLike
) -> Float[Array, "... D"]:
    """Rows of a table by their numbers in it; this device may hold a part of the table.

    Args:
      table: the part, or the whole table.
      rows: numbers of rows in the whole table.
      size: number of rows of the whole table.
      dtype: of rows of a quantized table.
    """

    def read(own: Int[Array, "..."]) -> Float[Array, "... D"]:
        return dequantize(jax.tree.map(lambda leaf: leaf[own], table), dtype)

    part = table_length(table)
    if part == size:
        return read(rows)
    local = rows - shard_start(part, size)
    own = (local >= 0) & (local < part)
    return all_reduce(jnp.where(own[..., None], read(jnp.where(own, local, 0)), 0))


def table_length(table: Weight) -> int:
    """How many rows of a table this device holds."""
    return len(table.codes if isinstance(table, QuantizedWeight) else table)


def transposed(table: QuantizedWeight) -> QuantizedWeight:
    """A table as a matrix [in, out], or the other way round."""
    return jax.tree.map(lambda leaf: leaf.T, table)


def quantize(weight: Float[Array, "..."], form: WeightFormat, axis: int = 0) -> QuantizedWeight:
    """The nearest weight of a format, group by group.

    int8, and fp8, which is float8_e4m3fn, have one float32 scale for all inputs of an output, and
    no minimum. int4 has a bfloat16 scale and minimum for each group of 128 inputs, or of 64 or 32
    where those do not divide them; they are rounded before the codes are chosen.

    Args:
      weight: a matrix [in, out] or a table [V, D], finite.
      form: "int8", "int4" or "fp8"; for int4 `group_size` must know the inputs.
      axis: of the inputs, 0 of a matrix and 1 of a table.
    """
    size = weight.shape[axis]
    group = group_size(size) if form == "int4" else size
    assert group is not None
    numbers = jnp.moveaxis(weight.astype(jnp.float32), axis, -1)
    numbers = numbers.reshape(*numbers.shape[:-1], -1, group)
    dtype = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}[form]
    limits = jnp.finfo(dtype) if form == "fp8" else jnp.iinfo(dtype)
    least, most = float(limits.min), float(limits.max)
    if form == "int4":
        lowest, highest = numbers.min(axis=-1), numbers.max(axis=-1)
        scale = ((highest - lowest) / (most - least)).astype(jnp.bfloat16)
        minimum = lowest.astype(jnp.bfloat16)
        codes = (numbers - minimum.astype(jnp.float32)[..., None]) / _divisor(scale) + least
    else:
        scale, minimum = jnp.abs(numbers).max(axis=-1) / most, None
        codes = numbers / _divisor(scale)
    codes = codes if form == "fp8" else jnp.round(codes)
    codes = jnp.clip(codes, least, most).astype(dtype)
    parts = codes.reshape(*codes.shape[:-2], size), scale, minimum
    return QuantizedWeight(*jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, axis), parts))


def group_size(inputs: int) -> int | None:
    """Inputs to a group of int4; None where no size divides them."""
    return next((size for size in GROUP_SIZES if inputs % size == 0), None)


def dequantize(weight: Weight, dtype: DTypeLike) -> Float[Array, "..."]:
    """The numbers that a weight stands for, as a plain array; one that is plain stays as it is."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    codes, scale, minimum = weight

    def spread(groups: Float[Array, "..."]) -> Float[Array, "..."]:
        for axis, (size, count) in enumerate(zip(codes.shape, groups.shape, strict=True)):
            groups = jnp.repeat(groups, size // count, axis) if size > count else groups
        return groups.astype(jnp.float32)

    if minimum is None:
        return (spread(scale) * codes.astype(jnp.float32)).astype(dtype)
    steps = codes.astype(jnp.float32) - jnp.iinfo(codes.dtype).min
    return (spread(minimum) + spread(scale) * steps).astype(dtype)


def _divisor(scale: Float[Array, "..."]) -> Float[Array, "... 1"]:
    """1 for groups of equal numbers, whose scale is 0."""
    return jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]
