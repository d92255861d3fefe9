"""From the target's scores to a chosen token: adjustments, temperature, filters and noise.

Adjustments are biases, penalties and a minimum length. Penalties and minimum length depend on the
text so far, which at a node of a tree includes the node's ancestors. So tree decoding and plain
decoding adjust the scores of a text in the same way.

The order and the formulas are vLLM's. Biases come first. The repetition penalty (arXiv 1909.05858,
section 4.1) comes next, and counts prompt and new tokens. The frequency and presence penalties of
OpenAI's API follow, and count new tokens only. The mask of the tokens that a grammar allows comes
last.
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

# Named scopes of computations that are skipped at run time if no row needs them.
NOISE, FILTERS = "noise", "filters"


def draw_noise(
    sampling: Sampling, positions: Int[Array, " B"], count: int, vocab_size: int
) -> Float[Array, "B P V"]:
    """Return Gumbel noise for all V tokens at P = `count` positions, from `positions` on.

    The noise of greedy rows (temperature 0) is 0. The noise is a pure function of the seed, the
    position in the text and the token id. It does not depend on the batch, the tree or the step.
    The argmax of `log p + noise` is a token drawn from p (Gumbel-max). A drafter that uses the same
    noise can guess the token that will be drawn (shared randomness, arXiv 2408.07978).
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
    """Return Gumbel noise from Threefry keyed by (seed, position).

    Each counter yields two words, which serve two neighbouring tokens. `jax.random.gumbel` is not
    used: it depends on the default generator and on flags, and with its 23 random bits it never
    draws a token less likely than 1e-7.
    """
    keys = seeds.astype(jnp.uint32)[:, None, None], positions.astype(jnp.uint32)[..., None]
    words = _threefry(keys, jnp.arange(-(-vocab_size // 2), dtype=jnp.uint32))

    def noise(bits: UInt[Array, "B P half"]) -> Float[Array, "B P half"]:
        # Small `uniform` gives large noise, and float32 is densest near 0.
        uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-uniform))

    # Barrier: if XLA for CPUs fused the words with their consumers, it would compute every word
    # twice, and without vectorizing.
    even, odd = jax.lax.optimization_barrier((noise(words[0]), noise(words[1])))
    return jnp.stack([even, odd], axis=-1).reshape(*positions.shape, -1)[..., :vocab_size]


def _threefry(
    keys: tuple[UInt[Array, "B 1 1"], UInt[Array, "B P 1"]], counters: UInt[Array, " half"]
) -> tuple[UInt[Array, "B P half"], UInt[Array, "B P half"]]:
    """Return the two words of Threefry-2x32 with 20 rounds for the counters (c, 0).

    The generator is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    The rounds are unrolled: on CPUs, JAX's own implementation loops over them and writes the words
    of each round to memory, which takes seven times as long.
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
    """Divide logits by the temperature, and set tokens that top-k, top-p or min-p drops to -inf.

    The temperature comes first, then top-k, top-p and min-p. Each filter is applied to the tokens
    that the previous filter kept. The order and the definitions are those of Hugging Face's logits
    processors, with one exception: top-p also keeps all tokens that tie with the last kept token.
    Greedy rows (temperature 0) are returned unchanged.

    Args:
      logits: scores of all tokens; on a mesh possibly this device's shard.
      sampling: temperature and filters of the rows.
      size: size of the whole vocabulary; None if `logits` covers it.
    """
    filters = _filters_of(sampling, size or logits.shape[-1])
    none = jnp.full(logits.shape[:-1], -jnp.inf)
    # The outputs of `cond` are written to memory, so it returns a bound per row instead of logits.
    with jax.named_scope(FILTERS):
        lowest = jax.lax.cond(filters.asked.any(), lambda: filters.lowest(logits), lambda: none)
    return filters.apply(logits, lowest)


def of_filtered(
    make: Callable[[Float[Array, "B M part"]], Made],
    logits: Float[Array, "B M part"],
    sampling: Sampling,
    size: int,
) -> Made:
    """Return `make(filter_logits(...))`, computed in a way that is faster on GPUs.

    Use this function if the result of `make` is written to memory anyway. `make` runs inside both
    branches of a `cond`, so no kernel has to write the filters' bounds if no row has a filter. The
    other arguments are those of `filter_logits`.
    """
    filters = _filters_of(sampling, size)
    with jax.named_scope(FILTERS):
        return jax.lax.cond(
            filters.asked.any(),
            lambda: make(filters.apply(logits, filters.lowest(logits))),
            lambda: make(filters.apply(logits, None)),
        )


class _Filters(NamedTuple):
    """The bounds of each row's filters; an infinite bound, or a `min_p` of 0, keeps every token."""

    size: int
    unit: Float[Array, " B"]
    top_k: Float[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]

    @property
    def asked(self) -> Bool[Array, " B"]:
        return jnp.isfinite(self.top_k) | jnp.isfinite(self.top_p) | (self.min_p > 0)

    def lowest(self, logits: Float[Array, "B M part"]) -> Float[Array, "B M"]:
        """The lowest kept logit of each row; -inf if all tokens are kept."""
        from pallas_kernels.lowest_kept import lowest_kept  # only needed while tracing a step

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
    # Rounding must leave this above 0, so that the most likely token is always kept.
    top_p = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny)
    top_p = jnp.where(sampled & (sampling.top_p < 1), top_p, jnp.inf)
    return _Filters(size, unit, top_k, top_p, jnp.where(sampled, sampling.min_p, 0.0))


