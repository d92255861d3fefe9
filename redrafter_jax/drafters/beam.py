"""Beam search with the recurrent drafter; its trace is the token tree (paper, section 3.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.ranking import highest, rank_tokens
from redrafter_jax.drafters.recurrent_head import RecurrentHead
from redrafter_jax.models.linear import Weight, read_rows
from redrafter_jax.types import Beams, Sampling, Scorer


class _Frontier(NamedTuple):
    """Beams after a round: one before the first round and W after it."""

    tokens: Int[Array, "B beams"]
    states: Float[Array, "B beams D"]
    log_probs: Float[Array, "B beams"]


def beam_search(
    drafter: RecurrentHead,
    embedding: Weight,
    context: Float[Array, "B Z"],
    root: Int[Array, " B"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    draft: DraftConfig,
    scorer: Scorer | None = None,
) -> Beams:
    """Draft R tokens on each of W beams below the root.

    Beams rank by the summed log-probabilities of their tokens, those of `rank_tokens`. Each round
    keeps X of the pairs (beam, token) in two stages: the X best tokens of every beam over U, then
    the X best of those W * X. The first W of them are the beams that the next round goes on from;
    X is W, or with `draft.rerank` as many as the tree can take.

    Args:
      drafter: the recurrent head.
      embedding: the target's token embedding; on a mesh, this device's part of it.
      context: the target's last hidden state before the root, and those of the context layers.
      root: the last decided token.
      noise: noise of the tokens after the root, from `draw_noise`; the first R are used.
      sampling: the rows' temperature and filters.
      draft: W, R, X, sharpness and candidates; neither X nor candidates may exceed U.
      scorer: the target's vocabulary projection of the U tokens, where the drafter has none.
    """
    drafted, U = drafter.draft_token_ids, drafter.config.draft_vocab_size
    W = draft.beam_width
    context = drafter.read_context(context)

    def draft_round(
        frontier: _Frontier, round_noise: Float[Array, "B U"]
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        V = drafter.config.vocab_size
        embedded = read_rows(embedding, frontier.tokens, V, frontier.states.dtype)
        states = drafter.step(frontier.states, embedded)
        logits = drafter.logits(context[:, None], states, scorer)
        best, tokens = rank_tokens(logits, round_noise[:, None], sampling, draft, U)
        totals = (frontier.log_probs[..., None] + best).reshape(len(root), -1)
        log_probs, winners = highest(totals, draft.extensions)
        parents = winners // draft.extensions
        tokens = jnp.take_along_axis(tokens.reshape(totals.shape), winners, axis=1)
        tokens = tokens if drafted is None else drafted[tokens]
        states = jnp.take_along_axis(states, parents[:, :W, None], axis=1)
        return _Frontier(tokens[:, :W], states, log_probs[:, :W]), (tokens, parents, log_probs)

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
