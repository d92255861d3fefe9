"""The acceptance rule: keep the draft nodes whose tokens the target would have chosen itself."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.drafters.tree import matching_paths
from redrafter_jax.parallel.collectives import all_reduce, own_shard, shard_start
from redrafter_jax.sampling import (
    Pair,
    adjust_nodes,
    filter_logits,
    join_parts,
    keep_allowed,
    of_filtered,
    on_gpu,
    reduce_parts,
)
from redrafter_jax.types import NO_CHOICE, Accepted, Sampling, TokenTree


def decide(
    tree: TokenTree,
    logits: Float[Array, "B N part"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
) -> tuple[Int[Array, "B N"], Accepted]:
    """Return the token that the target chooses after every node, and the accepted path.

    The rule is the same for greedy and for sampled rows, and for a tree of any shape. Prefill
    applies the rule to a tree of one node, to choose the first token after a prompt.

    Args:
      tree: the verified tree.
      logits: the target's scores of the token after each node; on a mesh possibly a shard of V.
      noise: noise at the P positions after the root, from `draw_noise`.
      sampling: sampling settings of the rows; their `adjustment` and `allowed` may be None.
    """
    if sampling.adjustment is not None:
        logits = adjust_nodes(logits, tree, sampling.adjustment)
    if sampling.allowed is not None:
        logits = keep_allowed(logits, sampling.allowed)
    chosen = choose_tokens(logits, tree.depth, noise, sampling)
    return chosen, accept(tree, chosen, noise.shape[1])


def choose_tokens(
    logits: Float[Array, "B N part"],
    depth: Int[Array, "B N"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
) -> Int[Array, "B N"]:
    """Return the token that the target chooses after every node.

    A node at depth d uses noise[:, d]. If the scores are NaN or infinite, the choice is
    `NO_CHOICE`. The host recognises this value among the new tokens and ends the request.

    Args:
      logits: the target's scores after adjustments and grammar masks, otherwise as in `decide`.
      depth: depth of each node in the tree.
      noise: as in `decide`.
      sampling: as in `decide`; `adjustment` and `allowed` are not used.
    """
    V = noise.shape[-1]

    def score(filtered: Float[Array, "B N part"]) -> Float[Array, "B N part"]:
        own_noise = own_shard(noise, logits.shape[-1])
        of_nodes = jnp.take_along_axis(
            own_noise, depth[..., None], axis=1, mode="promise_in_bounds"
        )
        return filtered + of_nodes

    if not on_gpu():
        return _argmax(score(filter_logits(logits, sampling, V)), V)
    highest = of_filtered(
        lambda filtered: _highest_of_parts(score(filtered), V), logits, sampling, V
    )
    return _argmax_of_parts(highest, V)


def log_probs_of(logits: Float[Array, "B N V"], chosen: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """Return the log-probability of each choice under `softmax(logits)`."""
    picked = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def accept(tree: TokenTree, chosen: Int[Array, "B N"], max_path: int) -> Accepted:
    """Return the path of nodes that match the target's choices.

    A node matches if its token is the target's choice after its parent. A node is accepted if the
    node and all its ancestors match. Siblings have distinct tokens, so the accepted nodes are a
    single path of at most P = `max_path` nodes.
    """
    matches = tree.tokens == jnp.take_along_axis(chosen, tree.parents, axis=1)
    matches = matches.at[:, 0].set(True)
    reached = jnp.where(matching_paths(tree, matches), tree.depth, -1)
    last = jnp.argmax(reached, axis=1)
    count = jnp.max(reached, axis=1) + 1
    return path_to(tree, last, count, max_path)


def path_to(
    tree: TokenTree, last: Int[Array, " B"], count: Int[Array, " B"], max_path: int
) -> Accepted:
    """Return the path from the root to node `last`; the path has `count` nodes."""
    chain = jnp.take_along_axis(tree.mask, last[:, None, None], axis=1)
    at_depth = tree.depth[:, None, :] == jnp.arange(max_path)[:, None]
    path = jnp.argmax(chain & at_depth, axis=-1)
    path = jnp.where(jnp.arange(max_path) < count[:, None], path, last[:, None])
    return Accepted(path.astype(jnp.int32), count.astype(jnp.int32))


def is_stop(tokens: Int[Array, "B M"], stop_tokens: Int[Array, "B E"]) -> Bool[Array, "B M"]:
    """Return whether each token is a stop token of its row, or `NO_CHOICE`."""
    stops = (tokens[:, :, None] == stop_tokens[:, None, :]).any(axis=-1)
    return stops | (tokens == NO_CHOICE)


def _argmax(scores: Float[Array, "B N part"], V: int) -> Int[Array, "B N"]:
    """Return the lowest index of the maximum over all V; `NO_CHOICE` if the maximum is not finite.

    This is `argmax` written as two reductions, because XLA for CPUs can vectorise these.
    """
    top = jnp.max(scores, axis=-1, keepdims=True)
    # NaN becomes infinity first: the maximum of NaN and a number may differ between devices.
    top = all_reduce(jnp.where(top < jnp.inf, top, jnp.inf), jax.lax.pmax)
    index = _numbers(scores, V)
    best = all_reduce(jnp.min(jnp.where(scores == top, index, V - 1), axis=-1), jax.lax.pmin)
    return jnp.where(jnp.isfinite(top[..., 0]), best, NO_CHOICE)


# For GPUs: `_argmax` as one reduction of (score, index) pairs.
_Highest = tuple[Float[Array, "B N parts"], Int[Array, "B N parts"]]


def _highest_of_parts(scores: Float[Array, "B N part"], V: int) -> _Highest:
    index = jnp.broadcast_to(_numbers(scores, V), scores.shape)
    scores = jnp.where(scores < jnp.inf, scores, jnp.inf)
    none = jnp.float32(-jnp.inf), jnp.int32(V - 1)
    return reduce_parts((scores, index), none, _higher)


def _argmax_of_parts(highest: _Highest, V: int) -> Int[Array, "B N"]:
    own, first = join_parts(highest, _higher)
    top = all_reduce(own, jax.lax.pmax)
    best = all_reduce(jnp.where(own == top, first, V - 1), jax.lax.pmin)
    return jnp.where(jnp.isfinite(top), best, NO_CHOICE)


def _higher(one: Pair, other: Pair) -> Pair:
    """Return the better of two (score, index) pairs: the higher score, then the lower index.

    No score is NaN.
    """
    (score, at), (other_score, other_at) = one, other
    ahead = (score > other_score) | ((score == other_score) & (at < other_at))
    return jnp.where(ahead, score, other_score), jnp.where(ahead, at, other_at)


def _numbers(scores: Float[Array, "B N part"], V: int) -> Int[Array, " part"]:
    """Return the token ids of this device's shard."""
    part = scores.shape[-1]
    return shard_start(part, V) + jnp.arange(part, dtype=jnp.int32)
