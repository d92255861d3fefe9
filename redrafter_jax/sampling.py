"""How a row turns scores into a choice: temperature, filters, and noise that drafts may share."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.types import Sampling

# Names, in compiled programs and profiles, of what rows that ask for none leave out.
NOISE, FILTERS = "noise", "filters"


def draw_noise(
    sampling: Sampling, positions: Int[Array, " B"], count: int, vocab_size: int
) -> Float[Array, "B P V"]:
    """Gumbel noise for the tokens at `count` positions from `positions` on; 0 for greedy rows.

    A pure function of (seed, absolute position, token id), whatever the batch, the tree or the
    step: adding it to `log p` and taking the argmax draws from p (Gumbel-max), and a drafter that
    sees it too can guess the very token that will be drawn (shared randomness, arXiv 2408.07978).
    """

    def draw() -> Float[Array, "B P V"]:
        noise = _gumbel(sampling.seeds, positions[:, None] + jnp.arange(count), vocab_size)
        return jnp.where((sampling.temperature > 0)[:, None, None], noise, 0.0)

    def skip() -> Float[Array, "B P V"]:
        return jnp.zeros((*positions.shape, count, vocab_size), jnp.float32)

    with jax.named_scope(NOISE):
        return jax.lax.cond((sampling.temperature > 0).any(), draw, skip)


def _gumbel(
    seeds: Int[Array, " B"], positions: Int[Array, "B P"], vocab_size: int
) -> Float[Array, "B P V"]:
    """Threefry keyed by (seed, position); a counter's two words serve two neighbouring tokens.

    Written out, not `jax.random.gumbel`: that depends on the default generator and on flags, and
    with 23 random bits never draws a token less likely than 1e-7.
    """
    keys = seeds.astype(jnp.uint32)[:, None, None], positions.astype(jnp.uint32)[..., None]
    words = _threefry(keys, jnp.arange(-(-vocab_size // 2), dtype=jnp.uint32))

    def noise(bits: UInt[Array, "B P half"]) -> Float[Array, "B P half"]:
        # Small values of `uniform` give large noise, and floats are densest there.
        uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-uniform))

    # A barrier: fused with what interleaves or reads them, XLA for CPUs would compute every word
    # anew for both its neighbours, and one at a time.
    even, odd = jax.lax.optimization_barrier((noise(words[0]), noise(words[1])))
    return jnp.stack([even, odd], axis=-1).reshape(*positions.shape, -1)[..., :vocab_size]


def _threefry(
    keys: tuple[UInt[Array, "B 1 1"], UInt[Array, "B P 1"]], counters: UInt[Array, " half"]
) -> tuple[UInt[Array, "B P half"], UInt[Array, "B P half"]]:
    """The two words of Threefry-2x32 with 20 rounds for the counters (c, 0).

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). JAX's own loops over the
    rounds on CPUs and holds the words in between, which takes seven times as long.
    """
    schedule = (*keys, keys[0] ^ keys[1] ^ jnp.uint32(0x1BD11BDA))
    left, right = counters + schedule[0], jnp.broadcast_to(schedule[1], keys[1].shape)
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left = left + right
            right = left ^ (right << distance | right >> (32 - distance))
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def filter_logits(
    logits: Float[Array, "B M part"], sampling: Sampling, size: int | None = None
) -> Float[Array, "B M part"]:
    """Logits over the temperature, -inf where top-k, top-p or min-p drops the token.

    Temperature first, then the filters in that order, each on what the one before it kept: the
    order and the definitions of Hugging Face's logits processors, except that top-p, too, keeps
    all tokens that tie with the last one kept. A greedy row (temperature 0) is returned as it came.

    Args:
      logits: of all tokens; on a mesh maybe of this device's part of them.
      sampling: the rows' temperature and filters.
      size: number of all tokens; None where the logits are of all.
    """
    size = size or logits.shape[-1]
    sampled = sampling.temperature > 0
    unit = jnp.where(sampled, sampling.temperature, 1.0)[:, None, None]
    # A bound that is infinite, or a floor of 0, keeps every token.
    top_k = jnp.where(
        sampled & (sampling.top_k < size), sampling.top_k.astype(jnp.float32), jnp.inf
    )
    # Above 0 after rounding, so that the first token is always kept.
    top_p = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny)
    top_p = jnp.where(sampled & (sampling.top_p < 1), top_p, jnp.inf)
    min_p = jnp.where(sampled, sampling.min_p, 0.0)
    filtered = jnp.isfinite(top_k) | jnp.isfinite(top_p) | (min_p > 0)
    none = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
    bounds = [bound[:, None, None] for bound in (top_k, top_p, min_p)]
    # The branches give a number per row, not filtered logits: what a `cond` gives is written out.
    with jax.named_scope(FILTERS):
        lowest = jax.lax.cond(
            filtered.any(),
            lambda: jnp.where(
                filtered[:, None, None],
                _lowest_kept(all_gather(logits, size), unit, *bounds),
                none,
            ),
            lambda: none,
        )
    return jnp.where(logits < lowest, -jnp.inf, logits / unit)


def _lowest_kept(
    logits: Float[Array, "B M V"],
    unit: Float[Array, "B 1 1"],
    top_k: Float[Array, "B 1 1"],
    top_p: Float[Array, "B 1 1"],
    min_p: Float[Array, "B 1 1"],
) -> Float[Array, "B M 1"]:
    """The lowest logit that passes the filters, which look at logits over the temperature."""
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
    return jnp.min(logits, axis=-1, keepdims=True, initial=jnp.inf, where=kept)


def _ordered_keys(scores: Float[Array, "B M V"]) -> UInt[Array, "B M V"]:
    """Whole numbers in the order of the scores: the bits of a float, negative ones turned over."""
    # -0.0 equals 0.0, and so must its key.
    bits = jnp.where(scores == 0, 0, jax.lax.bitcast_convert_type(scores, jnp.uint32))
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)


def _lowest_key(
    keys: UInt[Array, "B M V"], weights: Float[Array, "B M V"], bound: Float[Array, "B 1 1"]
) -> UInt[Array, "B M 1"]:
    """The lowest key above which less than `bound` of the weight lies, found bit by bit.

    32 sums over V take a fraction of a sort's time, the smaller the larger V (docs/sampling.md).
    """

    def decide_bit(step: Array, lowest: UInt[Array, "B M 1"]) -> UInt[Array, "B M 1"]:
        bit = jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        above = jnp.where(keys > (lowest | (bit - 1)), weights, 0.0)
        enough = jnp.sum(above, axis=-1, keepdims=True) < bound
        # Without the barrier XLA for GPUs writes each step into all that follow when V is small.
        return jax.lax.optimization_barrier(jnp.where(enough, lowest, lowest | bit))

    def search(lowest: UInt[Array, "B M 1"], *, unroll: bool) -> UInt[Array, "B M 1"]:
        return jax.lax.fori_loop(0, 32, decide_bit, lowest, unroll=unroll)

    # A GPU's command buffer takes in a `cond`, and its predicate stays on the device, if no loop is
    # inside. Elsewhere the loop compiles faster and runs as fast.
    return jax.lax.platform_dependent(
        jnp.zeros((*keys.shape[:-1], 1), jnp.uint32),
        cuda=partial(search, unroll=True),
        default=partial(search, unroll=False),
    )
