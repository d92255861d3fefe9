"""Models and decode states as shapes without arrays, for a compiler or to count bytes."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from redrafter_jax.config import (
    DrafterConfig,
    MedusaConfig,
    Quantization,
    TargetConfig,
    WeightFormat,
)
from redrafter_jax.decoding.prefill import begin_drafting, prefill
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.bind import init_drafter
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.parallel.mesh import shardings
from redrafter_jax.parallel.model import Model
from redrafter_jax.requests import Batch, prepare
from redrafter_jax.types import DecodeState

Tree = TypeVar("Tree")
AnyModel = TypeVar("AnyModel", bound=Model[Any, Any])


def abstract_target(
    config: TargetConfig, dtype: DTypeLike, form: WeightFormat | None = None
) -> Target:
    """A target whose parameters are `jax.ShapeDtypeStruct`s, its matrices quantized if asked."""
    return _quantized(_shapes(jax.eval_shape(lambda: init_target(config, 0)), dtype), form)


def abstract_drafter(
    config: DrafterConfig | MedusaConfig, dtype: DTypeLike, form: WeightFormat | None = None
) -> DraftModel:
    """A drafter whose parameters are `jax.ShapeDtypeStruct`s, its matrices quantized if asked."""
    return _quantized(_shapes(jax.eval_shape(lambda: init_drafter(config, 0)), dtype), form)


def abstract_state(target: Target, drafter: Drafter, batch_size: int, slots: int) -> DecodeState:
    """The state that `start` hands to `decode`, as shapes.

    Args:
      target: from `abstract_target`.
      drafter: from `bind_drafter`.
      batch_size: B.
      slots: S, cache slots per row.
    """
    requests, _ = prepare(target.config, Batch([[0]] * batch_size, 1), drafter.max_path)
    tokens = jax.ShapeDtypeStruct((batch_size, slots), requests.tokens.dtype)
    requests = requests._replace(tokens=cast(Any, tokens))
    fill = partial(prefill, context_layers=drafter.context_layers)
    state = jax.eval_shape(fill, target, requests)
    return jax.eval_shape(partial(begin_drafting, drafter=drafter), state)


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
        return -(-math.prod(shape) * item_bits(leaf) // 8)

    return sum(map(size, jax.tree.leaves(tree)))


def item_bits(leaf: Any) -> int:
    """Of an array's numbers on a device, which packs two of int4 into a byte."""
    return 4 if leaf.dtype == jnp.int4 else 8 * leaf.dtype.itemsize


def _quantized(model: AnyModel, form: WeightFormat | None) -> AnyModel:
    if form is None:
        return model
    return jax.eval_shape(partial(quantize_model, quantization=Quantization.of(form)), model)


def _shapes(model: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model)
