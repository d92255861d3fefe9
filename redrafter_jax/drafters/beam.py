"""Beam search with the recurrent drafter; its trace is the token tree (paper, section 3.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.recurrent_head import RecurrentHead
from redrafter_jax.parallel.collectives import all_gather, gather_rows, own_shard, shard_start
from redrafter_jax.sampling import filter_logits
from redrafter_jax.types import Beams, Sampling, Scorer


class _Frontier(NamedTuple):
    """Beams after a round: X is 1 before the first round and W after it."""

    tokens: Int[Array, "B X"]
    states: Float[Array, "B X D"]
    log_probs: Float[Array, "B X"]


def beam_search(
    drafter: RecurrentHead,
    embedding: Float[Array, "part D"],
    context: Float[Array, "B Z"],
    root: Int[Array, " B"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    draft: DraftConfig,
    scorer: Scorer | None = None,
) -> Beams:
    """Draft R tokens on each of W beams below the root.

    Beams rank by the summed log-probabilities of the tokens that the target would draw if the
    drafter were right: `log_softmax(sharpness * (filtered logits + temperature * noise))`. The
    drafter errs in the logits, by an amount that knows no temperature: so the sharpness that suits
    it is the same at all of them (docs/sampling.md). Each round keeps W of the pairs (beam, token)
    in two stages: the W best tokens of every beam over U, then the W best of those W * W.

    Args:
      drafter: the recurrent head.
      embedding: the target's token embedding; on a mesh, this device's part of it.
      context: the target's last hidden state before the root, and those of the context layers.
      root: the last decided token.
      noise: noise of the tokens after the root, from `draw_noise`; the first R are used.
      sampling: the rows' temperature and filters.
      draft: W, R, sharpness and candidates; neither W nor candidates may exceed U.
      scorer: the target's vocabulary projection of the U tokens, where the drafter has none.
    """
    unit = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    factor = (draft.sharpness * unit)[:, None, None]
    drafted, U = drafter.draft_token_ids, drafter.config.draft_vocab_size
    context = drafter.read_context(context)

    def draft_round(
        frontier: _Frontier, round_noise: Float[Array, "B U"]
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        embedded = gather_rows(embedding, frontier.tokens, drafter.config.vocab_size)
        states = drafter.step(frontier.states, embedded)
        logits = drafter.logits(context[:, None], states, scorer)
        noise = own_shard(round_noise, logits.shape[-1])[:, None]
        scores = factor * (filter_logits(logits, sampling, U) + noise)
        best, tokens = _best_of_shards(scores, draft.candidates or draft.beam_width, U)
        if draft.candidates:
            # Held together: on the CPU XLA sorts the whole vocabulary when it sees both cut to W.
            best, tokens = jax.lax.optimization_barrier((best, tokens))
        total = _logsumexp(best, best.shape[-1]) if draft.candidates else _logsumexp(scores, U)
        best = best - total
        # Never above 0, not even by rounding: or a child would outrank its parent in the budget.
        # Nor may a broken drafter's NaN, which ranks above all numbers: it drafts nothing.
        best = jnp.where(jnp.isnan(best), -jnp.inf, jnp.minimum(best, 0.0))
        best, tokens = best[..., : draft.beam_width], tokens[..., : draft.beam_width]
        totals = (frontier.log_probs[..., None] + best).reshape(len(root), -1)
        log_probs, winners = _best(totals, draft.beam_width)
        parents = winners // draft.beam_width
        tokens = jnp.take_along_axis(tokens.reshape(totals.shape), winners, axis=1)
        tokens = tokens if drafted is None else drafted[tokens]
        states = jnp.take_along_axis(states, parents[..., None], axis=1)
        return _Frontier(tokens, states, log_probs), (tokens, parents, log_probs)

    start = _Frontier(
        root[:, None],
        jnp.zeros_like(context)[:, None],
        jnp.zeros((len(root), 1), jnp.float32),
    )
    rounds = jnp.moveaxis(noise[:, : draft.draft_rounds], 1, 0)
    rounds = rounds if drafted is None else rounds[..., drafted]
    frontier, first = draft_round(start, rounds[0])
    _, rest = jax.lax.scan(draft_round, frontier, rounds[1:])
    trace = jax.tree.map(lambda head, tail: jnp.concatenate([head[None], tail]), first, rest)
    return Beams(*(jnp.moveaxis(leaf, 0, 1) for leaf in trace))


def _best(
    scores: Float[Array, "... M"], count: int
) -> tuple[Float[Array, "... C"], Int[Array, "... C"]]:
    """The C highest scores and where they are, in falling order."""
    # For more than 16 XLA for GPUs sorts all M, unless ties may come in any order.
    best, where = jax.lax.top_k(scores, count, is_stable=count <= 16)
    return best, where


def _best_of_shards(
    scores: Float[Array, "... part"], count: int, size: int
) -> tuple[Float[Array, "... C"], Int[Array, "... C"]]:
    """`_best` over all parts of an axis of the given size; only C scores of each are exchanged."""
    part = scores.shape[-1]
    best, where = _best(scores, min(count, part))
    if part == size:
        return best, where
    candidates = best.shape[-1] * (size // part)
    best = all_gather(best, candidates)
    where = all_gather(where + shard_start(part, size), candidates)
    best, places = _best(best, count)
    return best, jnp.take_along_axis(where, places, axis=-1)


def _logsumexp(scores: Float[Array, "... part"], size: int) -> Float[Array, "... 1"]:
    """Over all parts of an axis of the given size."""
    part = scores.shape[-1]
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    if part == size:
        return total
    return jax.nn.logsumexp(all_gather(total, size // part), axis=-1, keepdims=True)
