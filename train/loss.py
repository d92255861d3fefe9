"""Losses of a recurrent drafter: the decoder's recurrence, fed with true tokens.

For a position t with hidden state h_t, round i (from 0) feeds x_{t+1+i} and predicts x_{t+2+i}.
The teacher of that prediction is the target's own output at position t+1+i, from the same forward
pass that gave h_t (paper, section 4; distillation as in section 4.2).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.drafter import RecurrentHead
from redrafter_jax.target import Decoder

# Accuracy is reported for the true token among the 1 to 5 best.
TOP = 5


class RoundSums(NamedTuple):
    """Sums over the counted positions, one entry per round.

    Attributes:
      hard: cross-entropy with the next token, nats.
      soft: KL divergence from the target's distribution to the drafter's, nats.
      top: positions whose true token is among the k + 1 best guesses.
      agreement: positions where drafter and target agree on the most likely token.
    """

    hard: Float[Array, " R"]
    soft: Float[Array, " R"]
    top: Float[Array, "R 5"]
    agreement: Float[Array, " R"]


def count_positions(loss_mask: Bool[Array, "B T"], rounds: int) -> Int[Array, " R"]:
    """Positions that carry loss, per round: those whose label x_{t+2+i} exists and counts."""
    return jnp.stack([loss_mask[:, i + 2 :].sum() for i in range(rounds)])


def round_sums(
    drafter: RecurrentHead,
    target: Decoder,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    rounds: int,
    chunk_length: int,
) -> RoundSums:
    """Unroll the drafter R rounds at every position and sum its losses.

    Positions are taken `chunk_length` at a time and rematerialised in the backward pass, so at
    most [B, chunk_length + R, V] logits of the target and [B, chunk_length, V] of the drafter
    exist at once, never [R, B, T, V].

    Args:
      drafter: the head that is trained.
      target: the frozen target; its embedding and vocabulary projection are used.
      hidden: the target's last hidden states over `tokens`.
      tokens: one document (or a part of one) per row.
      loss_mask: True where predicting the token counts.
      rounds: R.
      chunk_length: positions per chunk, C.
    """
    B, T = tokens.shape
    chunks = -(-T // chunk_length)
    extra = chunks * chunk_length + rounds + 1 - T
    # Beyond the end nothing counts: padded labels are masked.
    hidden = jnp.pad(hidden, ((0, 0), (0, extra), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, extra)))
    loss_mask = jnp.pad(loss_mask, ((0, 0), (0, extra)))

    @jax.checkpoint
    def chunk_sums(start: Int[Array, ""]) -> RoundSums:
        def part(values: Array, offset: int, length: int = chunk_length) -> Array:
            return jax.lax.dynamic_slice_in_dim(values, start + offset, length, axis=1)

        teacher = target.logits(part(hidden, 1, chunk_length + rounds - 1))
        teacher = jax.lax.stop_gradient(jax.nn.log_softmax(teacher))
        context = part(hidden, 0)
        state = jnp.zeros_like(context)
        sums = []
        for i in range(rounds):
            state = drafter.step(state, target.embed_tokens[...][part(tokens, 1 + i)])
            sums.append(
                _prediction_sums(
                    drafter.logits(context, state),
                    teacher[:, i : i + chunk_length],
                    part(tokens, 2 + i),
                    part(loss_mask, 2 + i),
                )
            )
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums)

    def add(total: RoundSums, start: Int[Array, ""]) -> tuple[RoundSums, None]:
        return jax.tree.map(jnp.add, total, chunk_sums(start)), None

    zeros = jnp.zeros(rounds)
    total = RoundSums(zeros, zeros, jnp.zeros((rounds, TOP)), zeros)
    total, _ = jax.lax.scan(add, total, jnp.arange(chunks) * chunk_length)
    return total


def _prediction_sums(
    logits: Float[Array, "B C V"],
    teacher: Float[Array, "B C V"],
    labels: Int[Array, "B C"],
    mask: Bool[Array, "B C"],
) -> RoundSums:
    log_probs = jax.nn.log_softmax(logits)
    label_log_probs = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)
    rank = (log_probs > label_log_probs).sum(axis=-1)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - log_probs), axis=-1)
    agrees = log_probs.argmax(axis=-1) == teacher.argmax(axis=-1)
    among = rank[..., None] < jnp.arange(1, TOP + 1)
    return RoundSums(
        hard=-jnp.sum(label_log_probs[..., 0] * mask),
        soft=jnp.sum(divergence * mask),
        top=jnp.sum(among & mask[..., None], axis=(0, 1)).astype(jnp.float32),
        agreement=jnp.sum(agrees & mask).astype(jnp.float32),
    )
