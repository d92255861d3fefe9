"""Linear maps: of plain arrays or of codes of 8 or 4 bits with scales, and several maps as one.

Maps of the same inputs have their weights side by side, so that a GPU starts one product where
there were several. The parameter says in its metadata what it is joined of (`joined_param`); files
have the parts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, Shaped

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


class Joint(NamedTuple):
    """How the outputs of several maps lie side by side: in groups, which hold some of every map.

    A mesh that divides the groups so splits all of the maps alike, by splitting the whole.

    Attributes:
      names: what the parameters of the maps are called in files.
      groups: how many there are.
      widths: outputs that each map has in a group.
    """

    names: tuple[str, ...]
    groups: int
    widths: tuple[int, ...]


class SeparateWeights(NamedTuple):
    """Weights that cannot lie side by side, for they are quantized in different ways."""

    parts: tuple[Weight, ...]


def joined_param(
    joint: Joint, inputs: Sequence[int], init: Callable[[tuple[int, ...]], Array]
) -> nnx.Param:
    """A parameter of several maps, each made by itself, in their order.

    Args:
      joint: how they are joined.
      inputs: the axes before the outputs: one of weights, none of biases.
      init: from the shape of a part to its numbers.
    """
    parts = [init((*inputs, joint.groups * width)) for width in joint.widths]
    return nnx.Param(join(joint, parts), joint=joint)


def joint_of(variable: nnx.Variable[Any]) -> Joint | None:
    """How a parameter is joined; None for one map alone."""
    return variable.get_metadata().get("joint")


def join(joint: Joint, parts: Sequence[Weight]) -> Weight | SeparateWeights:
    """The parts as one weight, if they are plain or quantized alike; biases too."""
    if len({_form(part) for part in parts}) > 1:
        return SeparateWeights(tuple(parts))
    return jax.tree.map(partial(_side_by_side, joint), *parts)


def _form(part: Weight) -> Any:
    """What parts must have in common, beside their outputs."""
    leaves, structure = jax.tree.flatten(part)
    return structure, *((str(leaf.dtype), leaf.shape[:-1]) for leaf in leaves)


def _side_by_side(joint: Joint, *parts: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    grouped = [
        part.reshape(*part.shape[:-1], -1, width)
        for part, width in zip(parts, joint.widths, strict=True)
    ]
    return jnp.concatenate(grouped, axis=-1).reshape(*parts[0].shape[:-1], -1)


def take_apart(joint: Joint, whole: Any) -> tuple[Weight, ...]:
    """The parts of a weight or of a bias, as `join` was given them; the host's arrays as well."""
    if isinstance(whole, SeparateWeights):
        return whole.parts
    starts = [sum(joint.widths[:at]) for at in range(1, len(joint.widths))]

    def pieces(leaf: Shaped[Array | np.ndarray, "..."]) -> list[Shaped[Array, "..."]]:
        grouped = leaf.reshape(*leaf.shape[:-1], -1, sum(joint.widths))
        apart = jnp.split(grouped, starts, axis=-1)
        return [piece.reshape(*leaf.shape[:-1], -1) for piece in apart]

    leaves, structure = jax.tree.flatten(whole)
    parts = zip(*map(pieces, leaves), strict=True)
    return tuple(jax.tree.unflatten(structure, part) for part in parts)


def parts_of(
    path: tuple[Any, ...], variable: nnx.Variable[Any]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """A parameter's path and value, or those of the parameters that it is joined of."""
    joint, value = joint_of(variable), variable.get_value()
    if joint is None:
        yield path, value
        return
    apart = partial(take_apart, joint)
    is_shape = isinstance(value, jax.ShapeDtypeStruct)
    values = jax.eval_shape(apart, value) if is_shape else apart(value)
    for name, part in zip(joint.names, values, strict=True):
        yield (*path[:-1], name), part


def joined_linear(
    x: Float[Array, "... I"], weight: nnx.Param, bias: nnx.Param | None = None
) -> Float[Array, "... groups outputs"]:
    """What the maps make of x, in groups as they lie; of these this device may have a part."""
    joint, value = joint_of(weight), weight.get_value()
    assert joint is not None, "the parameter is one map alone"
    if isinstance(value, SeparateWeights):
        product = _side_by_side(joint, *(linear(x, part) for part in value.parts))
    else:
        product = linear(x, value)
    product = product if bias is None else product + bias[...]
    return product.reshape(*product.shape[:-1], -1, sum(joint.widths))
