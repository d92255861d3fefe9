"""How a row turns scores into a choice: temperature, filters, and noise that drafts may share."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from pallas_kernels.dispatch import on_gpu as on_gpu
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.types import Sampling

Made = TypeVar("Made")

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
    filters = _filters_of(sampling, size or logits.shape[-1])
    none = jnp.full(logits.shape[:-1], -jnp.inf)
    # The branches give a number per row, not filtered logits: what a `cond` gives is written out.
    with jax.named_scope(FILTERS):
        lowest = jax.lax.cond(filters.asked.any(), lambda: filters.lowest(logits), lambda: none)
    return filters.apply(logits, lowest)


def of_filtered(
    make: Callable[[Float[Array, "B M part"]], Made],
    logits: Float[Array, "B M part"],
    sampling: Sampling,
    size: int,
) -> Made:
    """What is made of the filtered logits, for GPUs: of what is written all the same.

    It is made in either branch, so that no kernel writes the bounds of rows that ask for no filter.
    Arguments as in `filter_logits`.
    """
    filters = _filters_of(sampling, size)
    with jax.named_scope(FILTERS):
        return jax.lax.cond(
            filters.asked.any(),
            lambda: make(filters.apply(logits, filters.lowest(logits))),
            lambda: make(filters.apply(logits, None)),
        )


class _Filters(NamedTuple):
    """Of each row; a bound that is infinite, or a floor of 0, keeps every token."""

    size: int
    unit: Float[Array, " B"]
    top_k: Float[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]

    @property
    def asked(self) -> Bool[Array, " B"]:
        return jnp.isfinite(self.top_k) | jnp.isfinite(self.top_p) | (self.min_p > 0)

    def lowest(self, logits: Float[Array, "B M part"]) -> Float[Array, "B M"]:
        """The lowest logit that is kept of each row; -inf where all are."""
        from pallas_kernels.lowest_kept import lowest_kept  # when a step is traced

        bounds = self.top_k, self.top_p, self.min_p
        found = lowest_kept(all_gather(logits, self.size), self.unit, *bounds)
        return jnp.where(self.asked[:, None], found, -jnp.inf)

    def apply(
        self, logits: Float[Array, "B M part"], lowest: Float[Array, "B M"] | None
    ) -> Float[Array, "B M part"]:
        scores = logits / self.unit[:, None, None]
        return scores if lowest is None else jnp.where(logits < lowest[..., None], -jnp.inf, scores)


def _filters_of(sampling: Sampling, size: int) -> _Filters:
    sampled = sampling.temperature > 0
    unit = jnp.where(sampled, sampling.temperature, 1.0)
    top_k = jnp.where(
        sampled & (sampling.top_k < size), sampling.top_k.astype(jnp.float32), jnp.inf
    )
    # Above 0 after rounding, so that the first token is always kept.
    top_p = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny)
    top_p = jnp.where(sampled & (sampling.top_p < 1), top_p, jnp.inf)
    return _Filters(size, unit, top_k, top_p, jnp.where(sampled, sampling.min_p, 0.0))


# Arrays of one shape, reduced together, and how two of their entries become one.
Pair = tuple[Any, Any]
Join = Callable[[Pair, Pair], Pair]
# Parts of a row at most, each of which is a block of threads.
_PARTS = 16


def reduce_parts(
    pair: tuple[Shaped[Array, "... M"], Shaped[Array, "... M"]],
    none: tuple[Array, Array],
    join: Join,
) -> tuple[Shaped[Array, "... parts"], Shaped[Array, "... parts"]]:
    """A reduction of the last axis in a few parts, for GPUs; `join_parts` ends it."""
    size, axis = pair[0].shape[-1], pair[0].ndim - 1
    parts = next(parts for parts in range(_PARTS, 0, -1) if size % parts == 0)
    first, second = (one.reshape(*one.shape[:-1], parts, -1) for one in pair)
    left, right = jax.lax.reduce((first, second), none, join, (axis + 1,))
    return left, right


def join_parts(
    pair: tuple[Shaped[Array, "... parts"], Shaped[Array, "... parts"]], join: Join
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """The parts of `reduce_parts` joined, one by one.

    XLA makes that a part of what follows; of a second reduction it would make another kernel.
    """
    left, right = pair
    return reduce(join, ((left[..., at], right[..., at]) for at in range(left.shape[-1])))
