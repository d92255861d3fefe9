"""Linear maps of the same inputs as one: their weights side by side, so that a GPU starts one
product where there were several.

The parameter says in its metadata what it is joined of (`joined_param`); files have the parts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Shaped

from redrafter_jax.models.linear import Weight, linear


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
