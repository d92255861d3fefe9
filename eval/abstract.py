"""Models and decode states as shapes alone: what a compiler needs, whatever their size."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from redrafter_jax.config import DrafterConfig, TargetConfig
from redrafter_jax.decoding.prefill import prefill
from redrafter_jax.drafters.recurrent import Drafter, init_drafter
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.parallel.mesh import shardings
from redrafter_jax.parallel.model import Config, Model, Module
from redrafter_jax.requests import prepare
from redrafter_jax.types import DecodeState

Tree = TypeVar("Tree")


def abstract_target(config: TargetConfig, dtype: DTypeLike) -> Target:
    """A target whose parameters are `jax.ShapeDtypeStruct`s."""
    return _cast(jax.eval_shape(lambda: init_target(config, 0)), dtype)


def abstract_drafter(config: DrafterConfig, dtype: DTypeLike) -> Drafter:
    """A drafter whose parameters are `jax.ShapeDtypeStruct`s."""
    return _cast(jax.eval_shape(lambda: init_drafter(config, 0)), dtype)


def abstract_state(
    target: Target,
    batch_size: int,
    slots: int,
    max_path: int,
    context_layers: tuple[int, ...] = (),
) -> DecodeState:
    """The state that `prefill` hands to `decode`, as shapes.

    Args:
      target: from `abstract_target`.
      batch_size: B.
      slots: S, cache slots per row.
      max_path: P of the decode steps.
      context_layers: of the drafter.
    """
    requests, _ = prepare(target.config, [[0]] * batch_size, 1, None, None, (), max_path)
    tokens = jax.ShapeDtypeStruct((batch_size, slots), requests.tokens.dtype)
    requests = requests._replace(tokens=cast(Any, tokens))
    fill = partial(prefill, max_path=max_path, context_layers=context_layers)
    return jax.eval_shape(fill, target, requests)


def on_mesh(tree: Tree, mesh: Mesh) -> Tree:
    """The same shapes, split over a mesh as decoding splits them."""

    def split(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed: Any = jax.tree.map(split, tree, shardings(tree, mesh))
    if isinstance(placed, Model):
        placed = replace(placed, mesh=mesh)
    return placed


def bytes_of(tree: object) -> int:
    """Bytes of all arrays of a pytree, abstract ones too; on a mesh, those of one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _cast(model: Model[Config, Module], dtype: DTypeLike) -> Model[Config, Module]:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model)
