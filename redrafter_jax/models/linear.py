"""Linear maps with plain or quantized weights, and several maps joined in one weight.

Maps of the same inputs are joined, so a GPU runs one matrix product instead of several. The
metadata of a joined parameter holds the names and widths of the maps (`joined_param`). In files the
maps are separate.
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
from redrafter_jax.parallel.collectives import all_reduce, has_others, shard_start

# Number of parts of `product_in_parts`, and the most rows for which writing them costs little.
_PARTS, _MOST_ROWS = 8, 64
# Group sizes of int4; the first one that divides the inputs is used.
GROUP_SIZES = (128, 64, 32)


class QuantizedWeight(NamedTuple):
    """A weight with 8 or 4 bits per number.

    A matrix is [in, out] and is quantized in groups along the inputs. An embedding table is [V, D]
    and is quantized in groups along D. Each group of each output has one scale. Some formats have a
    single group, the whole axis. `scale` and `minimum` have the axes of the weight, with one entry
    per group along the grouped axis.

    Attributes:
      codes: int8, int4 or float8_e4m3fn codes. A code stands for `scale * code`, or with a minimum
        for `minimum + scale * (code - lowest)`, where `lowest` is the least value of the integer
        dtype.
      scale: scale of every group.
      minimum: number that the lowest code of each group stands for; None if code 0 stands for 0.
    """

    codes: Num[Array, "..."]
    scale: Float[Array, "..."]
    minimum: Float[Array, "..."] | None = None


Weight: TypeAlias = Float[Array, "..."] | QuantizedWeight


def linear(
    x: Float[Array, "... I"], weight: Weight, dtype: DTypeLike | None = None
) -> Float[Array, "... O"]:
    """Compute `x @ weight`.

    The codes of a quantized weight are cast to the dtype of x, which represents them exactly. The
    float32 sums are scaled afterwards, so no dequantized weight is stored. On Hopper GPUs a kernel
    computes the product for weights with several groups; see `grouped_matmul`.

    Args:
      x: inputs, float32 or bfloat16.
      weight: plain or quantized weight [in, out].
      dtype: dtype of the result; None takes the dtype of x.
    """
    if not isinstance(weight, QuantizedWeight):
        return by_rows(lambda rows: jnp.matmul(rows, weight, preferred_element_type=dtype), x)
    from pallas_kernels.grouped_matmul import grouped_matmul  # only for quantized weights

    product = grouped_matmul(x.reshape(-1, x.shape[-1]), *weight)
    return product.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def by_rows(
    product: Callable[[Float[Array, "... I"]], Float[Array, "... O"]], x: Float[Array, "... I"]
) -> Float[Array, "... O"]:
    """Apply a product to x; x is padded to the number of rows that the device computes at once."""
    rows = x.reshape(-1, x.shape[-1])
    missing = fewest_rows() - len(rows)
    if missing <= 0:
        return product(x)
    of_all = product(jnp.pad(rows, ((0, missing), (0, 0))))
    return of_all[: len(rows)].reshape(*x.shape[:-1], -1)


def product_in_parts(
    x: Float[Array, "B T I"], weight: Weight
) -> Float[Array, "parts B T O"] | None:
    """Compute `x @ weight` as float32 parts, whose sum is the product, for `add_norm` on a GPU.

    For products of few rows, XLA for GPUs computes such parts itself, and launches one more kernel
    to add them. `add_norm` adds the parts in the kernel of the next norm. Returns None where this
    would not save a kernel launch.
    """
    (B, T, inputs), fewest = x.shape, fewest_rows()
    few = 1 < fewest <= B * T <= _MOST_ROWS
    if not few or isinstance(weight, QuantizedWeight) or x.dtype == jnp.float32 or has_others():
        return None
    if inputs % (16 * _PARTS):
        return None
    from pallas_kernels.add_norm import has_kernel  # only needed while tracing a step on a GPU

    if not has_kernel(weight.shape[1]):
        return None
    split = x.reshape(B, T, _PARTS, -1), weight.reshape(_PARTS, -1, weight.shape[1])
    return jnp.einsum("BTPI,PIO->PBTO", *split, preferred_element_type=jnp.float32)


def add_norm(
    x: Float[Array, "rows D"],
    parts: Float[Array, "splits rows D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Add the parts of a product to x; return the sum, and the sum after a root-mean-square norm.

    See `pallas_kernels.add_norm.add_norm`.
    """
    from pallas_kernels.add_norm import add_norm as add  # only needed while tracing a step

    return add(x, parts, weight, epsilon=epsilon, zero_centered=zero_centered)


