"""What a request adds to the target's scores before a token is chosen: a bias, penalties, a floor.

All of it is a function of the text so far. At a node of a tree that text goes on with the node's
ancestors, so a tree and plain decoding adjust the scores of a text alike. Order and formulas are
those of vLLM: the bias, then the repetition penalty of arXiv 1909.05858 (section 4.1), which counts
the prompt too, then the penalties of OpenAI's API, which count new tokens alone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.parallel.collectives import own_shard, shard_start
from redrafter_jax.types import Adjustment, Controls, Sampling, TokenTree


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
