"""Prompt lookup: draft what followed when the text last read as it does now. It needs no head.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding): edits, summaries and
code repeat themselves or their prompt, which a small head can hardly tell from a hidden state.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config.limits import Count, check_fields
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import chain_tree
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import DecodeState, TokenTree

# Longer matches are sought first, up to so many tokens.
LONGEST_MATCH = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Draft the tokens that followed the last earlier occurrence of the text's suffix.

    Attributes:
      tokens: C, tokens drafted in one step; a tree has C + 1 nodes.
    """

    tokens: Count = field(default=8, metadata={"static": True})

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def max_path(self) -> int:
        return self.tokens + 1

    @property
    def names(self) -> tuple[str, ...]:
        return ("lookup",)

    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        del decoder, noise
        drafted, found = prompt_lookup(state.tokens, state.cache.lengths, self.tokens)
        return chain_tree(state.root, drafted, found)


def prompt_lookup(
    tokens: Int[Array, "B S"], last: Int[Array, " B"], count: int
) -> tuple[Int[Array, "B C"], Bool[Array, " B"]]:
    """C tokens that the text goes on with if it repeats itself.

    They follow the earlier place whose suffix matches the end of the text: the longest match, of
    `LONGEST_MATCH` tokens at most, and the latest of several. Where the draft reaches the end of
    the text it starts again at the match, so that short patterns go on. What lies past the `last`
    decided token is garbage.

    Returns:
      The tokens, and whether there is a match; without one the tokens mean nothing.
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
    following = latest[:, None] + 1 + jnp.arange(count) % period
    return jnp.take_along_axis(tokens, following, axis=1), most > 0
