"""Losses of a draft head, unrolled over the tokens of the data (teacher forcing).

x_t is the token at position t, and h_t the target's hidden state there. From h_t, draft round i
(counted from 0) reads x_{t+1+i} and predicts x_{t+2+i}. Heads that draft independently predict this
token from h_t alone. The teacher of the prediction is the target's output at position t+1+i, from
the same forward pass as h_t (arXiv 2403.09919, section 4; distillation as in section 4.2).

With stored features (`train.features`), only the k most likely tokens of the teacher are known. The
other tokens share the remaining probability evenly.

A drafter may have a draft vocabulary of U of the V tokens. The soft loss then uses the target's
distribution over these U tokens. A label outside the draft vocabulary has no hard loss, and its
prediction counts as wrong.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.drafters.head_drafter import TrainedHead
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import Scorer

from .config import LossSettings

# Accuracies are reported from top-1 to top-5.
TOP = 5


class RoundSums(NamedTuple):
    """Sums over the positions that carry loss, for each of R draft rounds.

    p is the target's distribution of the token to predict, and q the drafter's.

    Attributes:
      hard: cross-entropy with the token of the data, in nats; 0 for labels outside the draft
        vocabulary.
      soft: KL divergence from p to q, in nats; see `LossSettings`.
      lk: -log sum min(p, q), in nats. The sum over the V tokens is the probability that a drafted
        token is accepted (arXiv 2211.17192, section 3).
      tv: total variation distance, 1 - sum min(p, q), the probability of a rejection.
      top: number of positions whose label is among the drafter's n most likely tokens, for n from 1
        to 5.
      agreement: number of positions where drafter and target have the same most likely token.
    """

    hard: Float[Array, " R"]
    soft: Float[Array, " R"]
    lk: Float[Array, " R"]
    tv: Float[Array, " R"]
    top: Float[Array, "R 5"]
    agreement: Float[Array, " R"]


def count_positions(
    loss_mask: Bool[Array, "B T"], segments: Int[Array, "B T"], rounds: int
) -> Int[Array, " R"]:
    """Count the positions that carry loss, for each of R = `rounds` draft rounds.

    Position t carries loss in round i if its label, token t + 2 + i, exists, carries loss, and is
    in the document of token t.
    """
    ahead = range(2, rounds + 2)
    return jnp.stack([(loss_mask & _same_document(segments, i))[:, i:].sum() for i in ahead])


def _same_document(segments: Int[Array, "B T"], ahead: int) -> Bool[Array, "B T"]:
    """Whether each token is in the same document as the token `ahead` positions before it."""
    before = jnp.pad(segments, ((0, 0), (ahead, 0)), constant_values=-1)[:, : segments.shape[1]]
    return segments == before


class TopTokens(NamedTuple):
    """The target's k most likely next tokens at each position, the most likely token first."""

    log_probs: Float[Array, "*B k"]
    token_ids: Int[Array, "*B k"]


def dense_log_probs(
    top: TopTokens, vocab_size: int, known: Int[Array, " U"] | None = None
) -> Float[Array, "*B U"]:
    """Expand top-k log-probabilities to a larger vocabulary, in float32.

    The tokens outside the top k share the remaining probability evenly. Because of rounding, this
    probability may be too large, so each token gets at most the probability of the k-th token.

    Args:
      top: the k most likely tokens.
      vocab_size: V, number of tokens of the target.
      known: ids of the U tokens of the result; None for all V tokens.
    """
    log_probs = top.log_probs.astype(jnp.float32)
    left = 1 - jnp.exp(log_probs).sum(axis=-1, keepdims=True)
    others = max(vocab_size - log_probs.shape[-1], 1)
    # Where no probability is left, as at padding, the logarithm of the ratio would be -inf in
    # float32, and -inf for every known token is not a distribution.
    each = jnp.log(jnp.maximum(left, jnp.finfo(jnp.float32).tiny)) - jnp.log(others)
    each = jnp.minimum(each, log_probs[..., -1:])
    size, places = vocab_size, top.token_ids
    if known is not None:
        size = len(known)
        places = _index_of(known, vocab_size)[places]
        places = jnp.where(places < 0, size, places)  # out of bounds, dropped below
    dense = jnp.broadcast_to(each, (*each.shape[:-1], size))
    return jnp.put_along_axis(dense, places, log_probs, axis=-1, inplace=False, mode="drop")


