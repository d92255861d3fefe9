"""Meshes of devices: which axes of which arrays are split, and placement on devices.

A mesh has two axes. `data` splits the rows of a batch. `model` splits attention heads, the
feed-forward width and the vocabulary (tensor parallelism as in arXiv 1909.08053, section 3). Each
program runs on shards, in one `jax.shard_map`. All communication between shards is in
`collectives`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.collectives import MODEL, in_shard
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Halfway, KVCache

DATA = "data"

# The mesh axis that splits each kind of array axis; kinds not listed here are replicated.
RULES: Mapping[str, str] = {"rows": DATA, "split": MODEL}
# In training, the drafter's parameters may be split over `data` as well.
FULLY_SHARDED: Mapping[str, str] = {**RULES, "width": DATA}

# Kinds of the axes of parameters, by the first pattern that matches the name; other parameters are
# replicated. "split" axes are heads, the feed-forward width, the vocabulary or a drafter's
# features.
_PARAMETERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(embed_tokens|o_proj|down_proj)$", ("split", "width")),
    (r"([qkv]+_proj|(gate|up)_proj|lm_head|\.kernel)$", ("width", "split")),
    (r"([qkv]+_bias|\.bias)$", ("split",)),
)
_CACHE = ("rows", "split")
_HEADS = ("rows", None, "split")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Tree = TypeVar("Tree")


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Create a mesh of `data * model` devices, for `load_target` and `load_drafter`.

    Groups of `model` adjacent devices share a shard of the batch.

    Args:
      data: number of shards of the batch.
      model: number of shards of the heads, the feed-forward width and the vocabulary.
      devices: devices from which the first `data * model` are used, in this order; None for
        `jax.devices()`.

    Raises:
      InputError: a size is not an integer or is below 1, or there are too few devices.
    """
    for name, size in (("data", data), ("model", model)):
        if not isinstance(size, int) or size < 1:
            raise InputError(f"mesh.{name} is {size!r}; it must be a whole number, 1 or more.")
    chosen = list(jax.devices() if devices is None else devices)
    needed = data * model
    if needed > len(chosen):
        raise InputError(
            f"A mesh of data={data} and model={model} needs {needed} devices, but there are "
            f"{len(chosen)}; give a smaller data or model."
        )
    axis_types = (AxisType.Auto, AxisType.Auto)
    grid = np.asarray(chosen[:needed], object).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=axis_types)


def check_mesh(mesh: Mesh) -> None:
    """Raise `InputError` unless the axes of the mesh are `data` and `model`, both of type Auto."""
    kinds = {kind.name for kind in mesh.axis_types}
    if mesh.axis_names != (DATA, MODEL) or kinds != {"Auto"}:
        raise InputError(
            f"The mesh has the axes {', '.join(map(str, mesh.axis_names))} of type "
            f"{', '.join(sorted(kinds))}; make it with redrafter_jax.make_mesh, whose axes are "
            f"{DATA} and {MODEL} of type Auto."
        )


def check_target(config: TargetConfig, mesh: Mesh, name: str = "target") -> None:
    """Raise `InputError` if a mesh splits the heads or the feed-forward width unevenly.

    `name` is the name of the model in the error. A vocabulary that the mesh does not divide stays
    whole on every device.
    """
    parts = mesh.shape[MODEL]
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, field)
        if size % parts:
            raise InputError(
                f"The mesh has model={parts}, which does not divide the {name}'s {field} of "
                f"{size}; give model={math.gcd(parts, size)}."
            )


def check_rows(rows: int, mesh: Mesh | None, name: str = "The number of prompts") -> None:
    """Raise `InputError` if the mesh's `data` does not divide the number of rows.

    `name` is what the error calls the number.
    """
    parts = data_shards(mesh)
    if rows % parts:
        raise InputError(
            f"{name} is {rows}, which the mesh's data={parts} does not divide; give a multiple of "
            f"{parts}, or a smaller data."
        )


def partition(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh,
    rules: Mapping[str, str] = RULES,
) -> PartitionSpec:
    """Return the `PartitionSpec` of an array from the kinds of its leading axes.

    An axis is not split if its kind is None, or if the mesh does not divide its length.

    Args:
      shape: shape of the array.
      axes: kind of each leading axis: "rows", "split", "width" or None.
      mesh: the mesh.
      rules: mapping from kinds to mesh axes; other kinds are not split.
    """
    mesh_axes = [rules.get(kind or "") for kind in axes]
    return PartitionSpec(
        *(
            axis if axis and length % mesh.shape[axis] == 0 else None
            for length, axis in zip(shape, mesh_axes, strict=False)
        )
    )


def parameter_spec(
    name: str, shape: Sequence[int], mesh: Mesh, rules: Mapping[str, str] = RULES
) -> PartitionSpec:
    """Return the `PartitionSpec` of a parameter from its dotted name and its shape."""
    for pattern, axes in _PARAMETERS:
        if re.search(pattern, name):
            return partition(shape, axes, mesh, rules)
    return PartitionSpec()


