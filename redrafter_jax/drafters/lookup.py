"""Drafts that need no head: what followed the last time the text read as it does now.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding): edits, summaries and
code repeat themselves or their prompt, which a small head can hardly tell from a hidden state.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Longer matches are sought first, up to so many tokens.
LONGEST_MATCH = 4


def prompt_lookup(
    tokens: Int[Array, "B S"], last: Int[Array, " B"], count: int
) -> tuple[Int[Array, "B C"], Bool[Array, " B"]]:
    """C tokens that the text goes on with if it repeats itself.

    They are what follows the earlier place up to which the text reads as it does at its end: for
    the most tokens, `LONGEST_MATCH` at most, and the latest of several such places. Where the copy
    reaches the text's end it begins again, so that short patterns go on.

    Args:
      tokens: decided tokens, garbage past the last one.
      last: index of the last decided token.
      count: C.

    Returns:
      The tokens, and whether there is such a place; without one they mean nothing.
    """
    B, S = tokens.shape
    place = jnp.arange(S)
    same, matched = jnp.ones((B, S), bool), jnp.zeros((B, S), jnp.int32)
    for back in range(LONGEST_MATCH):
        own = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)
        before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :S]
        same &= (before == own) & (place >= back)
        matched += same
    matched = jnp.where(place < last[:, None], matched, 0)
    most = matched.max(axis=1)
    latest = jnp.max(jnp.where(matched == most[:, None], place, 0), axis=1)
    period = jnp.maximum(last - latest, 1)[:, None]
    copied = latest[:, None] + 1 + jnp.arange(count) % period
    return jnp.take_along_axis(tokens, copied, axis=1), most > 0
