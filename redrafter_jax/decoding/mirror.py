"""Mirror decoding (arXiv 2510.13161): trees drafted ahead for possible outcomes of a step.

An outcome of a step is a pair: the last accepted node, and the token that the target chooses after
that node. The token is not a child of the node, because the child would have been accepted.

The target guesses outcomes after its first layers (early exit). For the most likely outcomes the
drafter drafts the next trees while the target runs its remaining layers. Such a tree is used if its
outcome occurs.

The drafter has a separate `DecodeState`, whose cache holds only the drafter's layers. The pages of
the outcomes follow the pages of the texts.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.accept import path_to
from redrafter_jax.decoding.step import propose, write_tokens
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.ranking import rank_tokens
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Decoder
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import Decided, DecodeState, Halfway, KVCache, Sampling, TokenTree


class EarlyExit(NamedTuple):
    """The target's guesses of its next tokens, from its first layers alone.

    Attributes:
      tokens: the X most likely tokens after each node, most likely first.
      log_probs: log-probabilities of `tokens`, which include the noise with which the target will
        choose.
      hidden: hidden states after the first layers, which replace the hidden states of all layers
        for the drafter; of width 0 for a drafter that reads tokens only.
    """

    tokens: Int[Array, "B N X"]
    log_probs: Float[Array, "B N X"]
    hidden: Float[Array, "B N Z"]


class Outcomes(NamedTuple):
    """M guessed outcomes of a step for each row.

    Attributes:
      nodes: index of the last accepted node in the outcome.
      tokens: the token that the target chooses after this node in the outcome.
      ranks: rank of the token among the guesses after its node, from 0.
    """

    nodes: Int[Array, "B M"]
    tokens: Int[Array, "B M"]
    ranks: Int[Array, "B M"]


def exit_early(
    decoder: Decoder,
    begun: Halfway,
    tree: TokenTree,
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    most: int,
    context_layers: tuple[int, ...] | None,
) -> EarlyExit:
    """Return the tokens that the target would choose if the computed layers were all its layers.

    Args:
      decoder: the target.
      begun: the target's pass over the tree, after its first layers.
      tree: the tree that the target verifies.
      noise: noise of the P positions after the root.
      sampling: sampling settings of the rows.
      most: X, number of guessed tokens per node.
      context_layers: layers whose hidden states the drafter reads; None if it reads tokens only.
    """
    N, V = tree.tokens.shape[1], noise.shape[-1]
    hidden = decoder.exit_states(begun, context_layers or ())[:, :N]

    def of_nodes() -> Float[Array, "B N V"]:
        return jnp.take_along_axis(noise, tree.depth[..., None], axis=1)

    ranking = TreeConfig(beam_width=most, draft_rounds=1)
    log_probs, tokens = rank_tokens(decoder.logits(hidden), of_nodes, sampling, ranking, V)
    return EarlyExit(tokens, log_probs, hidden if context_layers is not None else hidden[..., :0])


def guess_outcomes(tree: TokenTree, guessed: EarlyExit, candidates: int, count: int) -> Outcomes:
    """Return the M most likely outcomes of a step.

    The likelihood of an outcome is the probability that its node is reached, times the probability
    of its token. A node whose token is not among the guesses after its parent gets the probability
    that these guesses leave over, but at most the probability of the least likely guess.

    Args:
      tree: the tree that the target verifies.
      guessed: the guesses after each node.
      candidates: k, number of guesses after each node that are considered, children excluded.
      count: M, number of outcomes to return.
    """
    B, N = tree.tokens.shape
    probs = jnp.exp(guessed.log_probs)

    def of_parents(values: Shaped[Array, "B N X"]) -> Shaped[Array, "B N X"]:
        return jnp.take_along_axis(values, tree.parents[..., None], axis=1)

    found = of_parents(guessed.tokens) == tree.tokens[..., None]
    left = jnp.clip(1 - probs.sum(axis=-1, keepdims=True), 0, probs[..., -1:])
    own = jnp.where(found, of_parents(probs), 0).sum(axis=-1, keepdims=True)
    own = jnp.where(found.any(axis=-1, keepdims=True), own, of_parents(left))[..., 0]
    reached = jnp.where(tree.mask, own.at[:, 0].set(1)[:, None], 1).prod(axis=-1)

    # The root, its own parent, is nobody's child.
    is_child = (tree.parents[:, None] == jnp.arange(N)[:, None]) & (tree.depth[:, None] > 0)
    same = guessed.tokens[..., None] == tree.tokens[:, None, None]
    drafted = (is_child[:, :, None] & same).any(axis=-1)
    best, places = jax.lax.top_k(jnp.where(drafted, -1, probs), candidates)
    tokens = jnp.take_along_axis(guessed.tokens, places, axis=-1).reshape(B, -1)
    never = (best < 0) | (tree.tokens[..., None] < 0)
    likelihoods = jnp.where(never, -1, reached[..., None] * best).reshape(B, -1)
    _, chosen = jax.lax.top_k(likelihoods, count)
    tokens = jnp.take_along_axis(tokens, chosen, axis=1)
    return Outcomes(chosen // candidates, tokens, chosen % candidates)


def draft_ahead(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    tree: TokenTree,
    hidden: Float[Array, "B N Z"],
    outcomes: Outcomes,
    config: TreeConfig,
) -> tuple[DecodeState, TokenTree]:
    """Draft the next tree for every outcome, as a batch of B * M rows.

    Row b M + m of this batch is outcome m of row b. The drafter reads the path of each outcome into
    separate pages, so the pages of the texts do not change.

    Args:
      decoder: the target; its embedding, final norm and vocabulary projection are used.
      drafter: the drafter.
      state: the drafter's state.
      tree: the tree that the target verifies.
      hidden: hidden states at the nodes of the tree, from `EarlyExit`.
      outcomes: outcomes to draft for.
      config: the shape of the trees.

    Returns:
      The state, whose cache now holds the paths of the outcomes, and the drafted trees.
    """
    M, P, V = outcomes.nodes.shape[1], config.max_path, decoder.config.vocab_size
    decided = assume(tree, hidden, outcomes, state.cache.lengths, P)
    branches = read_decided(decoder, drafter, fork(state, M, P), decided)
    # All branches of a row have the same noise at a position, so it is drawn once.
    noise = draw_noise(state.sampling, state.cache.lengths + 2, 2 * P - 1, V)
    row = jnp.repeat(jnp.arange(len(noise)), M)
    noise = noise[row[:, None], decided.count[:, None] - 1 + jnp.arange(P)]
    trees = propose(decoder, drafter, branches, noise, config)
    written = state.cache._replace(keys=branches.cache.keys, values=branches.cache.values)
    return state._replace(cache=written), trees


def assume(
    tree: TokenTree,
    hidden: Float[Array, "B N Z"],
    outcomes: Outcomes,
    lengths: Int[Array, " B"],
    max_path: int,
) -> Decided:
    """Return the accepted path of each outcome as the input of `Drafter.read`, in B * M rows."""
    M, last = outcomes.nodes.shape[1], outcomes.nodes.reshape(-1)
    spread = partial(jnp.repeat, repeats=M, axis=0)
    row = spread(jnp.arange(len(lengths)))[:, None]
    count = tree.depth[row[:, 0], last] + 1
    path, count = path_to(jax.tree.map(spread, tree), last, count, max_path)
    # Past the end of a path there may be padding nodes.
    tokens = jnp.maximum(tree.tokens[row, path], 0)
    inside = jnp.arange(max_path) < count[:, None] - 1
    following = jnp.where(inside, jnp.roll(tokens, -1, axis=1), outcomes.tokens.reshape(-1, 1))
    return Decided(tokens, following, hidden[row, path], spread(lengths), count)


def fork(state: DecodeState, count: int, max_path: int) -> DecodeState:
    """Copy each row of the drafter's state M = `count` times, with the cache of `fork_pages`."""
    small = state._replace(cache=state.cache._replace(keys=(), values=()))
    forks = jax.tree.map(partial(jnp.repeat, repeats=count, axis=0), small)
    return forks._replace(cache=fork_pages(state.cache, count, max_path))


