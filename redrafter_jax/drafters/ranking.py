"""Ranking of the next tokens by a drafter's scores, for all kinds of drafters that score tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TreeConfig
from redrafter_jax.parallel.collectives import all_gather, own_shard, shard_start
from redrafter_jax.sampling import (
    Pair,
    adjust_drafts,
    filter_logits,
    join_parts,
    of_filtered,
    on_gpu,
    reduce_parts,
)
from redrafter_jax.types import Sampling


def rank_tokens(
    logits: Float[Array, "B M part"],
    noise: Callable[[], Float[Array, "B _ U"]],
    sampling: Sampling,
    tree: TreeConfig,
    size: int,
) -> tuple[Float[Array, "B M X"], Int[Array, "B M X"]]:
    """Return the X best of U tokens at M positions, best first: log-probabilities and indices.

    If the drafter's scores were right, the target would draw the token with the highest sum of
    filtered score and noise. So tokens are ranked by these sums, and their probabilities are
    `softmax(sharpness * (filtered logits + temperature * noise))`. The drafter's error is in the
    logits and does not depend on the temperature, so one sharpness suits all temperatures
    (docs/sampling.md).

    Args:
      logits: scores of the U draftable tokens; on a mesh, this device's shard.
      noise: function that returns the noise with which the target will choose, for the U draftable
        tokens. It is called where the noise is added, so that XLA can fuse both.
      sampling: sampling settings of the rows; `adjustment` must be for the U draftable tokens.
      tree: the shape of the tree, which provides X, sharpness and candidates; X and candidates must
        not exceed U.
      size: U, number of draftable tokens.
    """
    logits = adjust_drafts(logits, sampling)
    unit = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    factor = (tree.sharpness * unit)[:, None, None]

    def score(filtered: Float[Array, "B M part"]) -> Float[Array, "B M part"]:
        return factor * (filtered + own_shard(noise(), logits.shape[-1]))

    def score_and_sum(filtered: Float[Array, "B M part"]) -> tuple[Float[Array, "B M part"], Pair]:
        scores = score(filtered)
        return scores, _sums_of_parts(scores)

    parts = None
    if on_gpu():
        scores, parts = of_filtered(score_and_sum, logits, sampling, size)
    else:
        scores = score(filter_logits(logits, sampling, size))
    best, tokens = _highest_of_shards(scores, tree.candidates or tree.extensions, size)
    if tree.candidates:
        # Barrier: XLA for CPUs would sort the whole vocabulary if it fused both cuts to X.
        best, tokens = jax.lax.optimization_barrier((best, tokens))
        total = jax.nn.logsumexp(best, axis=-1, keepdims=True)
    elif parts is None:
        total = _over_shards(jax.nn.logsumexp(scores, axis=-1, keepdims=True), scores, size)
    else:
        total = _over_shards(_logsumexp_of_parts(parts), scores, size)
    best = best - total
    # Rounding must not make a log-probability positive, or a child could outrank its parent in the
    # node budget. `top_k` ranks NaN above all numbers, so NaN becomes -inf: a broken drafter then
    # drafts nothing.
    best = jnp.where(jnp.isnan(best), -jnp.inf, jnp.minimum(best, 0.0))
    return best[..., : tree.extensions], tokens[..., : tree.extensions]


def highest(
    scores: Float[Array, "... M"], count: int
) -> tuple[Float[Array, "... C"], Int[Array, "... C"]]:
    """Return the C highest scores and their indices, highest first."""
    # For C above 16, XLA for GPUs sorts all M unless ties may come in any order.
    best, where = jax.lax.top_k(scores, count, is_stable=count <= 16)
    return best, where


def _highest_of_shards(
    scores: Float[Array, "... part"], count: int, size: int
) -> tuple[Float[Array, "... C"], Int[Array, "... C"]]:
    """Apply `highest` to an axis of `size` entries; each shard contributes its C highest scores."""
    part = scores.shape[-1]
    best, where = highest(scores, min(count, part))
    if part == size:
        return best, where
    candidates = best.shape[-1] * (size // part)
    best = all_gather(best, candidates)
    where = all_gather(where + shard_start(part, size), candidates)
    best, places = highest(best, count)
    return best, jnp.take_along_axis(where, places, axis=-1)


def _over_shards(
    total: Float[Array, "... 1"], scores: Float[Array, "... part"], size: int
) -> Float[Array, "... 1"]:
    """Return the logsumexp over an axis of `size` entries, from this device's shard of the axis."""
    part = scores.shape[-1]
    if part == size:
        return total
    return jax.nn.logsumexp(all_gather(total, size // part), axis=-1, keepdims=True)


# On GPUs, the logsumexp joins pairs of a maximum and a sum of exponentials relative to it (arXiv
# 1805.02867), so that the scores are read in a single pass.
def _sums_of_parts(scores: Float[Array, "... M"]) -> Pair:
    none = jnp.float32(-jnp.inf), jnp.float32(0)
    return reduce_parts((scores, jnp.ones_like(scores)), none, _join_sums)


def _logsumexp_of_parts(parts: Pair) -> Float[Array, "... 1"]:
    top, total = join_parts(parts, _join_sums)
    return (jnp.log(total) + jnp.where(jnp.isfinite(top), top, 0.0))[..., None]


def _join_sums(one: Pair, other: Pair) -> Pair:
    top = jnp.maximum(one[0], other[0])
    finite = jnp.where(jnp.isfinite(top), top, 0.0)
    first, second = (total * jnp.exp(own - finite) for own, total in (one, other))
    return top, first + second