# Two arrays of the same shape that are reduced together, and the function that joins two entries.
Pair = tuple[Any, Any]
Join = Callable[[Pair, Pair], Pair]
# Maximum number of parts per row; each part is one thread block.
_PARTS = 16


def reduce_parts(
    pair: tuple[Shaped[Array, "... M"], Shaped[Array, "... M"]],
    none: tuple[Array, Array],
    join: Join,
) -> tuple[Shaped[Array, "... parts"], Shaped[Array, "... parts"]]:
    """Reduce the last axis of two arrays to at most 16 parts, for GPUs; see `join_parts`.

    Args:
      pair: the arrays.
      none: the neutral element of `join`, one scalar per array.
      join: function that joins two (entry, entry) pairs.
    """
    size, axis = pair[0].shape[-1], pair[0].ndim - 1
    parts = next(parts for parts in range(_PARTS, 0, -1) if size % parts == 0)
    first, second = (one.reshape(*one.shape[:-1], parts, -1) for one in pair)
    left, right = jax.lax.reduce((first, second), none, join, (axis + 1,))
    return left, right


def join_parts(
    pair: tuple[Shaped[Array, "... parts"], Shaped[Array, "... parts"]], join: Join
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Complete the reduction of `reduce_parts`: join its parts one after the other.

    XLA fuses these joins into the next kernel; a second reduction would be a separate kernel.
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
    """Compute the `Adjustment` of rows from their controls and texts.

    Args:
      controls: the controls of the rows.
      tokens: texts of the rows, garbage from `lengths` on.
      lengths: number of decided tokens: the prompt and all chosen tokens, the root included.
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
    """Adjust the target's scores at each node for the text up to and including the node.

    The counts of the text up to the root are a dense array over V. Below the root, the ancestors of
    a node change the scores of at most N tokens.
    """
    (B, N, part), V = logits.shape, adjustment.seen.shape[-1]
    adjusted = _adjust_rows(logits, adjustment)
    if N > 1:
        tokens, controls = tree.tokens, adjustment.controls
        below = (jnp.arange(N) > 0) & (tokens >= 0)
        above = tree.mask & below[:, None, :]
        # Occurrences of the token of ancestor j on the path to node i.
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
    """Adjust a drafter's scores at M positions for the text up to the root.

    If no row has controls or a grammar, the scores are returned unchanged. Drafted tokens do not
    count for penalties. A grammar's mask is applied only to the first position, right after the
    root. These approximations can lower the acceptance rate, but never change a text.
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
    """Unpack bit masks of the vocabulary, which hold 32 tokens per word, lowest bit first."""
    bits = (masks[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*masks.shape[:2], -1)[..., :vocab_size] == 1


def keep_allowed(
    logits: Float[Array, "B N part"], allowed: Bool[Array, "B _ V"]
) -> Float[Array, "B N part"]:
    """Replace the scores of disallowed tokens with minus infinity."""
    return jnp.where(own_shard(allowed, logits.shape[-1]), logits, -jnp.inf)


def of_drafted(sampling: Sampling, drafted: Int[Array, " U"] | None) -> Sampling:
    """Restrict the vocabulary axes of `sampling` to the U tokens `drafted`; None keeps all V."""
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
    """Adjust scores for the text up to the root, except for the minimum length."""
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
    """Apply bias and penalties.

    `seen` says whether a token is in the text. `counts` is the number of its occurrences after the
    prompt.
    """
    repetition, presence, frequency = (
        one[:, None, None] for one in (controls.repetition, controls.presence, controls.frequency)
    )
    scores = scores + bias
    punished = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(seen, punished, scores)
    return scores - frequency * counts - presence * (counts > 0)