def read_rows(
    table: Weight, rows: Int[Array, "..."], size: int, dtype: DTypeLike
) -> Float[Array, "... D"]:
    """Read rows of an embedding table; on a mesh, this device may hold only a shard of the table.

    Args:
      table: the whole table, or this device's shard.
      rows: row numbers in the whole table.
      size: number of rows of the whole table.
      dtype: dtype in which rows of a quantized table are returned.
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
    """Return the number of rows of the table that this device holds."""
    return len(table.codes if isinstance(table, QuantizedWeight) else table)


def transposed(table: QuantizedWeight) -> QuantizedWeight:
    """Convert a quantized table [V, D] to a matrix [in, out], or a matrix to a table."""
    return jax.tree.map(lambda leaf: leaf.T, table)


def quantize(weight: Float[Array, "..."], form: WeightFormat, axis: int = 0) -> QuantizedWeight:
    """Quantize a weight group by group: round each number to the nearest number of a format.

    int8 and fp8 (float8_e4m3fn) have a float32 scale per output and no minimum. int4 has a bfloat16
    scale and a bfloat16 minimum per group of 128 inputs, or of 64 or 32 inputs if no larger size
    divides the number of inputs. Scale and minimum are rounded before the codes are chosen.

    Args:
      weight: a finite matrix [in, out] or table [V, D].
      form: "int8", "int4" or "fp8"; for int4 a group size must divide the number of inputs.
      axis: axis of the inputs: 0 for a matrix and 1 for a table.
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
    """Return the number of inputs in a group of int4; None if no group size divides the inputs."""
    return next((size for size in GROUP_SIZES if inputs % size == 0), None)


def dequantize(weight: Weight, dtype: DTypeLike) -> Float[Array, "..."]:
    """Return a weight as a plain array; a plain weight is returned unchanged."""
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
    """Return the scale as a divisor; a scale of 0, of a group of equal numbers, becomes 1."""
    return jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]


class Joint(NamedTuple):
    """The layout of a weight that joins several linear maps of the same inputs.

    The outputs of the joined weight are divided into equal groups. Each group has the same number
    of outputs of every map, so a mesh that splits the weight between groups splits every map in the
    same way.

    Attributes:
      names: parameter names of the maps in files.
      groups: number of groups.
      widths: number of outputs of each map per group.
    """

    names: tuple[str, ...]
    groups: int
    widths: tuple[int, ...]


class SeparateWeights(NamedTuple):
    """Several weights that cannot be joined because they are quantized in different ways."""

    parts: tuple[Weight, ...]


def joined_param(
    joint: Joint, inputs: Sequence[int], init: Callable[[tuple[int, ...]], Array]
) -> nnx.Param:
    """Create a parameter that joins several maps, which are initialised one by one, in order.

    Args:
      joint: layout of the joined maps.
      inputs: shape before the axis of the outputs: one axis for weights, no axis for biases.
      init: function from the shape of a map's weight or bias to the initial values.
    """
    parts = [init((*inputs, joint.groups * width)) for width in joint.widths]
    return nnx.Param(join(joint, parts), joint=joint)


def joint_of(variable: nnx.Variable[Any]) -> Joint | None:
    """Return the layout of a joined parameter; None for a single map."""
    return variable.get_metadata().get("joint")


def join(joint: Joint, parts: Sequence[Weight]) -> Weight | SeparateWeights:
    """Join weights or biases of one format; return `SeparateWeights` if the formats differ."""
    if len({_form(part) for part in parts}) > 1:
        return SeparateWeights(tuple(parts))
    return jax.tree.map(partial(_side_by_side, joint), *parts)


def _form(part: Weight) -> Any:
    """Return the format of a part: its structure, and the dtypes and input shapes of its arrays."""
    leaves, structure = jax.tree.flatten(part)
    return structure, *((str(leaf.dtype), leaf.shape[:-1]) for leaf in leaves)


def _side_by_side(joint: Joint, *parts: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    grouped = [
        part.reshape(*part.shape[:-1], -1, width)
        for part, width in zip(parts, joint.widths, strict=True)
    ]
    return jnp.concatenate(grouped, axis=-1).reshape(*parts[0].shape[:-1], -1)


def take_apart(joint: Joint, whole: Any) -> tuple[Weight, ...]:
    """Split a joined weight or bias into the parts that were given to `join`.

    `whole` may consist of JAX or NumPy arrays.
    """
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
    """Yield the path and the value of a parameter, or of each of its parts if it is joined."""
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
    """Apply joined maps to x, and return the outputs by group.

    On a mesh, the groups are this device's shard. Within a group, the outputs of the maps follow
    one another in the order of `Joint.names`.
    """
    joint, value = joint_of(weight), weight.get_value()
    assert joint is not None, "the parameter is one map alone"
    if isinstance(value, SeparateWeights):
        product = _side_by_side(joint, *(linear(x, part) for part in value.parts))
    else:
        product = linear(x, value)
    product = product if bias is None else product + bias[...]
    return product.reshape(*product.shape[:-1], -1, sum(joint.widths))
