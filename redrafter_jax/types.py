"""The arrays that flow through a decode step, and the letters that name their axes.

B batch          L target layers            W beam width
T prompt length  Q, K query, key heads      R draft rounds (tokens drafted per beam)
S cache slots    H head dimension           N tree nodes, root included
V vocabulary     D model width              P longest accepted path, root included
E stop tokens    U tokens that can be drafted, V or fewer
Z context width, D for every hidden state in it            C nodes that a second drafter adds
O sources of nodes, those of `SOURCES`                       X extensions of a round, W or more

Elsewhere E is also the width of a head's blocks (`exit_dim`), C a chunk of positions, X the target
calls that an engine makes at once; I and O are the inputs and outputs of a linear map.

All of them are `NamedTuple`s: pytrees that pass through every JAX transform.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

# A target's own vocabulary projection, for whatever is as wide as its hidden states; float32.
Scorer = Callable[[Float[Array, "... D"]], Float[Array, "... U"]]


class Controls(NamedTuple):
    """What rows ask for that depends on their texts, as arrays; see `SamplingConfig`.

    Attributes:
      prompt_lengths: tokens of the prompts; those after them are new.
      min_tokens: new tokens that come before a stop token may.
      repetition: penalty of tokens in the text; 1 for none.
      presence: penalty of new tokens; 0 for none.
      frequency: penalty of a new token for each time that it came; 0 for none.
      bias_tokens: tokens whose scores change, V and above for none; I is any number of them.
      biases: by how much they change.
    """

    prompt_lengths: Int[Array, " B"]
    min_tokens: Int[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    bias_tokens: Int[Array, "B I"]
    biases: Float[Array, "B I"]


class Adjustment(NamedTuple):
    """What the texts so far make of the rows' controls, for every token of the vocabulary.

    For drafters V may be U, the tokens that can be drafted.

    Attributes:
      controls: what the rows ask for.
      bias: what is added to the tokens' scores.
      seen: which tokens are in the text, prompt included.
      counts: how often each came after the prompt.
      stops: which tokens end the row.
      short: tokens that must come before one of these may; 0 and below for none.
    """

    controls: Controls
    bias: Float[Array, "B V"]
    seen: Bool[Array, "B V"]
    counts: Float[Array, "B V"]
    stops: Bool[Array, "B V"]
    short: Int[Array, " B"]


class Sampling(NamedTuple):
    """Per-row choice of the next token, as arrays so that no value of theirs recompiles.

    Attributes:
      temperature: 0 is greedy.
      top_k: V or more keeps all tokens.
      top_p: 1 keeps all tokens.
      min_p: 0 keeps all tokens.
      seeds: with the absolute position, the key of the row's noise.
      adjustment: what scores are changed by before all else, within a step; None where no row asks
        for it, for which other programs are compiled.
      allowed: tokens that may be chosen at each of M nodes, or after the root where M is 1; None
        for all, as above.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seeds: Int[Array, " B"]
    adjustment: Adjustment | None = None
    allowed: Bool[Array, "B M V"] | None = None


class Requests(NamedTuple):
    """A batch of prompts as arrays.

    Attributes:
      tokens: prompts, left-aligned and padded with zeros to the cache slots.
      lengths: tokens per prompt.
      limits: tokens, prompt included, at which a row ends.
      stop_tokens: tokens that end a row, padded with -1.
      sampling: how the rows' tokens are chosen.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    stop_tokens: Int[Array, "B E"]
    sampling: Sampling


# What stands for the choice among scores that are not numbers; padding is -1.
NO_CHOICE = -2


class Beams(NamedTuple):
    """The trace of a beam search.

    Attributes:
      tokens: of each round the tokens of its X best extensions; the first W stay beams, and X is W
        unless the tree is reranked.
      parents: beam of round r - 1 that it extends (0 in round 0).
      log_probs: score of the whole beam, summed from the root; never above 0, nor NaN.
    """

    tokens: Int[Array, "B R X"]
    parents: Int[Array, "B R X"]
    log_probs: Float[Array, "B R X"]


# What proposes nodes: the drafter, and prompt lookup where the tree has tokens of it.
LOOKUP = "lookup"
SOURCES = ("drafter", LOOKUP)
# What proposes nodes beside them where a row is held to a grammar: tokens that it forces.
GRAMMAR = "grammar"


class TokenTree(NamedTuple):
    """Draft tokens in topological order; node 0 is the root and its own parent.

    A padding node (where there are fewer nodes than slots) has token -1, log-probability -inf and
    a mask of itself alone: no other node sees it and its token equals no choice of the target, so
    it is never accepted.

    Attributes:
      tokens: the node's token, -1 for padding nodes.
      parents: index of the parent node, smaller than the node's own.
      depth: 0 at the root.
      mask: mask[b, i, j] is True where node j is node i or one of its ancestors.
      log_probs: the drafter's score of the path to the node; 0 at the root.
      origin: which of `SOURCES` proposed the node, `GRAMMAR` after them; -1 at the root and at
        padding nodes.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    mask: Bool[Array, "B N N"]
    log_probs: Float[Array, "B N"]
    origin: Int[Array, "B N"]


class CacheShape(NamedTuple):
    """The layers that a drafter has in the cache.

    Attributes:
      layers: number of layers.
      heads: K, key/value heads of each.
      head_dim: H, width of a head.
    """

    layers: int
    heads: int
    head_dim: int


