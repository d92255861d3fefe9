"""Mirror decoding (arXiv 2510.13161): trees drafted ahead for possible outcomes of a step.

After its first layers, the target guesses the tokens that it will choose at every node (its early
exit). Each guess is an outcome of the step: the path to a node is accepted, and is followed by a
token that is not a child of the node. For the most likely outcomes the drafter drafts the next
trees while the target runs its remaining layers. Such a tree is used if its outcome occurs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.config import MirrorConfig, TreeConfig
from redrafter_jax.decoding.step import draft
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.ranking import rank_tokens
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Decoder
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import Decided, Halfway, KVCache, Sampling, TokenTree, View

# Replaces a log-probability of minus infinity, for which 0 * log_prob would be NaN.
_NEVER = -1e9


class EarlyExit(NamedTuple):
    """The target's guesses after its first layers.

    Attributes:
      tokens: the X most likely tokens after each node, most likely first.
      log_probs: log-probabilities of `tokens`, after adding the noise with which the target will
        choose.
      hidden: hidden states after the first layers, which stand in for the hidden states of all
        layers; of width 0 for a drafter that reads tokens only.
    """

    tokens: Int[Array, "B N X"]
    log_probs: Float[Array, "B N X"]
    hidden: Float[Array, "B N Z"]


class DrafterRows(NamedTuple):
    """The drafter's state of its rows, apart from the target's decode state.

    Attributes:
      own: the drafter's state.
      cache: keys and values of the drafter's own layers; the pages of the outcomes follow those of
        the texts.
      tokens: decided tokens, garbage past them; the root is at index `cache.lengths`.
      speculates: whether trees are drafted for the row.
      sampling: sampling settings of the rows.
    """

    own: Any
    cache: KVCache
    tokens: Int[Array, "B S"]
    speculates: Bool[Array, " B"]
    sampling: Sampling

    @property
    def view(self) -> View:
        """The drafter's view of the rows."""
        lengths = self.cache.lengths
        root = jnp.take_along_axis(self.tokens, lengths[:, None], axis=1)[:, 0]
        return View(self.tokens, lengths, root, self.sampling)


class Outcomes(NamedTuple):
    """M guessed outcomes of a step for each row.

    Attributes:
      nodes: index of the last accepted node.
      tokens: the token that the target chooses after this node.
    """

    nodes: Int[Array, "B M"]
    tokens: Int[Array, "B M"]


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


def exit_width(mirror: MirrorConfig, tree: TreeConfig, vocab_size: int) -> int:
    """Return X, the number of tokens to guess per node.

    X is large enough that at least k = `MirrorConfig.candidates` guesses are not children of the
    node.
    """
    return min(mirror.candidates + tree.extensions + (tree.lookup_tokens > 0), vocab_size)


