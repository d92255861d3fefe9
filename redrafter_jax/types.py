"""The arrays that flow through a decode step, and the letters that name their axes.

A row is one text of a batch. The decided tokens of a row are final: the prompt, and the new tokens
that the target has chosen. The last decided token is the root of the next draft tree.

B batch          L target layers            W beam width
T prompt length  Q, K query, key heads      R draft rounds (tokens drafted per beam)
S cache slots    H head dimension           N tree nodes, root included
V vocabulary     D model width              P longest accepted path, root included
E stop tokens    U draftable tokens, U <= V
Z width of joined hidden states (D each)    C nodes added by prompt lookup
O sources of nodes (`SOURCES`)              X extensions kept per round, X >= W

A slot of the cache holds the keys and values of one token. Some letters have a second meaning in
other modules. E is also the width of a head's blocks (`exit_dim`). C is also the number of tokens
in a chunk of a prompt. X is also the number of target calls in one call of the engine, or of
guesses after a node. I and O are also the inputs and outputs of a linear map. G and M are sizes
that each docstring explains.

All types here are `NamedTuple`s: pytrees that pass through every JAX transform.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

# A target's vocabulary projection, applicable to any hidden states of its width; returns float32.
Scorer = Callable[[Float[Array, "... D"]], Float[Array, "... U"]]


class Controls(NamedTuple):
    """Penalties, biases and minimum lengths of the rows, as arrays; see `SamplingConfig`.

    Attributes:
      prompt_lengths: number of prompt tokens; later tokens count as new.
      min_tokens: number of new tokens that a row must have before a stop token is allowed.
      repetition: repetition penalty for tokens in the text; 1 for none.
      presence: penalty for tokens among the new tokens; 0 for none.
      frequency: penalty per occurrence among the new tokens; 0 for none.
      bias_tokens: ids of the I tokens with a bias; ids of V and above are padding.
      biases: the values added to the scores of `bias_tokens`.
    """

    prompt_lengths: Int[Array, " B"]
    min_tokens: Int[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    bias_tokens: Int[Array, "B I"]
    biases: Float[Array, "B I"]


class Adjustment(NamedTuple):
    """The changes of every token's score that `Controls` ask for, given the text of each row.

    For a drafter the vocabulary axis may have length U, the draftable tokens, instead of V.

    Attributes:
      controls: the controls of the rows.
      bias: value added to each token's score.
      seen: whether the token occurs in the text, prompt included.
      counts: occurrences of the token after the prompt.
      stops: whether the token is a stop token of the row.
      short: number of new tokens that the row still needs before a stop token is allowed; 0 or less
        if stop tokens are allowed now.
    """

    controls: Controls
    bias: Float[Array, "B V"]
    seen: Bool[Array, "B V"]
    counts: Float[Array, "B V"]
    stops: Bool[Array, "B V"]
    short: Int[Array, " B"]


class Sampling(NamedTuple):
    """Sampling settings per row, as arrays: new values do not cause a compilation.

    Attributes:
      temperature: 0 is greedy.
      top_k: V or more keeps all tokens.
      top_p: 1 keeps all tokens.
      min_p: 0 keeps all tokens.
      seeds: random seeds; a row's noise depends only on its seed and on the position in the text.
      adjustment: changes of the scores before temperature and filters, set within a step. None if
        no row has such changes; the program for None is compiled separately.
      allowed: whether a grammar allows each token after each of M nodes; if M is 1, only after the
        root. None if every token is allowed; the program for None is compiled separately.
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
      tokens: prompts, left-aligned and padded with zeros to the S cache slots.
      lengths: number of prompt tokens.
      limits: number of tokens, prompt included, at which a row ends.
      stop_tokens: tokens that end a row, padded with -1.
      sampling: sampling settings of the rows.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    stop_tokens: Int[Array, "B E"]
    sampling: Sampling


# The chosen token where the scores are NaN or infinite; -1 is padding.
NO_CHOICE = -2


class Beams(NamedTuple):
    """The extensions that a beam search keeps in each of its R rounds.

    An extension is one of the round's beams followed by one more token. In round 0 the only beam is
    the root. In a later round, the beams are the W best extensions of the round before.

    Attributes:
      tokens: last tokens of the X best extensions of each round, the best first. X = W unless
        `TreeConfig.rerank` is set.
      parents: index of the beam that each extension extends, among the beams of its round.
      log_probs: cumulative log-probability of each extension from the root on; at most 0, never
        NaN.
    """

    tokens: Int[Array, "B R X"]
    parents: Int[Array, "B R X"]
    log_probs: Float[Array, "B R X"]


# Sources of tree nodes: the drafter, and prompt lookup if the tree has `lookup_tokens`.
LOOKUP = "lookup"
SOURCES = ("drafter", LOOKUP)
# The source of nodes that a row's grammar forces; its index follows those of `SOURCES`.
GRAMMAR = "grammar"