class Chunk(NamedTuple):
    """A chunk of C positions, and the R further positions that R draft rounds need; M = C + R.

    Attributes:
      contexts: inputs of the head at the C positions; see `TrainedHead.unroll`.
      hidden: the target's last hidden states at the M positions; None if `top` is given.
      tokens: token ids at the M positions and at the next one.
      loss_mask: True for tokens whose prediction carries loss.
      segments: number of the token's document within its row, from 1; 0 at padding.
      top: stored most likely next tokens of the target at the M positions; None if the target's
        logits are computed from `hidden`.
    """

    contexts: Float[Array, "B C Y"]
    hidden: Float[Array, "B M D"] | None
    tokens: Int[Array, "B M+1"]
    loss_mask: Bool[Array, "B M+1"]
    segments: Int[Array, "B M+1"]
    top: TopTokens | None


def split_chunks(
    contexts: Float[Array, "B T Y"],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    rounds: int,
    chunk_length: int,
    top: TopTokens | None = None,
) -> Chunk:
    """Split rows of T positions into chunks of C = `chunk_length`, stacked on a leading axis.

    A scan over the chunks, with gradients, holds the logits of one chunk at a time. Whatever T is,
    these are at most [B, C + R, V] for the target and [R, B, C, V] for the drafter, with B rows, R
    draft rounds and V tokens.
    """
    T = tokens.shape[1]
    chunk_length = min(chunk_length, T)
    starts = range(0, T, chunk_length)

    def stack(values: Array, more: int) -> Array:
        length = chunk_length + more
        # Padding of the mask is False, so padding carries no loss.
        extra = starts[-1] + length - T
        padded = jnp.pad(values, ((0, 0), (0, extra)) + ((0, 0),) * (values.ndim - 2))
        return jnp.stack([padded[:, start : start + length] for start in starts])

    return Chunk(
        stack(contexts, 0),
        None if top else stack(hidden, rounds),
        *(stack(x, rounds + 1) for x in (tokens, loss_mask, segments)),
        top=jax.tree.map(lambda x: stack(x, rounds), top),
    )


def join_chunks(chunks: Float[Array, "n B C Y"], length: int) -> Float[Array, "B T Y"]:
    """Join n chunks of C positions into rows of T = `length` positions; padding is dropped."""
    n, B, C, Y = chunks.shape
    return chunks.swapaxes(0, 1).reshape(B, n * C, Y)[:, :length]


def round_sums(
    drafter: TrainedHead,
    target: Decoder,
    chunk: Chunk,
    *,
    rounds: int,
    settings: LossSettings,
) -> RoundSums:
    """Unroll the drafter for R = `rounds` rounds at every position of a chunk, and sum the losses.

    The sums are not weighted. The target's embedding is used, and if the chunk has no `top` or the
    drafter shares the target's head, also the target's vocabulary projection. Both are frozen.
    """
    C = chunk.contexts.shape[1]
    known = drafter.draft_token_ids
    scorer = _frozen_scorer(target, known) if drafter.config.head == "target" else None
    vocab_size = target.config.vocab_size
    if chunk.top is None:
        assert chunk.hidden is not None, "the target's logits are those of its hidden states"
        scores = jax.lax.stop_gradient(target.logits(chunk.hidden[:, 1:]))
        normaliser, highest = jax.nn.logsumexp(scores, axis=-1), scores.max(axis=-1)
        scores = scores if known is None else scores[..., known]
    else:
        top = jax.tree.map(lambda leaf: leaf[:, 1:], chunk.top)
        scores = dense_log_probs(top, vocab_size, known)
        highest = top.log_probs[..., 0].astype(jnp.float32)
        normaliser = jnp.zeros_like(highest)
    teacher = _Teacher.of(scores, normaliser, highest, settings)
    labels = chunk.tokens if known is None else _index_of(known, vocab_size)[chunk.tokens]
    embedded = target.stored_embeddings(chunk.tokens[:, 1:])
    sums = []
    for i, logits in enumerate(drafter.unroll(chunk.contexts, embedded, rounds, scorer)):
        ahead = slice(2 + i, 2 + i + C)
        of_round = _Teacher(*(leaf[:, i : i + C] for leaf in teacher))
        mask = (chunk.loss_mask & _same_document(chunk.segments, 2 + i))[:, ahead]
        sums.append(_prediction_sums(logits, of_round, labels[:, ahead], mask, settings))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums)


def _frozen_scorer(target: Decoder, known: Int[Array, " U"] | None) -> Scorer:
    """The target's vocabulary projection, differentiable, in the dtype of its weights.

    `target.scorer` is not used, since it is optimized for the few columns of a decode step.
    """
    head = target.head if known is None else target.head[:, known]
    return partial(_project, head=head)


@jax.custom_vjp
def _project(features: Float[Array, "... D"], head: Float[Array, "D U"]) -> Float[Array, "... U"]:
    return jnp.matmul(features.astype(head.dtype), head, preferred_element_type=jnp.float32)


