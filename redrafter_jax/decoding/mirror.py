"""Mirror decoding (arXiv 2510.13161): trees drafted ahead for what the target may yet decide.

A target that has come through its first layers guesses, at every node, the tokens that it will
choose (its early exit). Each guess is an outcome of the step: the path to a node is accepted, and a
token follows that is no child of it. Below the likeliest outcomes the drafter drafts the next trees
while the target runs its other layers. A tree so drafted is used if its outcome comes true.
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

# Stands for a log-probability of minus infinity in sums that are products with zeros and ones.
_NEVER = -1e9


class EarlyExit(NamedTuple):
    """What the target guesses after its first layers.

    Attributes:
      tokens: after each node the X likeliest, in falling order.
      log_probs: of these, the noise that the target will choose with included.
      hidden: what stands for the hidden states of all layers; of width 0 for a drafter that reads
        tokens alone.
    """

    tokens: Int[Array, "B N X"]
    log_probs: Float[Array, "B N X"]
    hidden: Float[Array, "B N Z"]


class DrafterRows(NamedTuple):
    """What a drafter keeps of its rows where the target's own state is not.

    Attributes:
      own: its state.
      cache: its layers alone; behind the pages of the texts, those of the outcomes.
      tokens: decided tokens, garbage past them; the root is the one at `cache.lengths`.
      speculates: whether trees are drafted for the row.
      sampling: how the target chooses tokens.
    """

    own: Any
    cache: KVCache
    tokens: Int[Array, "B S"]
    speculates: Bool[Array, " B"]
    sampling: Sampling

    @property
    def view(self) -> View:
        """What a drafter sees of them."""
        lengths = self.cache.lengths
        root = jnp.take_along_axis(self.tokens, lengths[:, None], axis=1)[:, 0]
        return View(self.tokens, lengths, root, self.sampling)


class Outcomes(NamedTuple):
    """M outcomes of a step for each row, as they are guessed.

    Attributes:
      nodes: the last accepted node.
      tokens: the token that follows it.
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
    """What the target would choose after each node, were the layers so far all there are.

    Args:
      decoder: the target.
      begun: its pass over the tree.
      tree: the tree.
      noise: noise of the P positions after the root.
      sampling: the rows' temperature and filters.
      most: X, tokens that are guessed after each node.
      context_layers: whose hidden states the drafter reads; None for one that reads none at all.
    """
    N, V = tree.tokens.shape[1], noise.shape[-1]
    hidden = decoder.exit_states(begun, context_layers or ())[:, :N]

    def of_nodes() -> Float[Array, "B N V"]:
        return jnp.take_along_axis(noise, tree.depth[..., None], axis=1)

    ranking = TreeConfig(beam_width=most, draft_rounds=1)
    log_probs, tokens = rank_tokens(decoder.logits(hidden), of_nodes, sampling, ranking, V)
    return EarlyExit(tokens, log_probs, hidden if context_layers is not None else hidden[..., :0])


def exit_width(mirror: MirrorConfig, tree: TreeConfig, vocab_size: int) -> int:
    """X, which leaves k tokens of a node that are not its children."""
    return min(mirror.candidates + tree.extensions + (tree.lookup_tokens > 0), vocab_size)


def guess_outcomes(tree: TokenTree, guessed: EarlyExit, candidates: int, count: int) -> Outcomes:
    """The M likeliest outcomes, among the k likeliest next tokens of each node.

    An outcome is as likely as its node is reached, times the token's own probability. A node whose
    token was not guessed is as likely as what the guesses leave, and never likelier than the last
    of them.
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
    """The next tree below every outcome: a batch of B * M rows, in which a row's M are neighbours.

    What is read of the paths lies in pages of their own: nothing of the texts changes.

    Args:
      decoder: the target, of which the embedding, last norm and vocabulary projection are used.
      drafter: the drafter.
      rows: its rows.
      tree: what the target verifies.
      guessed: what is read in place of the target's hidden states.
      outcomes: below which trees are drafted.
      config: the shape of the trees.

    Returns:
      The rows, for the cache was written to; the trees.
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
    # The noise of a position is the same in all of a row's branches: it is drawn once.
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
    """What would be decided if each outcome came true, as B * M rows; and their nodes' depth."""
    nodes, M, places = outcomes.nodes, outcomes.nodes.shape[1], jnp.arange(max_path)
    depth = jnp.take_along_axis(tree.depth, nodes, axis=1)
    above = jnp.take_along_axis(tree.mask, nodes[..., None], axis=1)
    at_depth = tree.depth[:, None] == places[:, None]
    path = jnp.argmax(above[:, :, None] & at_depth[:, None], axis=-1)
    path = jnp.where(places <= depth[..., None], path, nodes[..., None]).reshape(len(nodes), -1)
    # Past the end of a path a token may be none.
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
    """Pages that P tokens of an outcome may come to lie in."""
    return 1 + (PAGE + max_path - 2) // PAGE


def fork_pages(cache: KVCache, count: int, max_path: int) -> KVCache:
    """The cache of each row's M outcomes: the row's own pages, and other ones from its end on.

    The last pages of the cache are theirs; the first of an outcome's begins as the row's last.
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
    """The tree of each row that was drafted for what came true, and whether there is one.

    Args:
      trees: from `draft_ahead`.
      outcomes: as they were guessed.
      last: the last accepted node.
      root: the token that the target chose after it.
    """
    B, M = outcomes.nodes.shape
    fits = (outcomes.nodes == last[:, None]) & (outcomes.tokens == root[:, None])
    at = jnp.arange(B) * M + jnp.argmax(fits, axis=1)
    return jax.tree.map(lambda leaf: leaf[at], trees), fits.any(axis=1)


def read_decided(
    decoder: Decoder, drafter: Drafter, rows: DrafterRows, decided: Decided
) -> DrafterRows:
    """The drafter's rows with decided tokens read, of a prompt or of a path."""
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