def guess_outcomes(tree: TokenTree, guessed: EarlyExit, candidates: int, count: int) -> Outcomes:
    """Return the M most likely outcomes among the k most likely next tokens of each node.

    The likelihood of an outcome is the probability of reaching its node times the probability of
    its token. If the token of a node was not guessed, the node gets the probability that the
    guesses leave over, but no more than the probability of the least likely guess.
    """
    B, N = tree.tokens.shape

    def of_parents(values: Shaped[Array, "B N X"]) -> Shaped[Array, "B N X"]:
        return jnp.take_along_axis(values, tree.parents[..., None], axis=1)

    log_probs = jnp.maximum(guessed.log_probs, _NEVER)
    found = of_parents(guessed.tokens) == tree.tokens[..., None]
    left = jnp.log(jnp.maximum(1 - jnp.exp(log_probs).sum(axis=-1), jnp.exp(_NEVER)))
    others = jnp.maximum(jnp.minimum(log_probs[..., -1], left), _NEVER)
    own = jnp.where(found, of_parents(log_probs), 0.0).sum(axis=-1)
    own = jnp.where(found.any(axis=-1), own, of_parents(others[..., None])[..., 0])
    own = own.at[:, 0].set(0.0)
    reached = jnp.einsum("BNM,BM->BN", tree.mask.astype(own.dtype), own)

    is_child = tree.parents[:, None] == jnp.arange(N)[:, None]
    same = guessed.tokens[..., None] == tree.tokens[:, None, None]
    drafted = (is_child[:, :, None] & same).any(axis=-1)
    scores = jnp.where(drafted, -jnp.inf, log_probs)
    best, places = jax.lax.top_k(scores, min(candidates, scores.shape[-1]))
    total = jnp.where(tree.tokens[..., None] < 0, -jnp.inf, reached[..., None] + best)
    tokens = jnp.take_along_axis(guessed.tokens, places, axis=-1).reshape(B, -1)
    _, chosen = jax.lax.top_k(total.reshape(B, -1), min(count, tokens.shape[1]))
    return Outcomes(chosen // best.shape[-1], jnp.take_along_axis(tokens, chosen, axis=1))


def draft_ahead(
    decoder: Decoder,
    drafter: Drafter,
    rows: DrafterRows,
    tree: TokenTree,
    guessed: EarlyExit,
    outcomes: Outcomes,
    config: TreeConfig,
) -> tuple[DrafterRows, TokenTree]:
    """Draft the next tree for every outcome, as a batch of B * M rows grouped by row.

    Each outcome's path is read into separate pages, so the pages of the texts do not change.

    Args:
      decoder: the target; its embedding, final norm and vocabulary projection are used.
      drafter: the drafter.
      rows: the drafter's rows.
      tree: the tree that the target verifies.
      guessed: guesses of the target; their hidden states stand in for the hidden states after all
        layers.
      outcomes: outcomes to draft for.
      config: the shape of the trees.

    Returns:
      The rows, whose cache now holds the paths of the outcomes, and the drafted trees.
    """
    M, P = outcomes.nodes.shape[1], config.max_path
    decided, depth = assume(tree, guessed.hidden, outcomes, rows.cache.lengths, P)

    def spread(leaf: Shaped[Array, "B ..."]) -> Shaped[Array, "BM ..."]:
        return jnp.repeat(leaf, M, axis=0)

    forked = fork_pages(rows.cache, M, P)
    own, cache = drafter.read(decoder, jax.tree.map(spread, rows.own), forked, decided)
    places = decided.start[:, None] + 1 + jnp.arange(P)
    tokens = spread(rows.tokens)
    tokens = tokens.at[jnp.arange(len(tokens))[:, None], places].set(decided.following, mode="drop")
    sampling: Sampling = jax.tree.map(spread, rows.sampling)
    lengths = decided.start + decided.count
    root = decided.following[jnp.arange(len(depth)), depth]
    # All branches of a row have the same noise at a position, so it is drawn once.
    V = decoder.config.vocab_size
    noise = draw_noise(rows.sampling, rows.cache.lengths + 2, 2 * P - 1, V)
    row = jnp.repeat(jnp.arange(len(rows.tokens)), M)
    noise = noise[row[:, None], depth[:, None] + jnp.arange(P)]
    trees = draft(
        decoder,
        drafter,
        own,
        cache._replace(lengths=lengths),
        View(tokens, lengths, root, sampling),
        spread(rows.speculates),
        noise,
        config,
    )
    written = rows.cache._replace(keys=cache.keys, values=cache.values)
    return rows._replace(cache=written), trees


def assume(
    tree: TokenTree,
    hidden: Float[Array, "B N Z"],
    outcomes: Outcomes,
    lengths: Int[Array, " B"],
    max_path: int,
) -> tuple[Decided, Int[Array, " BM"]]:
    """Return the tokens that each outcome decides, as B * M rows, and the depth of its node."""
    nodes, M, places = outcomes.nodes, outcomes.nodes.shape[1], jnp.arange(max_path)
    depth = jnp.take_along_axis(tree.depth, nodes, axis=1)
    above = jnp.take_along_axis(tree.mask, nodes[..., None], axis=1)
    at_depth = tree.depth[:, None] == places[:, None]
    path = jnp.argmax(above[:, :, None] & at_depth[:, None], axis=-1)
    path = jnp.where(places <= depth[..., None], path, nodes[..., None]).reshape(len(nodes), -1)
    # Past the end of a path there may be padding nodes.
    tokens = jnp.maximum(jnp.take_along_axis(tree.tokens, path, axis=1), 0).reshape(-1, max_path)
    end = depth.reshape(-1, 1)
    following = jnp.where(
        places < end, jnp.roll(tokens, -1, axis=1), outcomes.tokens.reshape(-1, 1)
    )
    of_path = jnp.take_along_axis(hidden, path[..., None], axis=1)
    states = of_path.reshape(len(tokens), max_path, hidden.shape[-1])
    start = jnp.repeat(lengths, M)
    return Decided(tokens, following, states, start, end[:, 0] + 1), end[:, 0]


def forked_pages(max_path: int) -> int:
    """Return the maximum number of pages over which the P tokens of an outcome can spread."""
    return 1 + (PAGE + max_path - 2) // PAGE


def fork_pages(cache: KVCache, count: int, max_path: int) -> KVCache:
    """Return the cache of each row's M outcomes, which share all pages of the row but its last one.

    Each outcome has pages of its own at the end of the cache. The first of them starts as a copy of
    the row's last page, because the outcome writes to the rest of that page.
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
) -> tuple[TokenTree, Bool[Array, " B"]]:
    """Return each row's tree for the outcome that occurred, and whether it was drafted.

    Args:
      trees: trees from `draft_ahead`.
      outcomes: the guessed outcomes.
      last: the last accepted node.
      root: the token that the target chose after `last`.
    """
    B, M = outcomes.nodes.shape
    fits = (outcomes.nodes == last[:, None]) & (outcomes.tokens == root[:, None])
    at = jnp.arange(B) * M + jnp.argmax(fits, axis=1)
    return jax.tree.map(lambda leaf: leaf[at], trees), fits.any(axis=1)


def read_decided(
    decoder: Decoder, drafter: Drafter, rows: DrafterRows, decided: Decided
) -> DrafterRows:
    """Let the drafter read decided tokens of a prompt or of a path, and return its rows."""
    own, cache = drafter.read(
        decoder, rows.own, rows.cache._replace(lengths=decided.start), decided
    )
    real = jnp.arange(decided.tokens.shape[1]) < decided.count[:, None]
    places = decided.start[:, None] + 1 + jnp.arange(decided.tokens.shape[1])
    places = jnp.where(real, places, rows.tokens.shape[1])
    row = jnp.arange(len(places))[:, None]
    tokens = rows.tokens.at[row, places].set(decided.following, mode="drop")
    lengths = jnp.where(decided.count > 0, decided.start + decided.count, rows.cache.lengths)
    cache = cache._replace(table=rows.cache.table, lengths=lengths)
    return rows._replace(own=own, cache=cache, tokens=tokens)
