"""Two drafters in one tree."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.limits import Count, check_fields
from redrafter_jax.drafters.base import Drafter, check_together
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import DecodeState, StepTrace, TokenTree, Verified


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Combined(Drafter):
    """The first drafter's whole tree, and below it at most C nodes that only the second's has."""

    first: Drafter
    second: Drafter
    nodes: Count = field(metadata={"static": True})  # C

    @property
    def max_path(self) -> int:
        return max(self.first.max_path, self.second.max_path)

    @property
    def num_nodes(self) -> int:
        return self.first.num_nodes + self.nodes

    @property
    def names(self) -> tuple[str, ...]:
        return self.first.names + self.second.names

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.first.context_layers or self.second.context_layers

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return self.first.models + self.second.models

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that either drafter refuses, and drafters that read different layers."""
        check_fields(self)
        check_together((self.first, self.second), target)

    def prepare(self, lender: Lender) -> "Combined":
        return Combined(self.first.prepare(lender), self.second.prepare(lender), self.nodes)

    def init(self, hidden: Float[Array, "B Z"]) -> tuple[Any, Any]:
        # The state is donated: no buffer may lie in it twice.
        return self.first.init(hidden), jax.tree.map(jnp.copy, self.second.init(hidden))

    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        tree, other = (
            drafter.propose(decoder, state._replace(drafter=own), noise[:, : drafter.max_path])
            for drafter, own in zip((self.first, self.second), state.drafter, strict=True)
        )
        return merge_trees(tree, other, self.nodes, len(self.first.names))

    def observe(
        self, drafter_state: tuple[Any, Any], verified: Verified, trace: StepTrace
    ) -> tuple[Any, Any]:
        first, second = drafter_state
        return (
            self.first.observe(first, verified, trace),
            self.second.observe(second, verified, trace),
        )


def merge_trees(tree: TokenTree, other: TokenTree, count: int, sources: int) -> TokenTree:
    """Append the first C nodes of another tree that this one lacks; padding nodes fill the rest.

    Nodes are the same if their paths from the root spell the same tokens, so that siblings stay
    distinct. A node comes after its parent in the other tree, so no appended node lacks its parent.
    The tree has so many `sources`; those of the other are counted on from there.
    """
    B, N = tree.tokens.shape
    same = _same_nodes(other, tree)
    missing = (other.tokens >= 0) & ~same.any(axis=2)
    order = jnp.cumsum(missing, axis=1) - 1
    places = missing[:, None] & (order[:, None] == jnp.arange(count)[:, None])
    live, node = places.any(axis=2), jnp.argmax(places, axis=2)

    def take(values: Shaped[Array, "B M"]) -> Shaped[Array, "B C"]:
        return jnp.take_along_axis(values, node, axis=1)

    ours = jnp.argmax(same, axis=2)
    parents = take(jnp.take_along_axis(jnp.where(missing, N + order, ours), other.parents, axis=1))
    above = jnp.take_along_axis(other.mask, node[..., None], axis=1)
    # Of the nodes above, those that this tree has, and those that are appended with it.
    shared = (above[..., None] & same[:, None]).any(axis=2)
    appended = jnp.take_along_axis(above, node[:, None], axis=2) & live[:, None]
    alone = jnp.eye(N + count, dtype=bool)[N:]
    seen = jnp.where(live[..., None], jnp.concatenate([shared, appended], axis=2), alone)

    def score_of_deepest(tree: TokenTree, nodes: Bool[Array, "B C M"]) -> Float[Array, "B C"]:
        deepest = jnp.max(jnp.where(nodes, jnp.arange(nodes.shape[2]), 0), axis=2)
        return jnp.take_along_axis(tree.log_probs, deepest, axis=1)

    # The shared path counts as this tree scores it, the rest as the other does.
    further = take(other.log_probs) - score_of_deepest(other, above & same.any(axis=2)[:, None])
    scores = score_of_deepest(tree, shared) + further

    def beside(
        nodes: Shaped[Array, "B N"], more: Shaped[Array, "B C"], padding: int | float
    ) -> Shaped[Array, "B total"]:
        return jnp.concatenate([nodes, jnp.where(live, more, padding).astype(nodes.dtype)], axis=1)

    return TokenTree(
        tokens=beside(tree.tokens, take(other.tokens), -1),
        parents=beside(tree.parents, parents, 0),
        depth=beside(tree.depth, take(other.depth), 0),
        mask=jnp.concatenate([jnp.pad(tree.mask, ((0, 0), (0, 0), (0, count))), seen], axis=1),
        log_probs=beside(tree.log_probs, scores, -jnp.inf),
        origin=beside(tree.origin, sources + take(other.origin), -1),
    )


def _same_nodes(tree: TokenTree, other: TokenTree) -> Bool[Array, "B N M"]:
    """Which nodes of two trees below the same root spell the same path."""

    def equal(ours: Int[Array, "B N"], theirs: Int[Array, "B M"]) -> Bool[Array, "B N M"]:
        return ours[:, :, None] == theirs[:, None, :]

    depth = equal(tree.depth, other.depth)
    alike = depth & equal(tree.tokens, other.tokens)
    # Two paths of one length are the same if they are alike at every depth: count where they are.
    pairs = jnp.einsum("BNK,BKL->BNL", tree.mask.astype(jnp.float32), alike.astype(jnp.float32))
    pairs = jnp.einsum("BNL,BML->BNM", pairs, other.mask.astype(jnp.float32))
    live = (tree.tokens >= 0)[:, :, None] & (other.tokens >= 0)[:, None, :]
    return live & depth & (pairs == tree.depth[:, :, None] + 1)