def forked_pages(max_path: int) -> int:
    """Return the maximum number of pages over which the P tokens of an outcome can spread."""
    return 1 + (PAGE + max_path - 2) // PAGE


def fork_pages(cache: KVCache, count: int, max_path: int) -> KVCache:
    """Return a cache with M = `count` rows for each row, one per outcome.

    The outcomes of a row share all pages of the row except the last one. Each outcome has separate
    pages at the end of the cache. The first of these pages starts as a copy of the row's last page,
    because the outcome writes to the rest of that page.
    """
    B, width = cache.table.shape
    table, span = jnp.repeat(cache.table, count, axis=0), forked_pages(max_path)
    lengths = jnp.repeat(cache.lengths, count)
    if not cache.keys:
        return cache._replace(table=table, lengths=lengths)
    first = len(cache.keys[0]) - B * count * span
    pages = first + jnp.arange(B * count * span).reshape(-1, span)
    at = lengths // PAGE
    last = jnp.take_along_axis(table, jnp.minimum(at, width - 1)[:, None], axis=1)[:, 0]
    places = at[:, None] + jnp.arange(span)
    table = table.at[jnp.arange(B * count)[:, None], places].set(pages, mode="drop")

    def copy(layer: Float[Array, "pages K page H"]) -> Float[Array, "pages K page H"]:
        return layer.at[pages[:, 0]].set(layer[last], unique_indices=True)

    keys, values = tuple(map(copy, cache.keys)), tuple(map(copy, cache.values))
    return KVCache(keys, values, table, lengths)


def pick(
    trees: TokenTree, outcomes: Outcomes, last: Int[Array, " B"], root: Int[Array, " B"]
) -> tuple[TokenTree, Int[Array, " B"]]:
    """Return each row's tree for the outcome that occurred, and the outcome's rank in `Outcomes`.

    The rank is -1 if the outcome was not guessed; the tree is then arbitrary.

    Args:
      trees: trees from `draft_ahead`.
      outcomes: the guessed outcomes.
      last: the last accepted node.
      root: the token that the target chose after `last`.
    """
    B, M = outcomes.nodes.shape
    fits = (outcomes.nodes == last[:, None]) & (outcomes.tokens == root[:, None])
    at = jnp.arange(B) * M + jnp.argmax(fits, axis=1)
    rank = jnp.where(fits, outcomes.ranks, -1).max(axis=1)
    return jax.tree.map(lambda leaf: leaf[at], trees), rank


def read_decided(
    decoder: Decoder, drafter: Drafter, state: DecodeState, decided: Decided
) -> DecodeState:
    """Let the drafter read a chunk of a prompt or an accepted path, and return its new state."""
    cache, reads = state.cache, decided.count > 0
    own, layers = drafter.read(decoder, state.own, cache._replace(lengths=decided.start), decided)
    start = jnp.where(reads, decided.start, cache.lengths)
    newest = jnp.maximum(decided.count - 1, 0)[:, None]
    root = jnp.take_along_axis(decided.following, newest, axis=1)[:, 0]
    return state._replace(
        own=own,
        cache=layers._replace(table=cache.table, lengths=start + decided.count),
        tokens=write_tokens(state.tokens, decided.following, start + 1),
        root=jnp.where(reads, root, state.root),
    )
