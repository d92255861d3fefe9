"""The one acceptance rule: keep the nodes whose token the target chose itself."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.drafters.tree import matching_paths
from redrafter_jax.parallel.collectives import all_reduce, own_shard, shard_start
from redrafter_jax.sampling import filter_logits, on_gpu
from redrafter_jax.types import NO_CHOICE, Accepted, Sampling, TokenTree


def decide(
    tree: TokenTree,
    logits: Float[Array, "B N part"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
) -> tuple[Int[Array, "B N"], Accepted]:
    """The target's choice at every node, and the chain of nodes that spell its choices.

    One rule for greedy and sampled rows, with a tree and without: prefill decides a prompt's first
    token by it too.

    Args:
      tree: the verified tree.
      logits: the target's scores of the token after each node; on a mesh maybe a part of V.
      noise: noise of the P positions after the root, from `draw_noise`.
      sampling: the rows' temperature and filters.
    """
    chosen = choose_tokens(logits, tree.depth, noise, sampling)
    return chosen, accept(tree, chosen, noise.shape[1])


def choose_tokens(
    logits: Float[Array, "B N part"],
    depth: Int[Array, "B N"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
) -> Int[Array, "B N"]:
    """The target's next token at every node, greedy and sampled alike; see `decide`.

    A node at depth d chooses with noise[:, d]. Where scores are NaN or infinite the choice is
    `NO_CHOICE`, which is no token, and so comes to the host with the tokens.
    """
    V = noise.shape[-1]
    own_noise = own_shard(noise, logits.shape[-1])
    node_noise = jnp.take_along_axis(own_noise, depth[..., None], axis=1)
    return _argmax(filter_logits(logits, sampling, V) + node_noise, V)


def log_probs_of(logits: Float[Array, "B N V"], chosen: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """Log-probability of each choice under `softmax(logits)`: no temperature, filters or noise."""
    picked = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def accept(tree: TokenTree, chosen: Int[Array, "B N"], max_path: int) -> Accepted:
    """The chain of nodes that spell the target's own choices.

    A node matches if its token is what the target chose at its parent, and is accepted if it and
    all its ancestors match. Siblings carry distinct tokens, so the accepted nodes are one chain, of
    P nodes at most.
    """
    matches = tree.tokens == jnp.take_along_axis(chosen, tree.parents, axis=1)
    matches = matches.at[:, 0].set(True)
    reached = jnp.where(matching_paths(tree, matches), tree.depth, -1)
    last = jnp.argmax(reached, axis=1)
    count = jnp.max(reached, axis=1) + 1

    chain = jnp.take_along_axis(tree.mask, last[:, None, None], axis=1)
    at_depth = tree.depth[:, None, :] == jnp.arange(max_path)[:, None]
    path = jnp.argmax(chain & at_depth, axis=-1)
    path = jnp.where(jnp.arange(max_path) < count[:, None], path, last[:, None])
    return Accepted(path.astype(jnp.int32), count.astype(jnp.int32))


def is_stop(tokens: Int[Array, "B M"], stop_tokens: Int[Array, "B E"]) -> Bool[Array, "B M"]:
    """Which tokens end their row; `NO_CHOICE` always does."""
    stops = (tokens[:, :, None] == stop_tokens[:, None, :]).any(axis=-1)
    return stops | (tokens == NO_CHOICE)


def _argmax(scores: Float[Array, "B N part"], V: int) -> Int[Array, "B N"]:
    """The lowest index of the maximum over all V; `NO_CHOICE` where that is not finite.

    CPUs have it as two reductions, which they can vectorise, GPUs as one of pairs.
    """
    part = scores.shape[-1]
    index = shard_start(part, V) + jnp.arange(part, dtype=jnp.int32)
    # NaN becomes infinite first: of NaN and a number the devices of a mesh may take either.
    if on_gpu():
        top, first = _first_highest(jnp.where(scores < jnp.inf, scores, jnp.inf), index)
        own, top = top, all_reduce(top, jax.lax.pmax)
        best = all_reduce(jnp.where(own == top, first, V - 1), jax.lax.pmin)
        return jnp.where(jnp.isfinite(top), best, NO_CHOICE)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = all_reduce(jnp.where(top < jnp.inf, top, jnp.inf), jax.lax.pmax)
    best = all_reduce(jnp.min(jnp.where(scores == top, index, V - 1), axis=-1), jax.lax.pmin)
    return jnp.where(jnp.isfinite(top[..., 0]), best, NO_CHOICE)


def _first_highest(
    scores: Float[Array, "B N part"], index: Int[Array, " part"]
) -> tuple[Float[Array, "B N"], Int[Array, "B N"]]:
    """The highest of each row and the lowest index where it stands; no score is NaN."""

    def higher(one: Any, other: Any) -> Any:
        (score, at), (other_score, other_at) = one, other
        ahead = (score > other_score) | ((score == other_score) & (at < other_at))
        return jnp.where(ahead, score, other_score), jnp.where(ahead, at, other_at)

    pairs = scores, jnp.broadcast_to(index, scores.shape)
    least = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
    return jax.lax.reduce(pairs, least, higher, (2,))
