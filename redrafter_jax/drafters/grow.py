"""Beam search that grows a tree round by round, for drafters that draft one token per round.

Each drafter passes its own function of type `Advance`, which computes the scores of the next
tokens. Beams, ranking, node budget and noise are the same for all drafters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.ranking import highest, rank_tokens
from redrafter_jax.sampling import of_drafted
from redrafter_jax.types import Beams, Sampling


class Grown(NamedTuple):
    """The state that a drafter carries from one round to the next.

    Attributes:
      beams: pytree of arrays [B w ...] with one entry per beam. In the first round the root is the
        only beam, so w is 1; afterwards w is W, the beam width. A beam starts a round with the
        entry of its parent.
      nodes: pytree of arrays for the whole tree, with the same shapes in all rounds.
      trust: log-probability that the scores of each beam are right; None without such an estimate.
        It is added to the log-probabilities of the tokens in the round that returns it.
    """

    beams: Any
    nodes: Any = ()
    trust: Float[Array, "B w"] | None = None


# Computes the scores of the U draftable tokens after the newest token of each beam; on a mesh
# possibly a shard of U. Arguments: the state of the previous round, the newest tokens, and the
# round, from 0 to R - 1, which is the depth of the newest tokens. The round is an int in the first
# call, and in all calls if rounds are unrolled; otherwise it is traced. Returns the new state, and
# the scores, which are [B 1 U] if all beams share them.
Advance = Callable[
    [Grown, Int[Array, "B w"], Int[Array, ""] | int], tuple[Grown, Float[Array, "B _ U"]]
]


class _Frontier(NamedTuple):
    """The beams after a round: one before the first round, W afterwards."""

    tokens: Int[Array, "B beams"]
    log_probs: Float[Array, "B beams"]
    grown: Grown


def grow(
    advance: Advance,
    grown: Grown,
    root: Int[Array, " B"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    tree: TreeConfig,
    drafted: Int[Array, " U"] | None = None,
    *,
    unrolled: bool = False,
) -> Beams:
    """Draft R tokens (one per round) on each of W beams below the root.

    Beams are ranked by the sum of the log-probabilities of their tokens, from `rank_tokens`. Each
    round first takes the X best of the U draftable tokens for every beam, and then the X best of
    the resulting W * X (beam, token) pairs. The first W of these pairs are the beams of the next
    round. X is W, or with `tree.rerank` the number of nodes that fit in the tree.

    Args:
      advance: function that computes the scores after the newest token of each beam. It is traced
        once for the first round, and once for the other rounds, which are one scan unless
        `unrolled`.
      grown: state before the first round, whose only beam is the root.
      root: the last decided token.
      noise: noise at the positions after the root, from `draw_noise`; the first R are used.
      sampling: sampling settings of the rows.
      tree: the shape of the tree: W, R, X, sharpness and candidates. X and candidates must not
        exceed U.
      drafted: ids of the draftable tokens, in the order of their scores; None for all V.
      unrolled: whether each round is compiled separately, for drafters whose weights differ between
        rounds, and for devices on which loops are slow.
    """
    B, _, V = noise.shape
    U = V if drafted is None else len(drafted)
    W, X = tree.beam_width, tree.extensions
    sampling = of_drafted(sampling, drafted)

    def of_tokens(noise: Float[Array, "... V"]) -> Float[Array, "... U"]:
        return noise if drafted is None else noise[..., drafted]

    def draft_round(
        frontier: _Frontier,
        round: Int[Array, ""] | int,
        round_noise: Callable[[], Float[Array, "B 1 U"]],
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        grown, logits = advance(frontier.grown, frontier.tokens, round)
        is_first = isinstance(round, int) and round == 0
        own = sampling if is_first else sampling._replace(allowed=None)
        ranked = rank_tokens(logits, round_noise, own, tree, U)
        shape = (*frontier.tokens.shape, X)
        best, tokens = (jnp.broadcast_to(one, shape) for one in ranked)
        if grown.trust is not None:
            # Like scores, trust is at most 0, and NaN drafts nothing.
            trust = jnp.where(jnp.isnan(grown.trust), -jnp.inf, jnp.minimum(grown.trust, 0.0))
            best = best + trust[..., None]
        totals = (frontier.log_probs[..., None] + best).reshape(B, -1)
        if totals.shape[1] > X:
            log_probs, winners = highest(totals, X)
        else:  # children of the root alone, which are sorted already
            log_probs, winners = totals, jnp.broadcast_to(jnp.arange(X), totals.shape)
        parents = winners // X
        tokens = jnp.take_along_axis(tokens.reshape(totals.shape), winners, axis=1)
        tokens = tokens if drafted is None else drafted[tokens]

        def of_parents(entries: Array) -> Array:
            above = parents[:, :W].reshape(B, W, *(1,) * (entries.ndim - 2))
            return jnp.take_along_axis(entries, above, axis=1)

        grown = grown._replace(beams=jax.tree.map(of_parents, grown.beams), trust=None)
        return _Frontier(tokens[:, :W], log_probs[:, :W], grown), (tokens, parents, log_probs)

    start = _Frontier(root[:, None], jnp.zeros((B, 1), jnp.float32), grown)
    R = tree.draft_rounds
    if unrolled:
        frontier, made = start, []
        for round in range(R):
            own = partial(lambda round: of_tokens(noise[:, round, None]), round)
            frontier, one = draft_round(frontier, round, own)
            made.append(one)
        return Beams(*(jnp.stack(leaves, axis=1) for leaves in zip(*made, strict=True)))
    rounds = of_tokens(jnp.moveaxis(noise[:, :R], 1, 0))

    def turn(
        frontier: _Frontier, inputs: tuple[Int[Array, ""], Float[Array, "B U"]]
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        round, own = inputs
        return draft_round(frontier, round, lambda: own[:, None])

    frontier, first = draft_round(start, 0, lambda: rounds[0][:, None])
    _, rest = jax.lax.scan(turn, frontier, (jnp.arange(1, R), rounds[1:]))
    trace = jax.tree.map(lambda head, tail: jnp.concatenate([head[None], tail]), first, rest)
    return Beams(*(jnp.moveaxis(leaf, 0, 1) for leaf in trace))
