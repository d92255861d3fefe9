"""From a beam search's trace to a token tree: parents, node budget, ancestor mask."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import DraftConfig
from redrafter_jax.types import Beams, TokenTree


def build_tree(root: Int[Array, " B"], beams: Beams, draft: DraftConfig) -> TokenTree:
    """The tree of a beam trace, cut to the node budget.

    The (parent beam, token) pairs of a round are all distinct, so the trace is a tree without any
    search for shared prefixes: pair w of round r is node `1 + r * W + w`. Its N best nodes in
    their old order keep parents before children and hold every node's ancestors, for a child never
    scores above its parent and ties go to the lower index.
    """
    nodes = _trace_nodes(root, beams)
    if draft.final_beams_only:
        nodes = _keep_final_beams(nodes, draft)
    if draft.budget < draft.max_nodes:
        nodes = _keep_best(nodes, draft.budget)
    tokens, parents, depth, log_probs = nodes
    live = log_probs > -jnp.inf
    parents = jnp.where(live, parents, 0)
    mask = ancestor_mask(parents, draft.draft_rounds)
    # A dead slot must be nobody's match, ancestor or child.
    alone = jnp.eye(draft.budget, dtype=bool)
    return TokenTree(
        tokens=jnp.where(live, tokens, -1),
        parents=parents,
        depth=jnp.where(live, depth, 0),
        mask=jnp.where(live[:, :, None], mask, alone),
        log_probs=log_probs,
    )


def root_tree(root: Int[Array, " B"]) -> TokenTree:
    """The one-node tree: plain autoregressive decoding."""
    zeros = jnp.zeros((len(root), 1), jnp.int32)
    return TokenTree(
        tokens=root[:, None],
        parents=zeros,
        depth=zeros,
        mask=jnp.ones((len(root), 1, 1), bool),
        log_probs=jnp.zeros((len(root), 1), jnp.float32),
    )


def ancestor_mask(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """mask[b, i, j]: node j is node i or above it; looks `max_depth` parents up from every node."""
    B, N = parents.shape
    nodes = jnp.arange(N)
    # Each turn doubles the ancestors known of a node by those of the farthest one. One parent at a
    # time would be a chain of lookups, for which XLA's time grows exponentially with its length.
    path = jnp.broadcast_to(nodes[:, None], (B, N, 1))
    farthest = parents
    for _ in range(max_depth.bit_length()):
        above = jnp.take_along_axis(path, farthest[..., None], axis=1)
        path = jnp.concatenate([path, above], axis=2)
        farthest = jnp.take_along_axis(farthest, farthest, axis=1)
    return (path[..., : max_depth + 1, None] == nodes).any(axis=2)


# Tokens, parents, depth and log-probabilities: of the whole trace, and of the nodes kept.
_Nodes = tuple[Int[Array, "B M"], Int[Array, "B M"], Int[Array, "B M"], Float[Array, "B M"]]
_Kept = tuple[Int[Array, "B N"], Int[Array, "B N"], Int[Array, "B N"], Float[Array, "B N"]]


def _trace_nodes(root: Int[Array, " B"], beams: Beams) -> _Nodes:
    """Tokens, parents, depth and log-probabilities of the whole trace below the root."""
    B, R, W = beams.tokens.shape
    rounds = jnp.arange(R, dtype=jnp.int32)[:, None]
    parents = jnp.where(rounds == 0, 0, 1 + (rounds - 1) * W + beams.parents)
    depth = jnp.broadcast_to(rounds + 1, (B, R, W))

    def below(first: Array, rest: Array) -> Array:
        return jnp.concatenate([first[:, None], rest.reshape(B, R * W)], axis=1)

    zeros = jnp.zeros_like(root)
    return (
        below(root, beams.tokens),
        below(zeros, parents),
        below(zeros, depth),
        below(zeros.astype(jnp.float32), beams.log_probs),
    )


def _keep_final_beams(nodes: _Nodes, draft: DraftConfig) -> _Nodes:
    """Log-probability -inf for every node that no beam of the last round descends from."""
    tokens, parents, depth, log_probs = nodes
    mask = ancestor_mask(parents, draft.draft_rounds)
    kept = mask[:, -draft.beam_width :].any(axis=1)
    return tokens, parents, depth, jnp.where(kept, log_probs, -jnp.inf)


def _keep_best(nodes: _Nodes, budget: int) -> _Kept:
    """The `budget` most likely nodes in their old order, parents renumbered."""
    tokens, parents, depth, log_probs = nodes
    _, best = jax.lax.top_k(log_probs, budget)
    order = jnp.sort(best, axis=1)

    def pick(values: Array) -> Array:
        return jnp.take_along_axis(values, order, axis=1)

    kept = (order[:, :, None] == jnp.arange(tokens.shape[1])).any(axis=1)
    number = jnp.cumsum(kept, axis=1) - 1
    parents = jnp.take_along_axis(number, pick(parents), axis=1)
    return pick(tokens), parents, pick(depth), pick(log_probs)