class KVCache(NamedTuple):
    """Keys and values of the decided tokens in pages, a tuple over layers, head-major.

    The target's layers come first, the drafter's own after them; these may differ in K and H.
    Token i of row b is in slot `i % PAGE` of page `table[b, i // PAGE]`, on a mesh of this device's
    own pages. Slots at and past `lengths` hold garbage that nothing reads.
    """

    keys: tuple[Float[Array, "pages K page H"], ...]
    values: tuple[Float[Array, "pages K page H"], ...]
    table: Int[Array, "B M"]
    lengths: Int[Array, " B"]


class Verified(NamedTuple):
    """One target pass over the tree.

    Attributes:
      logits: scores of the token after each node, float32; on a mesh maybe a part of V.
      hidden: last hidden state (after the final norm) at each node; before it those of the
        context layers that were asked for, as they leave these layers.
      keys: per layer, the nodes' own keys; of more nodes, on devices that take several at once.
      values: per layer, the nodes' own values; likewise.
    """

    logits: Float[Array, "B N V"]
    hidden: Float[Array, "B N Z"]
    keys: tuple[Float[Array, "B rows K H"], ...]
    values: tuple[Float[Array, "B rows K H"], ...]


class Halfway(NamedTuple):
    """A target pass that has come through some of the layers.

    Attributes:
      hidden: as it leaves the last of them.
      context: of the context layers among them, likewise.
      keys: of each of them, the tokens' own keys.
      values: of each of them, the tokens' own values.
    """

    hidden: Float[Array, "B rows D"]
    context: tuple[Float[Array, "B rows D"], ...]
    keys: tuple[Float[Array, "B rows K H"], ...]
    values: tuple[Float[Array, "B rows K H"], ...]


class Accepted(NamedTuple):
    """The chain of nodes whose tokens the target would have chosen itself.

    Attributes:
      path: nodes from the root to the deepest accepted one, which is repeated from `count` on.
      count: nodes on the path, 1 to P.
    """

    path: Int[Array, "B P"]
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]


class Decided(NamedTuple):
    """Tokens that are decided, and what the target computed at them: what a drafter reads.

    A chunk of a prompt and the path that a decode step accepts are this same event.

    Attributes:
      tokens: consecutive tokens of each row, garbage past its `count`.
      following: the token after each; after the last one of a text that is the root.
      hidden: the target's hidden states at the tokens: of the layers that the drafter reads, as
        they leave these, then the last one, after the final norm.
      start: position of the first token.
      count: how many of the C tokens are decided; 0 for a row to which nothing happened.
    """

    tokens: Int[Array, "B C"]
    following: Int[Array, "B C"]
    hidden: Float[Array, "B C Z"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]


class View(NamedTuple):
    """What a drafter sees of the rows that it drafts for.

    Attributes:
      tokens: decided tokens, prompt included, garbage past them.
      lengths: how many of them are in the cache: all but the root.
      root: the last decided token.
      sampling: how the target chooses tokens.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    root: Int[Array, " B"]
    sampling: Sampling


class StepTrace(NamedTuple):
    """What a decode step decided, for drafters and for whoever measures.

    Attributes:
      tree: the verified tree; `tree.origin` tells which drafter proposed a node.
      chosen: the target's next token at every node.
      accepted: the chain of nodes that spell the target's choices.
      gained: tokens that the row gained: the chain's, unless the row ends earlier; 0 if it is done.
    """

    tree: TokenTree
    chosen: Int[Array, "B N"]
    accepted: Accepted
    gained: Int[Array, " B"]


class DraftReads(NamedTuple):
    """What drafting one tree reads of the models' weights, at the least.

    Attributes:
      weights: parts of the drafter's parameters, each with the number of times that it is read.
      projections: times that the target's vocabulary projection of the tokens to draft is read.
      embeddings: rows of the target's embedding that are read for each row of the batch.
      reading: parts of the drafter's parameters that are read once more for what was decided, by a
        drafter with layers of its own in the cache.
    """

    weights: list[tuple[Any, int]]
    projections: int
    embeddings: int
    reading: Any = ()


class DecodeState(NamedTuple):
    """Everything that changes, or must be remembered, from one decode step to the next.

    The decided tokens of row b are `tokens[b, : cache.lengths[b] + 1]`, prompt included; the last
    of them is the root, whose keys are not in the cache yet.

    Attributes:
      tokens: decided tokens, garbage past them.
      cache: keys and values of all decided tokens but the root, the drafter's own included.
      own: the drafter's own state, a pytree of arrays with B rows.
      root: the last decided token.
      speculates: whether trees are drafted for the row; without one it gains a token a step.
      done: the row met a stop token or its limit; nothing of it changes any more.
      limits: number of tokens, prompt included, at which a row ends.
      stop_tokens: tokens that end a row, padded with -1.
      sampling: how the row's tokens are chosen.
    """

    tokens: Int[Array, "B S"]
    cache: KVCache
    own: Any
    root: Int[Array, " B"]
    speculates: Bool[Array, " B"]
    done: Bool[Array, " B"]
    limits: Int[Array, " B"]
    stop_tokens: Int[Array, "B E"]
    sampling: Sampling
