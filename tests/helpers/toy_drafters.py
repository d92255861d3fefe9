"""Drafters made for tests, against the contract alone."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import chain_tree
from redrafter_jax.models.cache import append, slots_of
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import CacheShape, Decided, KVCache, TokenTree, View

CHAIN = TreeConfig(beam_width=1, draft_rounds=3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RepeatLast(Drafter):
    """Drafts the last token over and over; its own state is how many tokens a row has read."""

    @property
    def name(self) -> str:
        return "repeat"

    @property
    def default_tree(self) -> TreeConfig:
        return CHAIN

    def empty(self, target: Decoder, rows: int) -> Array:
        return jnp.zeros(rows, jnp.int32)

    def read(
        self, target: Decoder, own: Array, cache: KVCache, decided: Decided
    ) -> tuple[Array, KVCache]:
        return jnp.where(decided.count > 0, decided.start + decided.count, own), cache

    def propose(
        self,
        target: Decoder,
        own: Array,
        cache: KVCache,
        view: View,
        noise: Array,
        tree: TreeConfig,
    ) -> TokenTree:
        drafted = jnp.repeat(view.root[:, None], tree.draft_rounds, axis=1)
        return chain_tree(view.root, drafted, own == view.lengths)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RepeatLargest(RepeatLast):
    """Drafts the largest token that it has read; its own state is that token."""

    def read(
        self, target: Decoder, own: Array, cache: KVCache, decided: Decided
    ) -> tuple[Array, KVCache]:
        real = jnp.arange(decided.tokens.shape[1]) < decided.count[:, None]
        return jnp.maximum(own, jnp.where(real, decided.tokens, 0).max(axis=1)), cache

    def propose(
        self,
        target: Decoder,
        own: Array,
        cache: KVCache,
        view: View,
        noise: Array,
        tree: TreeConfig,
    ) -> TokenTree:
        drafted = jnp.repeat(own[:, None], tree.draft_rounds, axis=1)
        return chain_tree(view.root, drafted, own > 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BigramAttention(Drafter):
    """One layer of attention over the text: a token attends to itself, earlier, and drafts what
    followed there. The key of a position is its token, the value the token after it, one-hot."""

    vocab_size: int = field(metadata={"static": True})

    @property
    def name(self) -> str:
        return "bigram"

    @property
    def default_tree(self) -> TreeConfig:
        return CHAIN

    @property
    def cache(self) -> CacheShape:
        return CacheShape(layers=1, heads=1, head_dim=self.vocab_size)

    def read(
        self, target: Decoder, own: tuple[()], cache: KVCache, decided: Decided
    ) -> tuple[tuple[()], KVCache]:
        keys, values = (
            jax.nn.one_hot(tokens, self.vocab_size, dtype=target.dtype)[:, :, None]
            for tokens in (decided.tokens, decided.following)
        )
        return own, append(cache, (keys,), (values,), decided.count)

    def propose(
        self,
        target: Decoder,
        own: tuple[()],
        cache: KVCache,
        view: View,
        noise: Array,
        tree: TreeConfig,
    ) -> TokenTree:
        sides = cache.keys[0], cache.values[0]
        keys, values = (slots_of(side, cache.table)[:, 0] for side in sides)
        place = jnp.arange(keys.shape[1])
        read = place < cache.lengths[:, None]

        def follow(token: Array, _: None) -> tuple[Array, Array]:
            same = jnp.take_along_axis(keys, token[:, None, None], axis=2)[..., 0]
            scores = jnp.where(read, 100.0 * same + 0.1 * place, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=1)
            seen = jnp.where(read[..., None], values, 0.0)
            following = jnp.einsum("BS,BSV->BV", weights, seen).argmax(axis=1)
            return following.astype(jnp.int32), following.astype(jnp.int32)

        _, drafted = jax.lax.scan(follow, view.root, length=tree.draft_rounds)
        return chain_tree(view.root, drafted.T, jnp.ones(len(view.root), bool))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForOneTarget(RepeatLast):
    """Refuses targets of another width, and every tree but its own."""

    hidden_size: int = field(metadata={"static": True})

    def check(self, target: TargetConfig) -> None:
        assert target.hidden_size == self.hidden_size

    def check_tree(self, tree: TreeConfig) -> None:
        assert tree == CHAIN


class Undecorated(RepeatLast):
    """Lacks `register_dataclass`."""


Own = Any
