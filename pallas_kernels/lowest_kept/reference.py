"""The specification in jnp, for other platforms and for the tests of the kernel."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt


def reference(
    logits: Float[Array, "B M V"],
    unit: Float[Array, " B"],
    top_k: Float[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> Float[Array, "B M"]:
    """Implement `pallas_kernels.lowest_kept.lowest_kept`."""
    unit, top_k, top_p, min_p = (bound[:, None, None] for bound in (unit, top_k, top_p, min_p))
    scaled = logits / unit
    best = jnp.max(scaled, axis=-1, keepdims=True)
    keys = _ordered_keys(scaled)

    def cut(bound: Float[Array, "B 1 1"], weights: Callable[[], Array]) -> UInt[Array, "B M 1"]:
        return jax.lax.cond(
            jnp.isfinite(bound).any(),
            lambda: _lowest_key(keys, weights(), bound),
            lambda: jnp.zeros_like(best, jnp.uint32),
        )

    lowest = cut(top_k, lambda: jnp.ones_like(scaled))

    def probabilities() -> Float[Array, "B M V"]:
        kept = jnp.where(keys >= lowest, jnp.exp(scaled - best), 0.0)
        return kept / jnp.sum(kept, axis=-1, keepdims=True)

    lowest = jnp.maximum(lowest, cut(top_p, probabilities))
    kept = (keys >= lowest) & (scaled >= best + jnp.log(min_p))
    return jnp.min(logits, axis=-1, initial=jnp.inf, where=kept)


def _ordered_keys(scores: Float[Array, "B M V"]) -> UInt[Array, "B M V"]:
    """Unsigned integers in the order of the scores: float bits, inverted for negative scores."""
    # -0.0 equals 0.0, so both must have the same key.
    bits = jnp.where(scores == 0, 0, jax.lax.bitcast_convert_type(scores, jnp.uint32))
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)


def _lowest_key(
    keys: UInt[Array, "B M V"], weights: Float[Array, "B M V"], bound: Float[Array, "B 1 1"]
) -> UInt[Array, "B M 1"]:
    """Find the lowest key such that the weights above it sum to less than `bound`, bit by bit.

    This takes 32 sums over V instead of a sort.
    """

    def decide_bit(step: Array, lowest: UInt[Array, "B M 1"]) -> UInt[Array, "B M 1"]:
        bit = jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        above = jnp.where(keys > (lowest | (bit - 1)), weights, 0.0)
        enough = jnp.sum(above, axis=-1, keepdims=True) < bound
        # Without the barrier, XLA for GPUs recomputes each step in all later steps if V is small.
        return jax.lax.optimization_barrier(jnp.where(enough, lowest, lowest | bit))

    def search(lowest: UInt[Array, "B M 1"], *, unroll: bool) -> UInt[Array, "B M 1"]:
        return jax.lax.fori_loop(0, 32, decide_bit, lowest, unroll=unroll)

    # Without a loop inside, a `cond` fits into a GPU command buffer, and its predicate stays on the
    # device. Elsewhere the loop compiles faster and runs as fast.
    return jax.lax.platform_dependent(
        jnp.zeros((*keys.shape[:-1], 1), jnp.uint32),
        cuda=partial(search, unroll=True),
        default=partial(search, unroll=False),
    )
