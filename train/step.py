"""One optimizer step of a drafter: frozen target forward, losses, update."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import (
    FULLY_SHARDED,
    RULES,
    constrain,
    constrain_rows,
    data_shards,
    per_shard,
)

from .config import LossSettings
from .loss import TOP, Chunk, RoundSums, TopTokens, count_positions, round_sums, split_chunks


class TrainState(NamedTuple):
    """The state that a step reads and writes: float32 parameters of the drafter, optax's state."""

    params: nnx.State
    optimizer: optax.OptState


class StepMetrics(NamedTuple):
    """Means over the counted positions of a step, one entry per round; see `RoundSums`."""

    loss: Float[Array, ""]
    rounds: RoundSums
    gradient_norm: Float[Array, ""]


def init_state(drafter: LoadedHead, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(drafter.params, optimizer.init(drafter.params))


def run_target(
    target: Target,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    context_layers: tuple[int, ...],
) -> Float[Array, "B T Z"]:
    """The target's hidden states; on a mesh every device runs its part."""

    @per_shard
    def forward(
        target: Target, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]
    ) -> Float[Array, "B T Z"]:
        decoder = target.merge()
        hidden, _, _ = decoder.forward(tokens, segments, context_layers)
        return decoder.of_one_scale(hidden)

    return forward(target, tokens, segments)


_Totals = tuple[nnx.State, Array, RoundSums]


@partial(
    jax.jit,
    static_argnames=("rounds", "loss_settings", "optimizer", "fully_sharded"),
    donate_argnames="state",
)
def train_step(
    state: TrainState,
    target: Target,
    graphdef: nnx.GraphDef,
    tokens: Int[Array, "A B T"],
    loss_mask: Bool[Array, "A B T"],
    segments: Int[Array, "A B T"],
    hidden: Float[Array, "A B T Z"] | None = None,
    log_probs: Float[Array, "A B T k"] | None = None,
    token_ids: Int[Array, "A B T k"] | None = None,
    *,
    rounds: int,
    loss_settings: LossSettings,
    optimizer: optax.GradientTransformation,
    fully_sharded: bool = False,
) -> tuple[TrainState, StepMetrics]:
    """One update from A accumulated batches; the state is donated.

    The loss is the weighted sum over R rounds of the mean over all A * B * T counted positions, so
    that how a batch is split changes memory, not the gradient. No prediction crosses from one
    document to the next; `segments` numbers them.

    The features of `train.features`, `hidden`, `log_probs` and `token_ids`, are given together or
    not at all. With them the target does not run, and its layers are not needed. `fully_sharded`:
    on a mesh the state is split over `data` too.
    """
    decoder = target.merge()
    context_layers = nnx.merge(graphdef, state.params).config.context_layers
    count = partial(count_positions, rounds=rounds)
    counts = jax.vmap(count)(loss_mask, segments).sum(axis=0)
    share = 1.0 / jnp.maximum(counts, 1)
    decay = loss_settings.round_decay ** jnp.arange(rounds)

    def loss(params: nnx.State, chunk: Chunk) -> tuple[Float[Array, ""], RoundSums]:
        drafter = nnx.merge(graphdef, params)
        sums = round_sums(drafter, decoder, chunk, rounds=rounds, settings=loss_settings)
        means = jax.tree.map(lambda leaf: (leaf.T * share).T, sums)
        # A loss of weight 0 is reported, but has no gradient.
        terms = (
            (loss_settings.hard, means.hard),
            (loss_settings.soft, means.soft),
            (loss_settings.lk, means.lk),
        )
        weighted = sum(weight * mean for weight, mean in terms if weight)
        return (decay * weighted).sum(), means

    # Each data shard of a mesh sums its own gradients; they are added up once, at the end.
    shards = data_shards(target.mesh)
    differentiate = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0))

    # Gradients are taken chunk by chunk, so that no chunk's activations outlive it.
    def add_chunk(carry: _Totals, chunk: Chunk) -> tuple[_Totals, None]:
        grouped = jax.tree.map(lambda leaf: leaf.reshape(shards, -1, *leaf.shape[1:]), chunk)
        (value, means), gradients = differentiate(
            state.params, constrain_rows(grouped, target.mesh)
        )
        total = jax.tree.map(jnp.add, carry, (gradients, value, means))
        return constrain_rows(total, target.mesh), None

    def add_batch(carry: _Totals, batch: tuple[Any, ...]) -> tuple[_Totals, None]:
        tokens, mask, segments, hidden, top = batch
        if hidden is None:
            hidden = run_target(target, tokens, segments, context_layers)
        chunks = split_chunks(
            hidden.astype(jnp.float32),
            tokens,
            mask,
            segments,
            rounds=rounds,
            chunk_length=loss_settings.chunk_length,
            top=top,
        )
        return jax.lax.scan(add_chunk, carry, chunks)

    zeros = jnp.zeros(rounds)
    sums = RoundSums(zeros, zeros, zeros, jnp.zeros((rounds, TOP)), zeros)
    initial = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()), sums)
    start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (shards, *leaf.shape)), initial)
    top = None if log_probs is None or token_ids is None else TopTokens(log_probs, token_ids)
    batches = (tokens, loss_mask, segments, hidden, top)
    total, _ = jax.lax.scan(add_batch, constrain_rows(start, target.mesh), batches)
    gradients, value, means = jax.tree.map(lambda leaf: leaf.sum(axis=0), total)
    rules = FULLY_SHARDED if fully_sharded else RULES
    gradients = constrain(gradients, target.mesh, rules)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    metrics = StepMetrics(value, means, optax.tree.norm(gradients))
    new_state = constrain(TrainState(params, optimizer_state), target.mesh, rules)
    return new_state, constrain(metrics, target.mesh, {})
