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

        teacher = _Teacher.of(target.logits(part(hidden, 1, chunk_length + rounds - 1)))
        context = part(hidden, 0)
        state = jnp.zeros_like(context)
        sums = []
        for i in range(rounds):
            state = drafter.step(state, target.embed_tokens[...][part(tokens, 1 + i)])
            sums.append(
                _prediction_sums(
                    drafter.logits(context, state),
                    jax.tree.map(lambda leaf: leaf[:, i : i + chunk_length], teacher),  # noqa: B023
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


class _Teacher(NamedTuple):
    """The target's distribution of the token after each position."""

    probabilities: Float[Array, "B C V"]
    entropy: Float[Array, "B C"]
    best: Int[Array, "B C"]

    @classmethod
    def of(cls, logits: Float[Array, "B C V"]) -> "_Teacher":
        log_probs = jax.lax.stop_gradient(jax.nn.log_softmax(logits))
        probabilities = jnp.exp(log_probs)
        entropy = -jnp.sum(probabilities * log_probs, axis=-1)
        return cls(probabilities, entropy, jnp.argmax(log_probs, axis=-1))


def _prediction_sums(
    logits: Float[Array, "B C V"],
    teacher: _Teacher,
    labels: Int[Array, "B C"],
    mask: Bool[Array, "B C"],
) -> RoundSums:
    """Sums of one round, with as few passes over V as the measures need."""
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    label_logits = _pick(logits, labels)
    rank = (logits > label_logits[..., None]).sum(axis=-1)
    cross_entropy = normaliser - jnp.sum(teacher.probabilities * logits, axis=-1)
    agrees = _pick(logits, teacher.best) >= logits.max(axis=-1)
    among = rank[..., None] < jnp.arange(1, TOP + 1)
    return RoundSums(
        hard=jnp.sum((normaliser - label_logits) * mask),
        soft=jnp.sum((cross_entropy - teacher.entropy) * mask),
        top=jnp.sum(among & mask[..., None], axis=(0, 1)).astype(jnp.float32),
        agreement=jnp.sum(agrees & mask).astype(jnp.float32),
    )


def _pick(logits: Float[Array, "B C V"], tokens: Int[Array, "B C"]) -> Float[Array, "B C"]:
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
