"""How a row turns scores into a choice: what its text adds to them, temperature, filters, noise.

What is added, a bias, penalties and a least length, is a function of the text so far. At a node of
a tree that text goes on with the node's ancestors, so a tree and plain decoding adjust the scores
of a text alike. Order and formulas are those of vLLM: the bias, then the repetition penalty of
arXiv 1909.05858 (section 4.1), which counts the prompt too, then the penalties of OpenAI's API,
which count new tokens alone. Last come the tokens that a grammar allows.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from pallas_kernels.dispatch import on_gpu as on_gpu
from redrafter_jax.parallel.collectives import all_gather, own_shard, shard_start
from redrafter_jax.types import Adjustment, Controls, Sampling, TokenTree

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


def adjustment_of(
    controls: Controls,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    stop_tokens: Int[Array, "B E"],
    vocab_size: int,
) -> Adjustment:
    """What texts make of the rows' controls.

    Args:
      controls: what the rows ask for.
      tokens: their texts, garbage from `lengths` on.
      lengths: decided tokens, prompts and roots included.
      stop_tokens: tokens that end a row, padded with -1.
      vocab_size: V.
    """
    B, S = tokens.shape
    row, place = jnp.arange(B)[:, None], jnp.arange(S)
    zeros = jnp.zeros((B, vocab_size))

    def numbers(tokens: Int[Array, "B M"], real: Bool[Array, "B M"]) -> Int[Array, "B M"]:
        return jnp.where(real & (tokens >= 0), tokens, vocab_size)

    decided = numbers(tokens, place < lengths[:, None])
    new = numbers(decided, place >= controls.prompt_lengths[:, None])
    stops = numbers(stop_tokens, stop_tokens >= 0)
    return Adjustment(
        controls=controls,
        bias=zeros.at[row, controls.bias_tokens].add(controls.biases, mode="drop"),
        seen=(zeros > 0).at[row, decided].set(True, mode="drop"),
        counts=zeros.at[row, new].add(1.0, mode="drop"),
        stops=(zeros > 0).at[row, stops].set(True, mode="drop"),
        short=controls.min_tokens - (lengths - controls.prompt_lengths),
    )


def adjust_nodes(
    logits: Float[Array, "B N part"], tree: TokenTree, adjustment: Adjustment
) -> Float[Array, "B N part"]:
    """The target's scores after each node of a tree, adjusted for the text down to the node.

    The text above the root is counted densely; a node's ancestors change scores of their own tokens
    alone, which are N at most.
    """
    (B, N, part), V = logits.shape, adjustment.seen.shape[-1]
    adjusted = _adjust_rows(logits, adjustment)
    if N > 1:
        tokens, controls = tree.tokens, adjustment.controls
        below = (jnp.arange(N) > 0) & (tokens >= 0)
        above = tree.mask & below[:, None, :]
        # How often the path to node i has the token of its ancestor j.
        same = (tokens[:, :, None] == tokens[:, None, :]).astype(jnp.float32)
        times = jnp.einsum("BIK,BKJ->BIJ", above.astype(jnp.float32), same)
        at = jnp.broadcast_to((tokens - shard_start(part, V))[:, None], above.shape)
        at = jnp.where(above & (at >= 0) & (at < part), at, part)
        raw = jnp.take_along_axis(logits, jnp.minimum(at, part - 1), axis=2)

        def of_tokens(values: Float[Array, "B V"]) -> Float[Array, "B 1 N"]:
            return jnp.take_along_axis(values, jnp.maximum(tokens, 0), axis=1)[:, None]

        counts = of_tokens(adjustment.counts) + times
        fresh = _adjust(raw, of_tokens(adjustment.bias), jnp.bool_(True), counts, controls)
        row, node = jnp.arange(B)[:, None, None], jnp.arange(N)[:, None]
        adjusted = adjusted.at[row, node, at].set(fresh, mode="drop")
    too_early = (tree.depth < adjustment.short[:, None])[..., None]
    return jnp.where(too_early & own_shard(adjustment.stops, part)[:, None], -jnp.inf, adjusted)


def adjust_drafts(logits: Float[Array, "B M part"], sampling: Sampling) -> Float[Array, "B M part"]:
    """A drafter's scores, adjusted for the text above the root; as they are where nobody asks.

    What is drafted on the way down is not counted, and what may follow it is not known: that costs
    acceptance, and never changes a text. Tokens after the root come first, where some may not be
    chosen.
    """
    adjustment, part = sampling.adjustment, logits.shape[-1]
    if adjustment is not None:
        too_early = (adjustment.short > 0)[:, None] & own_shard(adjustment.stops, part)
        logits = jnp.where(too_early[:, None], -jnp.inf, _adjust_rows(logits, adjustment))
    if sampling.allowed is not None:
        first = keep_allowed(logits[:, :1], sampling.allowed)
        logits = jnp.concatenate([first, logits[:, 1:]], axis=1)
    return logits


def unpack_bits(masks: Int[Array, "B N words"], vocab_size: int) -> Bool[Array, "B N V"]:
    """The tokens whose bits are set, of 32 in each word, the lowest first."""
    bits = (masks[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*masks.shape[:2], -1)[..., :vocab_size] == 1


def keep_allowed(
    logits: Float[Array, "B N part"], allowed: Bool[Array, "B _ V"]
) -> Float[Array, "B N part"]:
    """Scores of the tokens that may be chosen; minus infinity for all others."""
    return jnp.where(own_shard(allowed, logits.shape[-1]), logits, -jnp.inf)


def of_drafted(sampling: Sampling, drafted: Int[Array, " U"] | None) -> Sampling:
    """The sampling for the U tokens that can be drafted; None for all."""
    if drafted is None:
        return sampling
    if sampling.allowed is not None:
        sampling = sampling._replace(allowed=sampling.allowed[..., drafted])
    adjustment = sampling.adjustment
    if adjustment is None:
        return sampling
    return sampling._replace(
        adjustment=adjustment._replace(
            bias=adjustment.bias[:, drafted],
            seen=adjustment.seen[:, drafted],
            counts=adjustment.counts[:, drafted],
            stops=adjustment.stops[:, drafted],
        )
    )


def _adjust_rows(
    logits: Float[Array, "B M part"], adjustment: Adjustment
) -> Float[Array, "B M part"]:
    """Scores adjusted for the text above the root, before its minimum length."""
    part = logits.shape[-1]
    bias, seen, counts = (
        own_shard(one, part)[:, None]
        for one in (adjustment.bias, adjustment.seen, adjustment.counts)
    )
    return _adjust(logits, bias, seen, counts, adjustment.controls)


def _adjust(
    scores: Float[Array, "B M K"],
    bias: Float[Array, "B 1 K"],
    seen: Bool[Array, "#B 1 #K"] | Bool[Array, ""],
    counts: Float[Array, "B _ K"],
    controls: Controls,
) -> Float[Array, "B M K"]:
    """Scores of tokens that a text has `seen`, and that came `counts` times after its prompt."""
    repetition, presence, frequency = (
        one[:, None, None] for one in (controls.repetition, controls.presence, controls.frequency)
    )
    scores = scores + bias
    punished = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(seen, punished, scores)
    return scores - frequency * counts - presence * (counts > 0)