def check_groups(name: str, codes: Sequence[int], scale: Sequence[int], mesh: Mesh) -> None:
    """Raise `InputError` if the mesh splits a quantization group of a parameter.

    Args:
      name: dotted name of the parameter.
      codes: shape of the codes, as in `QuantizedWeight`.
      scale: shape of the scales, as in `QuantizedWeight`.
      mesh: the mesh.
    """
    parts = parameter_spec(name, codes, mesh), parameter_spec(name, scale, mesh)
    for axis, groups in enumerate(scale):
        (of_codes, of_scale) = ((*spec, None, None)[axis] for spec in parts)
        if groups > 1 and of_codes != of_scale:
            size = mesh.shape[of_codes]
            raise InputError(
                f"The mesh has {of_codes}={size}, which does not divide the {groups} groups of "
                f"the quantized weight {name!r}; give {of_codes}={math.gcd(size, groups)}."
            )


def specs(tree: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """Return the `PartitionSpec`s of a pytree.

    The name of a parameter determines how the parameter is split. Caches are split by pages and by
    heads, and other arrays by rows. Scalars are replicated.
    """

    def spec(value: Any) -> Any:
        if isinstance(value, nnx.State):
            return _by_name(value, mesh, rules)
        if isinstance(value, KVCache):
            rows: Any = [partition(one.shape, ("rows",), mesh, rules) for one in value[2:]]
            layers: Any = tuple(partition(one.shape, _CACHE, mesh, rules) for one in value.keys)
            return KVCache(layers, layers, *rows)
        if isinstance(value, Halfway):
            hidden: Any = spec(value.hidden)
            context: Any = tuple(map(spec, value.context))
            heads: Any = tuple(partition(one.shape, _HEADS, mesh, rules) for one in value.keys)
            return Halfway(hidden, context, heads, heads)
        return partition(np.shape(value), ("rows",), mesh, rules)

    whole = nnx.State | KVCache | Halfway
    return jax.tree.map(spec, tree, is_leaf=lambda x: isinstance(x, whole))


def _by_name(params: nnx.State, mesh: Mesh, rules: Mapping[str, str]) -> nnx.State:
    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        name = ".".join(str(getattr(key, "key", key)) for key in path if hasattr(key, "key"))
        return parameter_spec(name, leaf.shape, mesh, rules)

    for path, variable in nnx.to_flat_state(params):
        value = variable.get_value()
        # A quantized weight starts with codes and scales; separate weights have several `parts`.
        for part in getattr(value, "parts", (value,)):
            if isinstance(part, tuple):
                codes, scale, *_ = part
                check_groups(".".join(map(str, path)), codes.shape, scale.shape, mesh)
    return jax.tree.map_with_path(spec, params)


def place(tree: Tree, mesh: Mesh | None, rules: Mapping[str, str] = RULES) -> Tree:
    """Put arrays on the devices of the mesh, split by `specs`; without a mesh, change nothing."""
    if mesh is None:
        return tree
    if isinstance(tree, Model) and isinstance(tree.config, TargetConfig):
        check_target(tree.config, mesh)
    parts = shardings(tree, mesh, rules)
    placed: Any = jax.tree.map(_put, tree, parts)
    if isinstance(placed, Model):
        placed = replace(placed, mesh=mesh)
    return placed


def shardings(tree: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """Return the `NamedSharding`s of a pytree, from `specs`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, mesh, rules))


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(array)
    # Every process has the same array, but `device_put` would compare it between the processes.
    known = np.asarray(array)
    return jax.make_array_from_callback(known.shape, sharding, known.__getitem__)


def constrain(tree: Tree, mesh: Mesh | None, rules: Mapping[str, str] = RULES) -> Tree:
    """Constrain the sharding of values in a traced program; empty `rules` replicate the values."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, rules))


def constrain_rows(tree: Tree, mesh: Mesh | None) -> Tree:
    """Constrain the leading axis of each array to be split over `data`.

    XLA chooses the sharding of all other axes.
    """
    if mesh is None:
        return tree
    free = PartitionSpec.UNCONSTRAINED

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(DATA, *(free,) * (leaf.ndim - 1)))

    return jax.lax.with_sharding_constraint(tree, jax.tree.map(sharding, tree))


def data_shards(mesh: Mesh | None) -> int:
    """Return the number of shards into which the mesh splits a batch."""
    return 1 if mesh is None else mesh.shape[DATA]


def check_same_mesh(target: Model[Any, Any], *drafters: Model[Any, Any]) -> None:
    """Raise `InputError` if a model of the drafter is on another mesh than the target."""
    if any(drafter.mesh != target.mesh for drafter in drafters):
        raise InputError(
            "Target and drafter are on different meshes; load both with the same mesh argument."
        )


def per_shard(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function of a model and arrays, so that each device runs it on its own shards.

    The first argument is the model, whose mesh is used. Arguments and results are split by `specs`.
    Keyword arguments are static. Without a mesh, or inside another such call, the function is
    called directly.
    """

    @wraps(function)
    def call(*arguments: Parameters.args, **static: Parameters.kwargs) -> Result:
        model: Any = arguments[0]
        if model.mesh is None or in_shard():
            return function(*arguments, **static)
        run = partial(function, **static)
        # Replication is not checked: shards compute equal values by construction.
        split = jax.shard_map(
            run,
            mesh=model.mesh,
            in_specs=tuple(specs(argument, model.mesh) for argument in arguments),
            out_specs=specs(jax.eval_shape(run, *arguments), model.mesh),
            check_vma=False,
        )
        return split(*arguments)

    return call


def to_host(tree: Any) -> Any:
    """Return the arrays of a pytree as NumPy arrays; all processes must make this call together."""

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        if leaf.is_fully_replicated:  # every process has the whole array
            return leaf.addressable_data(0)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(fetch, tree))