def _project_forward(features: Array, head: Array) -> tuple[Array, Array]:
    return _project(features, head), head


def _project_backward(head: Array, gradient: Array) -> tuple[Array, None]:
    rounded = gradient.astype(head.dtype)
    return jnp.matmul(rounded, head.T, preferred_element_type=jnp.float32), None


_project.defvjp(_project_forward, _project_backward)


def _index_of(known: Int[Array, " U"], vocab_size: int) -> Int[Array, " V"]:
    """The index of each token in the draft vocabulary; -1 for tokens outside of it."""
    unknown = jnp.full(vocab_size, -1)
    return unknown.at[known].set(jnp.arange(len(known)))


class _Teacher(NamedTuple):
    """The target's next-token distribution at each position, over the draft vocabulary.

    Attributes:
      probabilities: probabilities at temperature 1; their sum is below 1 if U < V.
      softened: probabilities at the soft loss's temperature and top-k; their sum is 1.
      entropy: entropy of `softened`.
      best: index in the draft vocabulary of the target's most likely token; -1 if it is not in it.
    """

    probabilities: Float[Array, "B C U"]
    softened: Float[Array, "B C U"]
    entropy: Float[Array, "B C"]
    best: Int[Array, "B C"]

    @classmethod
    def of(
        cls,
        scores: Float[Array, "B C U"],
        normaliser: Float[Array, "B C"],
        highest: Float[Array, "B C"],
        settings: LossSettings,
    ) -> "_Teacher":
        """Build a teacher from the target's scores over the draft vocabulary.

        `normaliser` is the log-sum-exp of the scores, and `highest` the highest score, both over V.
        """
        best = jnp.where(scores.max(axis=-1) == highest, jnp.argmax(scores, axis=-1), -1)
        kept = _keep_top_k(scores, settings.soft_top_k)
        softened = jax.nn.log_softmax(kept / settings.soft_temperature)
        weights = jnp.exp(softened)
        entropy = -jnp.sum(jnp.where(weights > 0, weights * softened, 0.0), axis=-1)
        return cls(jnp.exp(scores - normaliser[..., None]), weights, entropy, best)


def _keep_top_k(logits: Float[Array, "B C U"], count: int | None) -> Float[Array, "B C U"]:
    if count is None or count >= logits.shape[-1]:
        return logits
    # Keep exactly `count`: with stored features, other tokens may tie with the last one.
    highest, tokens = jax.lax.top_k(logits, count)
    dropped = jnp.full_like(logits, -jnp.inf)
    return jnp.put_along_axis(dropped, tokens, highest, axis=-1, inplace=False)


def _prediction_sums(
    logits: Float[Array, "B C U"],
    teacher: _Teacher,
    labels: Int[Array, "B C"],
    mask: Bool[Array, "B C"],
    settings: LossSettings,
) -> RoundSums:
    """Compute the sums of one round, in few passes over U."""
    is_known, temperature = labels >= 0, settings.soft_temperature
    carries_loss = mask & (teacher.best >= 0) if settings.drafted_only else mask
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    label_logits = _logit_of(logits, labels)
    # `logits > label_logits` would rank NaN first.
    rank = (~(logits <= label_logits[..., None])).sum(axis=-1)
    softened = logits / temperature
    cross_entropy = jax.nn.logsumexp(softened, axis=-1) - jnp.sum(
        teacher.softened * softened, axis=-1
    )
    shared = jnp.minimum(teacher.probabilities, jnp.exp(logits - normaliser[..., None]))
    # Rounding may make the overlap 0 where the distributions are nearly disjoint.
    overlap = jnp.maximum(shared.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
    agrees = (teacher.best >= 0) & (_logit_of(logits, teacher.best) >= logits.max(axis=-1))
    in_top = is_known[..., None] & (rank[..., None] < jnp.arange(1, TOP + 1))
    return RoundSums(
        hard=jnp.sum((normaliser - label_logits) * (carries_loss & is_known)),
        soft=jnp.sum((cross_entropy - teacher.entropy) * carries_loss) * temperature**2,
        lk=jnp.sum(-jnp.log(overlap) * carries_loss),
        tv=jnp.sum((1 - overlap) * carries_loss),
        top=jnp.sum(in_top & mask[..., None], axis=(0, 1)).astype(jnp.float32),
        agreement=jnp.sum(agrees & mask).astype(jnp.float32),
    )


def _logit_of(logits: Float[Array, "B C U"], tokens: Int[Array, "B C"]) -> Float[Array, "B C"]:
    """The logit of each token; an arbitrary logit where the token is -1."""
    chosen = jnp.maximum(tokens, 0)
    return jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
