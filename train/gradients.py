"""Gradients of a training step.

The losses are differentiated in chunks of positions. For a head with attention, the gradients are
then propagated through whole rows.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.kinds import kind_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import constrain_rows, data_shards, per_shard

from .config import LOSSES, LossSettings
from .loss import (
    TOP,
    Chunk,
    RoundSums,
    TopTokens,
    count_positions,
    join_chunks,
    round_sums,
    split_chunks,
)


class Batches(NamedTuple):
    """The data of one training step: A batches of B rows of T tokens.

    Attributes:
      tokens: token ids.
      loss_mask: True for tokens whose prediction carries loss.
      segments: number of the token's document within its row, from 1; 0 at padding.
      hidden: stored hidden states of the target; None if the step runs the target.
      top: stored most likely next tokens of the target; None if the step computes its logits.
    """

    tokens: Int[Array, "A B T"]
    loss_mask: Bool[Array, "A B T"]
    segments: Int[Array, "A B T"]
    hidden: Float[Array, "A B T Z"] | None
    top: TopTokens | None


# The gradients, the loss, and the means per round from which the loss is computed.
Totals = tuple[nnx.State, Array, RoundSums]


def layers_read(drafter: HeadConfig, target: TargetConfig) -> tuple[tuple[int, ...], bool]:
    """Return the target layers whose outputs a drafter reads, and whether it reads them unchanged.

    Otherwise the target's final norm is applied to the outputs.
    """
    layers, training = drafter.layers_of(target), kind_of(drafter).training
    return layers, bool(layers) and training is not None and training.raw_layers


def run_target(
    target: Target,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    context_layers: tuple[int, ...],
    raw_layers: bool,
) -> Float[Array, "B T Z"]:
    """Compute the target's hidden states; on a mesh every device computes its part of the rows.

    The states of each token are concatenated: the outputs of `context_layers`, then the last hidden
    state. With `raw_layers`, the outputs are unchanged. Otherwise the target's final norm is
    applied to them; see `Decoder.of_one_scale`.
    """

    @per_shard
    def forward(
        target: Target, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]
    ) -> Float[Array, "B T Z"]:
        decoder = target.merge()
        hidden, _, _ = decoder.forward(tokens, segments, context_layers)
        return hidden if raw_layers else decoder.of_one_scale(hidden)

    return forward(target, tokens, segments)


def add_gradients(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    target: Target,
    batches: Batches,
    *,
    rounds: int,
    settings: LossSettings,
) -> Totals:
    """Compute the gradients of the loss of all batches, the loss, and the means per round.

    The loss is a mean over the positions of all batches that carry loss; see `count_positions`. On
    a mesh, each data shard accumulates its own gradients; these are summed once, at the end.
    """
    decoder, head = target.merge(), nnx.merge(graphdef, params)
    shards, mesh = data_shards(target.mesh), target.mesh
    count = partial(count_positions, rounds=rounds)
    counts = jax.vmap(count)(batches.loss_mask, batches.segments).sum(axis=0)
    share = 1.0 / jnp.maximum(counts, 1)
    decay = settings.round_decay ** jnp.arange(rounds)

    def loss(
        params: nnx.State, contexts: Float[Array, "B C Y"], chunk: Chunk
    ) -> tuple[Float[Array, ""], RoundSums]:
        drafter, chunk = nnx.merge(graphdef, params), chunk._replace(contexts=contexts)
        sums = round_sums(drafter, decoder, chunk, rounds=rounds, settings=settings)
        means = jax.tree.map(lambda leaf: (leaf.T * share).T, sums)
        # A loss with weight 0 is reported but gets no gradient.
        weights = {name: getattr(settings, name) for name in LOSSES}
        weighted = sum(weight * getattr(means, name) for name, weight in weights.items() if weight)
        return (decay * weighted).sum(), means

    sought = (0, 1) if head.attends else 0
    gradient = jax.value_and_grad(loss, argnums=sought, has_aux=True)
    differentiate = jax.vmap(gradient, in_axes=(None, 0, 0))

    def by_shard[T](rows: T) -> T:
        grouped = jax.tree.map(lambda leaf: leaf.reshape(shards, -1, *leaf.shape[1:]), rows)
        return constrain_rows(grouped, mesh)

    def for_each_shard[T](tree: T) -> T:
        copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (shards, *leaf.shape)), tree)
        return constrain_rows(copies, mesh)

    # A scan over chunks frees the activations of each chunk before the next one.
    def add_chunk(carry: Totals, chunk: Chunk) -> tuple[Totals, Any]:
        grouped = by_shard(chunk)
        (value, means), gradients = differentiate(params, grouped.contexts, grouped)
        gradients, of_contexts = gradients if head.attends else (gradients, None)
        total = jax.tree.map(jnp.add, carry, (gradients, value, means))
        return constrain_rows(total, mesh), of_contexts

    def read_rows(
        params: nnx.State,
        hidden: Float[Array, "B T Z"],
        tokens: Int[Array, "B T"],
        segments: Int[Array, "B T"],
    ) -> Float[Array, "B T Y"]:
        embedded = decoder.stored_embeddings(jnp.roll(tokens, -1, axis=1))
        return nnx.merge(graphdef, params).contexts(hidden, embedded, segments, rounds)

    def add_batch(carry: Totals, batch: Batches) -> tuple[Totals, None]:
        hidden, (B, T) = batch.hidden, batch.tokens.shape
        if hidden is None:
            layers, raw = layers_read(head.config, target.config)
            hidden = run_target(target, batch.tokens, batch.segments, layers, raw)
        contexts, carry_back = hidden.astype(jnp.float32), None
        # A head with attention reads whole rows: collect the gradients of its contexts from all
        # chunks, then backpropagate through the rows.
        if head.attends:
            rows = by_shard((contexts, batch.tokens, batch.segments))
            read = partial(jax.vmap(read_rows), hidden=rows[0], tokens=rows[1], segments=rows[2])
            contexts, carry_back = jax.vjp(read, for_each_shard(params))
            contexts = contexts.reshape(B, T, -1)
        chunks = split_chunks(
            contexts,
            hidden[..., -target.config.hidden_size :].astype(jnp.float32),
            batch.tokens,
            batch.loss_mask,
            batch.segments,
            rounds=rounds,
            chunk_length=settings.chunk_length,
            top=batch.top,
        )
        carry, of_contexts = jax.lax.scan(add_chunk, carry, chunks)
        if carry_back is not None:
            (through_rows,) = carry_back(jax.vmap(partial(join_chunks, length=T), 1)(of_contexts))
            gradients, value, means = carry
            carry = jax.tree.map(jnp.add, gradients, through_rows), value, means
        return constrain_rows(carry, mesh), None

    zeros = jnp.zeros(rounds)
    sums = RoundSums(zeros, zeros, zeros, zeros, jnp.zeros((rounds, TOP)), zeros)
    initial = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(()), sums)
    total, _ = jax.lax.scan(add_batch, for_each_shard(initial), batches)
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), total)
