"""How a row turns scores into a choice: temperature, filters, and noise that drafts may share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.types import Sampling


def draw_noise(
    sampling: Sampling, positions: Int[Array, " B"], count: int, vocab_size: int
) -> Float[Array, "B P V"]:
    """Gumbel noise for the tokens at `count` positions from `positions` on; 0 for greedy rows.

    A pure function of (seed, absolute position, token id), whatever the batch, the tree or the
    step: adding it to `log p` and taking the argmax draws from p (Gumbel-max), and a drafter that
    sees it too can guess the very token that will be drawn (shared randomness, arXiv 2408.07978).
    """

    def row(seed: Int[Array, ""], first: Int[Array, ""]) -> Float[Array, "P V"]:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(seed), first + jnp.arange(count)
        )
        return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)

    def draw() -> Float[Array, "B P V"]:
        sampled = sampling.temperature > 0
        return jnp.where(sampled[:, None, None], jax.vmap(row)(sampling.seeds, positions), 0.0)

    def skip() -> Float[Array, "B P V"]:
        return jnp.zeros((*positions.shape, count, vocab_size), jnp.float32)

    return jax.lax.cond((sampling.temperature > 0).any(), draw, skip)


def filter_logits(logits: Float[Array, "B M V"], sampling: Sampling) -> Float[Array, "B M V"]:
    """Logits over the temperature, -inf where top-k, top-p or min-p drops the token.

    Temperature first, then the filters in that order, each on what the one before it kept: the
    order and the definitions of Hugging Face's logits processors. Tokens that tie with the last
    one kept are kept too. A greedy row (temperature 0) is returned as it came.
    """
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits / temperature[:, None, None]
    filtered = (
        (sampling.top_k < logits.shape[-1]) | (sampling.top_p < 1) | (sampling.min_p > 0)
    ) & (sampling.temperature > 0)

    def apply() -> Float[Array, "B M V"]:
        threshold = jnp.where(filtered[:, None, None], _lowest_kept(scaled, sampling), -jnp.inf)
        return jnp.where(scaled >= threshold, scaled, -jnp.inf)

    return jax.lax.cond(filtered.any(), apply, lambda: scaled)


def _lowest_kept(scaled: Float[Array, "B M V"], sampling: Sampling) -> Float[Array, "B M 1"]:
    """The smallest score that passes all three filters."""
    top_k, top_p, min_p = (
        parameter[:, None, None] for parameter in (sampling.top_k, sampling.top_p, sampling.min_p)
    )
    ordered = -jnp.sort(-scaled, axis=-1)
    kept = jnp.arange(scaled.shape[-1]) < top_k
    probabilities = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    # Keep a token while those before it have not reached top_p.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (before < top_p) | (top_p >= 1)
    kept &= probabilities >= min_p * probabilities[..., :1]
    # The first stays, even where top_p is too small for float32.
    kept |= jnp.arange(scaled.shape[-1]) == 0
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
