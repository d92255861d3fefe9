"""A target's vocabulary projection, and the parts of it that drafters borrow."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.models.linear import QuantizedWeight, Weight, by_rows, linear, transposed
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.model import Model


class Projection(nnx.Module):
    """A linear map from hidden states to the scores of U tokens: the whole vocabulary, or a list.

    Attributes:
      weight: the weight, [D, U], or [U, D] if `embedding` is True.
      embedding: whether the weight has the layout of an embedding table.
    """

    def __init__(self, weight: Weight, *, embedding: bool) -> None:
        self.weight = nnx.Param(weight)
        self.embedding = embedding

    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, "... U"]:
        """Return float32 scores; on a mesh, the scores of this device's shard of U."""
        weight = self.weight.get_value()
        if not self.embedding:
            return linear(hidden, weight, jnp.float32)
        if isinstance(weight, QuantizedWeight):
            return linear(hidden, transposed(weight), jnp.float32)
        return by_rows(partial(_times_embedding, weight), hidden)

    def of_tokens(self, tokens: Int[Array, " U"]) -> "Projection":
        """Return the projection to `tokens` alone, in their order; their weights are gathered."""
        axis = 0 if self.embedding else 1
        gather = partial(jnp.take, indices=tokens, axis=axis)
        weight: Weight = jax.tree.map(gather, self.weight.get_value())
        if self.embedding and isinstance(weight, QuantizedWeight):
            return Projection(transposed(weight), embedding=False)
        return Projection(weight, embedding=self.embedding)


def _times_embedding(
    embedding: Float[Array, "U D"], hidden: Float[Array, "... D"]
) -> Float[Array, "... U"]:
    # The product is computed as embedding times columns, and the barriers preserve this order: XLA
    # for CPUs would otherwise transpose the whole embedding in every step.
    columns = jax.lax.optimization_barrier(jnp.moveaxis(hidden, -1, 0))
    scores = jnp.tensordot(embedding, columns, 1, preferred_element_type=jnp.float32)
    return jnp.moveaxis(jax.lax.optimization_barrier(scores), 0, -1)


# Parts of a vocabulary projection that have been gathered, by their token ids.
_Parts = dict[tuple[int, ...], Model[None, Projection]]


class Lender:
    """Gathers parts of a target's vocabulary projection for drafters, each part only once.

    A part is the projection to the tokens that a drafter can draft.

    Args:
      target: the target model.
      parts: parts gathered so far, by token ids; the lender adds new parts to this mapping.
    """

    def __init__(self, target: Model[TargetConfig, Any], parts: _Parts | None = None) -> None:
        self._target = target
        self._parts: _Parts = {} if parts is None else parts

    def projection(self, tokens: tuple[int, ...]) -> Model[None, Projection] | None:
        """Return the projection to these token ids; None on a mesh that splits the vocabulary."""
        target = self._target
        mesh = target.mesh
        parts = 1 if mesh is None else mesh.shape[MODEL]
        if parts > 1 and target.config.vocab_size % parts == 0:
            return None
        if tokens not in self._parts:
            part = _gather(target, jnp.asarray(tokens, jnp.int32))
            self._parts[tokens] = replace(part, mesh=mesh)
        return self._parts[tokens]


# Parts gathered from every live target, so that a process that calls `generate` many times gathers
# each part once.
_lent: dict[int, _Parts] = {}


def lender_of(target: Model[TargetConfig, Any]) -> Lender:
    """Return the `Lender` of a target; its parts are kept while the target object is alive."""
    key = id(target)
    if key not in _lent:
        _lent[key] = {}
        weakref.finalize(target, _lent.pop, key)
    return Lender(target, _lent[key])


@jax.jit
def _gather(target: Model[TargetConfig, Any], tokens: Int[Array, " U"]) -> Model[None, Projection]:
    return Model.split(None, target.merge().projection.of_tokens(tokens))
