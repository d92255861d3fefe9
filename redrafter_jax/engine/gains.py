"""What target calls gained the rows of a batch, as arrays."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.engine.scores import Scores, score_tokens
from redrafter_jax.types import SOURCES, StepTrace, Verified


class Gains(NamedTuple):
    """What G rows gained in X target calls, of up to P tokens each.

    Attributes:
      counts: how many of the P tokens each call gained; 0 of rows that were done.
      tokens: the tokens, garbage past the counts.
      origins: which of `SOURCES` proposed a token, -1 for the target itself.
      drafted: live nodes that each of `SOURCES` proposed.
      scores: of the tokens; None where nobody asks.
      prompt: of the tokens after those of a chunk that was read; None where nobody asks.
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
    """`Gains` of one decode step.

    Args:
      active: rows that were not done before it.
      trace: what it decided.
      verified: what the target computed.
      vocab_size: V.
      top: M; None reports no log-probabilities.
      sources: O, how many sources of nodes are told apart.
    """
    path = trace.accepted.path
    places = jnp.arange(path.shape[1])
    tokens = jnp.take_along_axis(trace.chosen, path, axis=1)
    # The choice at a node is the token of the next node on the path, which somebody proposed;
    # the last choice is the target's bonus.
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
    """`Gains` of one call of the rows."""
    scores = None
    if top is not None and logits is not None:
        scores = score_tokens(logits, tokens, vocab_size, top)
    return Gains(counts, tokens, origins, drafted, scores)
