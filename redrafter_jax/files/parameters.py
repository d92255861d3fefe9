"""Matches a model's parameters with the weights in files, and loads them."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from redrafter_jax.config import Dtype
from redrafter_jax.errors import InputError
from redrafter_jax.files.quantized import (
    CODES,
    MINIMUM,
    SCALE,
    weight_with_scales,
)
from redrafter_jax.files.stored import StoredWeight, dtype_of, is_zero, read_weight
from redrafter_jax.models.linear import Joint, QuantizedWeight, join, joint_of, parts_of
from redrafter_jax.parallel.mesh import check_groups, parameter_spec
from redrafter_jax.parallel.model import Model, Source


class Layout(NamedTuple):
    """How the parameters of a kind of model are stored in files.

    Attributes:
      module: function from a configuration to a module that holds only parameters.
      stored_name: function from a configuration and a parameter's dotted name to the weight's name.
      layers: mapping from fields of the configuration to their names in files. The product of these
        fields is the number of layers, which cannot exceed the number of weights in files.
    """

    module: Callable[..., nnx.Module]
    stored_name: Callable[[Any, str], str]
    layers: Mapping[str, str]


class Parameter(NamedTuple):
    """A parameter of a module, or one part of a joint parameter, with the name of its weight.

    A joint parameter is several weights of the files in one, such as query, key and value.

    Attributes:
      path: path of the parameter; for a part of a joint parameter, the path that the part would
        have as a parameter of its own.
      name: name of the weight in files.
      shape: shape of the weight in files.
      transposed: whether the weight is stored transposed.
      whole: path of the parameter in the module; for a part, the path of the joint parameter.
      variable: the variable at the path `whole`.
    """

    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]
    transposed: bool
    whole: tuple[Any, ...]
    variable: nnx.Variable[Any]


class MatchedModel(NamedTuple):
    """A model whose files are complete: every parameter has a weight of the right shape.

    Attributes:
      folder: the model's folder or GGUF file.
      described_by: the file with the configuration: `config.json`, or the first GGUF file.
      config: the configuration.
      graphdef: the structure of the Flax module.
      parameters: the parameters of the module.
      weights: one stored weight for each parameter.
      left_out: names of weights in the files that are not read, such as a second embedding.
      tables: arrays in the files that are not weights, from which the configuration was read.
    """

    folder: Path
    described_by: Path
    config: Any
    graphdef: Any
    parameters: tuple[Parameter, ...]
    weights: tuple[StoredWeight, ...]
    left_out: tuple[str, ...]
    tables: tuple[StoredWeight, ...] = ()

    def digest(self) -> str:
        """A digest of the contents of the model's weight files and its configuration file.

        All files are read once; on a terminal a progress bar is shown.
        """
        weights = {part.path for weight in self.weights for part in (weight, *weight.groups)}
        digest = hashlib.sha256()
        # The first part of a split GGUF model may hold no weight.
        paths = [*sorted(weights), *({self.described_by} - weights)]
        for path in tqdm(paths, desc=self.folder.name, leave=False, disable=None):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def load(self, dtype: DTypeLike, mesh: Mesh | None = None) -> Any:
        """The model with its parameters on the devices, loaded one weight at a time.

        Raises:
          InputError: the dtype is not supported, or the mesh does not divide the groups of scales.
        """
        if str(dtype) not in get_args(Dtype) and dtype not in (jnp.float32, jnp.bfloat16):
            supported = " or ".join(map(repr, get_args(Dtype)))
            raise InputError(f"dtype {dtype!r} is not supported; use {supported}.")
        total = sum(weight.bytes for weight in self.weights)
        name, flat = self.folder.name, []
        parts: list[Any] = []
        # disable=None: show the bar on terminals only.
        with tqdm(
            total=total, desc=name, unit="B", unit_scale=True, leave=False, disable=None
        ) as bar:
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parts.append(_read(parameter, weight, dtype, mesh))
                bar.update(weight.bytes)
                joint = joint_of(parameter.variable)
                if joint is None or len(parts) == len(joint.names):
                    value = parts[0] if joint is None else _join(parameter, joint, parts, mesh)
                    flat.append((parameter.whole, parameter.variable.replace(value)))
                    parts = []
        params = nnx.from_flat_state(flat)
        return Model(self.config, self.graphdef, params, mesh, Source(self.folder))


def match_weights(
    folder: Path,
    described_by: Path,
    config: Any,
    stored: Mapping[str, StoredWeight],
    layout: Layout,
    ignored: Sequence[str] = (),
) -> MatchedModel:
    """Match the parameters of a model with the weights in its files.

    Args:
      folder: the model's folder or GGUF file.
      described_by: the file with the configuration.
      config: the configuration.
      stored: the weights in the files, by name.
      layout: the layout that maps parameters to stored weights.
      ignored: regular expressions for names of weights in the files that may have no parameter.

    Raises:
      InputError: a weight is missing, has the wrong shape, or does not belong to the model.
    """
    counts = {name: getattr(config, field) for field, name in layout.layers.items()}
    # Check the number of layers before building them.
    if prod(max(count, 1) for count in counts.values()) > len(stored):
        stated = " and ".join(f"{name}={count}" for name, count in counts.items())
        raise InputError(
            f"{described_by} states {stated}, but the files hold only {len(stored)} weights; use "
            "files of the same model."
        )
    graphdef, parameters = stored_parameters(config, layout)
    weights = []
    for parameter in parameters:
        if parameter.name not in stored:
            raise InputError(
                f"{folder} holds no weight {parameter.name!r}; the model is incomplete."
            )
        weights.append(weight_with_scales(stored, parameter.name, parameter.shape))
    names = {parameter.name for parameter in parameters}
    scales = {name + ending for name in names for ending in (SCALE, MINIMUM)}
    left_out = sorted(stored.keys() - names - scales)
    others = [
        name
        for name in left_out
        if not any(re.fullmatch(pattern, name) for pattern in ignored)
        and not _is_zero_bias(stored, name)
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InputError(
            f"{folder} holds the weight {others[0]!r}{more}, which the model described by "
            f"{described_by.name} does not have; use files of the same model."
        )
    return MatchedModel(
        folder, described_by, config, graphdef, tuple(parameters), tuple(weights), tuple(left_out)
    )


def _is_zero_bias(stored: Mapping[str, StoredWeight], name: str) -> bool:
    """Whether a weight is the zero bias of a quantized layer, which early folders of GPTQ hold."""
    layer = name.removesuffix("bias")
    return layer != name and f"{layer}weight{SCALE}" in stored and is_zero(stored[name])


def stored_parameters(config: Any, layout: Layout) -> tuple[Any, list[Parameter]]:
    """The structure of the module, and its parameters with the names and shapes of their weights.

    No arrays are created.
    """
    skeleton = nnx.eval_shape(lambda: layout.module(config, rngs=nnx.Rngs(0)))
    graphdef, abstract = nnx.split(skeleton)
    parameters = []
    for whole, variable in nnx.to_flat_state(abstract):
        for path, leaf in parts_of(whole, variable):
            name = layout.stored_name(config, dotted(path))
            turned = is_matrix(dotted(path), leaf)
            shape = leaf.shape[::-1] if turned else leaf.shape
            parameters.append(Parameter(path, name, shape, turned, whole, variable))
    return graphdef, parameters


def _join(parameter: Parameter, joint: Joint, parts: Sequence[Any], mesh: Mesh | None) -> Any:
    """The parts joined into one parameter; on a mesh each device joins its own shards."""
    shardings = None
    if mesh is not None:
        name, whole = dotted(parameter.whole), jax.eval_shape(partial(join, joint), parts)
        specs = (parameter_spec(name, leaf.shape, mesh) for leaf in jax.tree.leaves(whole))
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.block_until_ready(_joined(parts, joint, shardings))


# All layers run the same compiled program.
@partial(jax.jit, static_argnames=("joint", "shardings"))
def _joined(parts: Sequence[Any], joint: Joint, shardings: tuple[NamedSharding, ...] | None) -> Any:
    leaves, structure = jax.tree.flatten(join(joint, parts))
    if shardings is not None:
        leaves = map(jax.lax.with_sharding_constraint, leaves, shardings)
    return jax.tree.unflatten(structure, leaves)


def _read(parameter: Parameter, weight: StoredWeight, dtype: DTypeLike, mesh: Mesh | None) -> Any:
    """Read a weight: numbers are cast; codes, scales and minima keep their bits."""
    name, order = dotted(parameter.path), slice(None, None, -1 if parameter.transposed else 1)

    def read(part: StoredWeight, dtype: DTypeLike) -> jax.Array:
        sharding = None
        if mesh is not None:
            sharding = NamedSharding(mesh, parameter_spec(name, part.shape[order], mesh))
        return read_weight(part, dtype, transpose=parameter.transposed, sharding=sharding)

    if weight.scale is None:
        return read(weight, dtype)
    if mesh is not None:
        check_groups(name, weight.shape[order], weight.scale.shape[order], mesh)
    codes = read(weight, CODES[weight.dtype])
    return QuantizedWeight(codes, *(read(part, dtype_of(part)) for part in weight.groups))


def is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter is a matrix that is [in, out] here and [out, in] in files.

    An embedding is [V, D] in both, so the result is False for it.
    """
    return leaf.ndim == 2 and "embed_tokens" not in name


def dotted(path: tuple[Any, ...]) -> str:
    """The path of a parameter as a dotted name."""
    return ".".join(str(part) for part in path)