class TokenTree(NamedTuple):
    """Each row's draft tokens as a tree, in topological order.

    Node 0 is the root, the row's last decided token; it is its own parent. Rows with fewer nodes
    are padded. A padding node has token -1, log-probability -inf and a mask that holds only the
    node itself. No other node attends to a padding node. The target never chooses token -1, so a
    padding node is never accepted.

    Attributes:
      tokens: the node's token; -1 for padding nodes.
      parents: index of the parent node, smaller than the node's own.
      depth: distance from the root; 0 at the root.
      mask: mask[b, i, j] is True where node j is node i or one of its ancestors.
      log_probs: the drafter's log-probability of the path to the node; 0 at the root.
      origin: index into `(*SOURCES, GRAMMAR)` of the node's source, which proposed it; -1 at the
        root and at padding nodes.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    mask: Bool[Array, "B N N"]
    log_probs: Float[Array, "B N"]
    origin: Int[Array, "B N"]


class CacheShape(NamedTuple):
    """The shape of the layers of a drafter that have keys and values in the cache.

    Attributes:
      layers: number of layers.
      heads: K, key/value heads of each layer.
      head_dim: H, width of a head.
    """

    layers: int
    heads: int
    head_dim: int


class KVCache(NamedTuple):
    """The paged key-value cache of all decided tokens but the root.

    `keys` and `values` have one head-major array of pages per layer: first the target's layers,
    then the drafter's own layers, whose K and H may differ. `table` holds the page numbers of each
    row, at most M. Token i of row b is in slot `i % PAGE` of page `table[b, i // PAGE]`. On a mesh,
    page numbers are local to the device. `lengths` is the number of cached tokens of each row.
    Slots from `lengths` on hold garbage that nothing reads.
    """

    keys: tuple[Float[Array, "pages K page H"], ...]
    values: tuple[Float[Array, "pages K page H"], ...]
    table: Int[Array, "B M"]
    lengths: Int[Array, " B"]


class Verified(NamedTuple):
    """The target's outputs for one pass over the tree.

    Attributes:
      logits: float32 scores of the token after each node; on a mesh possibly a shard of V.
      hidden: hidden states at each node, concatenated: the outputs of the context layers (the
        target layers that the drafter reads), then the last hidden state after the final norm.
      keys: per layer, the keys of the nodes. `rows` is N, or larger on devices that compute padding
        nodes as well.
      values: per layer, the values of the nodes, in the layout of `keys`.
    """

    logits: Float[Array, "B N V"]
    hidden: Float[Array, "B N Z"]
    keys: tuple[Float[Array, "B rows K H"], ...]
    values: tuple[Float[Array, "B rows K H"], ...]


class Halfway(NamedTuple):
    """The state of a target pass after some of its layers.

    Attributes:
      hidden: output of the last computed layer.
      context: outputs of the computed layers that are context layers (read by the drafter).
      keys: per computed layer, the keys of the tokens.
      values: per computed layer, the values of the tokens.
    """

    hidden: Float[Array, "B rows D"]
    context: tuple[Float[Array, "B rows D"], ...]
    keys: tuple[Float[Array, "B rows K H"], ...]
    values: tuple[Float[Array, "B rows K H"], ...]


class Accepted(NamedTuple):
    """The path of nodes whose tokens the target would have chosen itself.

    Attributes:
      path: indices of the nodes from the root to the deepest accepted node, whose index is repeated
        from entry `count` on.
      count: number of nodes on the path, 1 to P.
    """

    path: Int[Array, "B P"]
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]


class Decided(NamedTuple):
    """Decided tokens and the target's hidden states at them: the input of `Drafter.read`.

    The C tokens per row are a chunk of a prompt, or the accepted path of a decode step.

    Attributes:
      tokens: consecutive tokens of each row, garbage past its `count`.
      following: the token after each of `tokens`. Where the text ends there, this is the new root.
      hidden: hidden states at the tokens, concatenated: the outputs of the target layers that the
        drafter reads, then the last hidden state after the final norm.
      start: position of the first of `tokens` in the text, from 0.
      count: number of decided tokens among the C tokens; 0 for a row without new tokens.
    """

    tokens: Int[Array, "B C"]
    following: Int[Array, "B C"]
    hidden: Float[Array, "B C Z"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]


class View(NamedTuple):
    """What a drafter sees of the rows for which it drafts.

    Attributes:
      tokens: decided tokens, prompt included; garbage past them.
      lengths: number of tokens in the cache: all decided tokens but the root.
      root: the last decided token.
      sampling: sampling settings of the rows.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    root: Int[Array, " B"]
    sampling: Sampling


class StepTrace(NamedTuple):
    """The trace of a decode step: what was drafted, chosen and accepted.

    Attributes:
      tree: the verified tree; `tree.origin` holds the source of each node.
      chosen: the token that the target chooses after each node.
      accepted: the accepted path of the tree.
      gained: number of tokens that the row gained: the length of the path, or fewer if the row ends
        within it; 0 if the row was done before the step.
    """

    tree: TokenTree
    chosen: Int[Array, "B N"]
    accepted: Accepted
    gained: Int[Array, " B"]


class DraftReads(NamedTuple):
    """The weights that drafting one tree reads at least, for cost estimates.

    Attributes:
      weights: parts of the drafter's parameters, each with the number of times it is read.
      projections: number of times the target's vocabulary projection of the draftable tokens is
        read.
      embeddings: rows of the target's embedding that are read per row of the batch.
      reading: parts of the drafter's parameters that each step reads once more, to add the decided
        tokens to the drafter's own layers of the cache; () if there are none.
    """

    weights: list[tuple[Any, int]]
    projections: int
    embeddings: int
    reading: Any = ()


class DecodeState(NamedTuple):
    """The state that is carried from one decode step to the next.

    The decided tokens of row b are `tokens[b, : cache.lengths[b] + 1]`, prompt included; the last
    of them is the root, whose keys are not in the cache yet.

    Attributes:
      tokens: decided tokens, garbage past them.
      cache: keys and values of all decided tokens but the root, in the target's and the drafter's
        layers.
      own: the drafter's own state, a pytree of arrays with B rows.
      root: the last decided token.
      speculates: whether trees are drafted for the row; otherwise it gains one token per step.
      done: whether the row has reached a stop token or its limit; a done row no longer changes.
      limits: number of tokens, prompt included, at which a row ends.
      stop_tokens: tokens that end a row, padded with -1.
      sampling: sampling settings of the rows.
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
