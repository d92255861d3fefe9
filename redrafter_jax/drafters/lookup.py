"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the text's last tokens.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) needs no head. It
suits edits, summaries and code, which repeat parts of the text. A small head can hardly predict
such repetition from a hidden state.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import chain_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import LOOKUP, KVCache, TokenTree, View

# Maximum length of a match in tokens; longer matches are preferred.
LONGEST_MATCH = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Drafts a chain of the tokens that followed an earlier occurrence of the text's last tokens.

    Trees must have a beam width of 1; the chain has `draft_rounds` tokens. To add such a chain to
    the trees of another drafter, set `TreeConfig.lookup_tokens`.
    """

    @property
    def name(self) -> str:
        return LOOKUP

    @property
    def reads_hidden(self) -> bool:
        return False

    @property
    def default_tree(self) -> TreeConfig:
        return TreeConfig(beam_width=1, draft_rounds=8)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a tree that is not a chain."""
        chain = TreeConfig(beam_width=1, draft_rounds=tree.draft_rounds)
        if tree != chain:
            raise InputError(
                f"tree is {tree}, but prompt lookup drafts a chain; give TreeConfig(beam_width=1, "
                "draft_rounds=...) and nothing else."
            )

    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del target, own, cache, noise
        return look_up(view, tree.draft_rounds)


def look_up(view: View, count: int) -> TokenTree:
    """Draft a chain of C = `count` tokens below each row's root by prompt lookup."""
    drafted, found = prompt_lookup(view.tokens, view.lengths, count)
    return chain_tree(view.root, drafted, found)


def prompt_lookup(
    tokens: Int[Array, "B S"], last: Int[Array, " B"], count: int
) -> tuple[Int[Array, "B C"], Bool[Array, " B"]]:
    """Return C tokens that follow an earlier occurrence of the text's last tokens.

    The longest match of at most `LONGEST_MATCH` tokens is used, and the latest of several longest
    ones. If the copied tokens reach the end of the text, copying starts again after the match, so a
    short pattern repeats.

    Args:
      tokens: the texts.
      last: position of each text's last token; tokens past it are ignored.
      count: C, number of tokens to return.

    Returns:
      The tokens, and whether there is a match. Without a match the tokens are arbitrary.
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
