"""Tokens gained by target calls, as arrays, with log-probabilities for reports.

The log-probabilities are the target's, before adjustments, temperature, filters and noise.
"""

from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.decoding.accept import log_probs_of
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.types import SOURCES, StepTrace, Verified

# Prompt positions scored at once; the scores of a whole chunk would take too much memory.
_BLOCK = 16


class Scores(NamedTuple):
    """Log-probabilities of tokens, and of the most likely tokens at the same positions.

    Attributes:
      chosen: log-probabilities of the tokens.
      top_tokens: ids of the M most likely tokens at each position.
      top: log-probabilities of `top_tokens`.
      ranks: number of tokens at least as likely as each token, itself included; only for prompts.
    """

    chosen: Float[Array, "*places P"]
    top_tokens: Int[Array, "*places P M"]
    top: Float[Array, "*places P M"]
    ranks: Int[Array, "*places P"] | None = None


class Gains(NamedTuple):
    """Tokens that G rows gained in X target calls, up to P tokens per call.

    The axes `*places` are [G, X], or [G] for a single call.

    Attributes:
      counts: number of tokens that each call gained; 0 for rows that were done.
      tokens: gained tokens, garbage past the counts.
      origins: index in `(*SOURCES, GRAMMAR)` of the source that proposed a token; -1 for the last
        token of each call, which counts as the target's.
      drafted: number of nodes proposed by each of the O sources, padding excluded.
      scores: log-probabilities of the tokens; None if not requested.
      prompt: log-probabilities of the prompt tokens, each at the place of the token before it in
        the chunk; None if not requested.
    """

    counts: Int[Array, "*places"]
    tokens: Int[Array, "*places P"]
    origins: Int[Array, "*places P"]
    drafted: Int[Array, "*places O"]
    scores: Scores | None
    prompt: Scores | None = None


def gains_of_step(
    active: Bool[Array, " G"],
    trace: StepTrace,
    verified: Verified,
    vocab_size: int,
    top: int | None,
    sources: int = len(SOURCES),
) -> Gains:
    """Compute the `Gains` of one decode step.

    Args:
      active: rows that were not done before the step.
      trace: trace of the step.
      verified: outputs of the target.
      vocab_size: V.
      top: M, number of most likely tokens to report per position; None reports no
        log-probabilities.
      sources: O, number of sources of nodes.
    """
    path = trace.accepted.path
    places = jnp.arange(path.shape[1])
    tokens = jnp.take_along_axis(trace.chosen, path, axis=1)
    # The choice at a node is the token of the next node on the path, so its source is that node's;
    # the last choice is the target's bonus token.
    origins = jnp.take_along_axis(trace.tree.origin, jnp.roll(path, -1, axis=1), axis=1)
    origins = jnp.where(places < trace.gained[:, None] - 1, origins, -1)
    by = trace.tree.origin[..., None] == jnp.arange(sources)
    drafted = (by & active[:, None, None]).sum(axis=1, dtype=jnp.int32)
    logits = None
    if top is not None:
        logits = jnp.take_along_axis(verified.logits, path[..., None], axis=1)
    return gains_of(tokens, logits, trace.gained, origins, drafted, vocab_size, top)


def gains_of(
    tokens: Int[Array, "G P"],
    logits: Float[Array, "G P part"] | None,
    counts: Int[Array, " G"],
    origins: Int[Array, "G P"],
    drafted: Int[Array, "G O"],
    vocab_size: int,
    top: int | None,
) -> Gains:
    """Compute the `Gains` of one target call; see `Gains` and `gains_of_step` for the arguments."""
    scores = None
    if top is not None and logits is not None:
        scores = score_tokens(logits, tokens, vocab_size, top)
    return Gains(counts, tokens, origins, drafted, scores)


def score_tokens(
    logits: Float[Array, "G P part"], tokens: Int[Array, "G P"], vocab_size: int, top: int
) -> Scores:
    """Return the log-probabilities of tokens, and of the M = `top` most likely tokens.

    `logits` are the target's scores at the same positions; on a mesh they may be a shard of V.
    """
    whole = all_gather(logits, vocab_size)
    top_logits, top_tokens = jax.lax.top_k(whole, top)
    top_log_probs = top_logits - jax.nn.logsumexp(whole, axis=-1, keepdims=True)
    return Scores(log_probs_of(whole, tokens), top_tokens, top_log_probs)


def score_prompt(
    decoder: Decoder,
    hidden: Float[Array, "G C Z"],
    following: Int[Array, "G C"],
    top: int,
) -> Scores:
    """Return the log-probability and the rank of the token after each token of a chunk.

    Results past the end of the prompt are garbage.

    Args:
      decoder: the target.
      hidden: hidden states at the tokens of the chunk.
      following: the token after each token of the chunk.
      top: M, number of most likely tokens to report per position.
    """
    G, C = following.shape
    V, block = decoder.config.vocab_size, gcd(C, _BLOCK)

    def score(
        _: None, places: tuple[Float[Array, "G block Z"], Int[Array, "G block"]]
    ) -> tuple[None, Scores]:
        at, tokens = places
        tokens = jnp.maximum(tokens, 0)
        whole = all_gather(decoder.logits(at), V)
        own = jnp.take_along_axis(whole, tokens[..., None], axis=-1)
        ranks = (whole >= own).sum(axis=-1, dtype=jnp.int32)
        return None, score_tokens(whole, tokens, V, top)._replace(ranks=ranks)

    def in_blocks(one: Shaped[Array, "G C ..."]) -> Shaped[Array, "blocks G block ..."]:
        return jnp.moveaxis(one.reshape(G, C // block, block, *one.shape[2:]), 1, 0)

    _, scores = jax.lax.scan(score, None, (in_blocks(hidden), in_blocks(following)))
    return jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(G, C, *leaf.shape[3:]), scores
    )
