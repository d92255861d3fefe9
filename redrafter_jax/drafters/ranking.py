"""Which tokens a drafter expects after a position, whatever the kind of its head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TreeConfig
from redrafter_jax.parallel.collectives import all_gather, own_shard, shard_start
from redrafter_jax.sampling import filter_logits
from redrafter_jax.types import Sampling


def rank_tokens(
    logits: Float[Array, "B M part"],
    noise: Float[Array, "B _ U"],
    sampling: Sampling,
    tree: TreeConfig,
    size: int,
) -> tuple[Float[Array, "B M X"], Int[Array, "B M X"]]:
    """The X best tokens at M positions in falling order: their log-probabilities, and places in U.

    They are the probabilities of the tokens that the target would draw if the drafter were right:
    `log_softmax(sharpness * (filtered logits + temperature * noise))`. The drafter errs in the
    logits, by an amount that knows no temperature: so the sharpness that suits it is the same at
    all of them (docs/sampling.md).

    Args:
      logits: of the U tokens that can be drafted; on a mesh of this device's part of them.
      noise: that the target will choose with, of the same tokens.
      sampling: the rows' temperature and filters.
      tree: X, sharpness and candidates; neither X nor candidates may exceed U.
      size: U.
    """
    unit = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    factor = (tree.sharpness * unit)[:, None, None]
    noise = own_shard(noise, logits.shape[-1])
    scores = factor * (filter_logits(logits, sampling, size) + noise)
    best, tokens = _highest_of_shards(scores, tree.candidates or tree.extensions, size)
    if tree.candidates:
        # A barrier: on the CPU XLA sorts the whole vocabulary when it sees both cut to X.
        best, tokens = jax.lax.optimization_barrier((best, tokens))
    total = _logsumexp(best, best.shape[-1]) if tree.candidates else _logsumexp(scores, size)
    best = best - total
    # Never above 0, not even by rounding: or a child would outrank its parent in the budget.
    # Nor may a broken drafter's NaN, which ranks above all numbers: it drafts nothing.
    best = jnp.where(jnp.isnan(best), -jnp.inf, jnp.minimum(best, 0.0))
    return best[..., : tree.extensions], tokens[..., : tree.extensions]


def highest(
    scores: Float[Array, "... M"], count: int
) -> tuple[Float[Array, "... C"], Int[Array, "... C"]]:
    """The C highest scores and where they are, in falling order."""
    # For more than 16 XLA for GPUs sorts all M, unless ties may come in any order.
    best, where = jax.lax.top_k(scores, count, is_stable=count <= 16)
    return best, where


def _highest_of_shards(
    scores: Float[Array, "... part"], count: int, size: int
) -> tuple[Float[Array, "... C"], Int[Array, "... C"]]:
    """`highest` over all parts of an axis of the given size; C scores of each are exchanged."""
    part = scores.shape[-1]
    best, where = highest(scores, min(count, part))
    if part == size:
        return best, where
    candidates = best.shape[-1] * (size // part)
    best = all_gather(best, candidates)
    where = all_gather(where + shard_start(part, size), candidates)
    best, places = highest(best, count)
    return best, jnp.take_along_axis(where, places, axis=-1)


def _logsumexp(scores: Float[Array, "... part"], size: int) -> Float[Array, "... 1"]:
    """Over all parts of an axis of the given size."""
    part = scores.shape[-1]
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    if part == size:
        return total
    return jax.nn.logsumexp(all_gather(total, size // part), axis=-1, keepdims=True)
