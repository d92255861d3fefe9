"""Apple's recurrent head (arXiv 2403.09919, section 3), its variants, and the beams it drafts.

The head drafts from the target's hidden states and from the embeddings of the tokens drafted so
far, and knows nothing else of the target, except that some leave the last step, from features to
scores, to the target's vocabulary projection. The trace of its beam search is the token tree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import RecurrentConfig, TreeConfig
from redrafter_jax.drafters.head_drafter import (
    Dense,
    HeadDrafter,
    HeadWeights,
    make_blocks,
    run_blocks,
)
from redrafter_jax.drafters.ranking import highest, rank_tokens
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.models.linear import Weight, linear, read_rows
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import Beams, KVCache, Sampling, Scorer, TokenTree, View


class RecurrentHead(HeadWeights):
    """`[context ; state]` -> projection -> residual blocks -> head -> the tokens to draft from.

    One set of weights serves every round; the state is zero before the root is fed.
    """

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs) -> None:
        D, E = config.hidden_size, config.exit_dim
        self.config = config
        if config.cell == "simple":
            self.rnn_w = Dense(D, D, bias=False, rngs=rngs)
            self.rnn_u = Dense(D, D, bias=True, rngs=rngs)
        elif config.cell == "gru":
            # Reset gate, update gate and candidate side by side, as PyTorch's GRU has them.
            self.gru_w = Dense(D, 3 * D, bias=True, rngs=rngs)
            self.gru_u = Dense(D, 3 * D, bias=True, rngs=rngs)
        if config.context_layers:
            self.context_proj = Dense(config.context_size, D, bias=False, rngs=rngs)
            # It begins with Apple's context: the last hidden state alone.
            self.context_proj.kernel[...] = jnp.eye(config.context_size, D, D - config.context_size)
        if config.has_input_projection:
            self.input_proj = Dense(2 * D, E, bias=True, rngs=rngs)
        self.blocks = make_blocks(E, config.num_draft_layers, rngs)
        rank = config.head_rank or E
        if config.head != "own":
            self.head_proj = Dense(E, D if config.head == "target" else rank, bias=False, rngs=rngs)
        if config.head != "target":
            self.lm_head = Dense(rank, config.draft_vocab_size, bias=False, rngs=rngs)

    def read_context(self, context: Float[Array, "... Z"]) -> Float[Array, "... D"]:
        """What conditions every round, from the target's hidden states; once per decode step."""
        return self.context_proj(context) if self.config.context_layers else context

    def step(
        self, state: Float[Array, "... D"], embedding: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """The state after a token.

        `SiLU(W e + U s + b)`, the running sum `s + e`, or the gated recurrent unit of
        arXiv 1406.1078, its reset gate where PyTorch's GRU has it (arXiv 1412.3555): after U.
        """
        match self.config.cell:
            case "sum":
                return state + embedding
            case "simple":
                return jax.nn.silu(self.rnn_w(embedding) + self.rnn_u(state))
            case "gru":
                reset_e, update_e, candidate_e = jnp.split(self.gru_w(embedding), 3, axis=-1)
                reset_s, update_s, candidate_s = jnp.split(self.gru_u(state), 3, axis=-1)
                reset = jax.nn.sigmoid(reset_e + reset_s)
                update = jax.nn.sigmoid(update_e + update_s)
                candidate = jnp.tanh(candidate_e + reset * candidate_s)
                return (1 - update) * candidate + update * state

    def features(
        self, context: Float[Array, "... D"], state: Float[Array, "... D"]
    ) -> Float[Array, "... E"]:
        """What the head reads; `context`, of `read_context`, broadcasts against `state`."""
        context = jnp.broadcast_to(context, state.shape)
        x = jnp.concatenate([context, state], axis=-1)
        if self.config.has_input_projection:
            x = self.input_proj(x)
        return run_blocks(self.blocks, x)

    def logits(
        self,
        context: Float[Array, "... D"],
        state: Float[Array, "... D"],
        scorer: Scorer | None = None,
    ) -> Float[Array, "... U"]:
        """Scores of the token after the one that `state` was last fed, float32.

        One for each of the tokens that can be drafted, in their order; see `draft_token_ids`. On a
        mesh, those of this device's part of them. With `head="target"` the scorer makes them, of
        these tokens.
        """
        features = self.features(context, state)
        if self.config.head != "own":
            features = self.head_proj(features)
        if self.config.head != "target":
            return linear(features, self.lm_head.kernel.get_value(), jnp.float32)
        assert scorer is not None, "head='target' has no projection of its own: pass scorer="
        return scorer(features)

    def unroll(
        self,
        hidden: Float[Array, "B C Z"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """See `HeadWeights`: the decoder's recurrence, fed with true tokens."""
        context = self.read_context(hidden)
        state = jnp.zeros_like(context)
        for fed in range(rounds):
            own = embedded[:, fed : fed + context.shape[1]].astype(context.dtype)
            state = self.step(state, own)
            yield self.logits(context, state, scorer)


class _Frontier(NamedTuple):
    """Beams after a round: one before the first round and W after it."""

    tokens: Int[Array, "B beams"]
    states: Float[Array, "B beams D"]
    log_probs: Float[Array, "B beams"]


def beam_search(
    drafter: RecurrentHead,
    embedding: Weight,
    context: Float[Array, "B Z"],
    root: Int[Array, " B"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    tree: TreeConfig,
    scorer: Scorer | None = None,
) -> Beams:
    """Draft R tokens on each of W beams below the root.

    Beams rank by the summed log-probabilities of their tokens, those of `rank_tokens`. Each round
    keeps X of the pairs (beam, token) in two stages: the X best tokens of every beam over U, then
    the X best of those W * X. The first W of them are the beams that the next round goes on from;
    X is W, or with `tree.rerank` as many as the tree can take.

    Args:
      drafter: the recurrent head.
      embedding: the target's token embedding; on a mesh, this device's part of it.
      context: the target's hidden states before the root: the context layers', then the last.
      root: the last decided token.
      noise: noise of the tokens after the root, from `draw_noise`; the first R are used.
      sampling: the rows' temperature and filters.
      tree: W, R, X, sharpness and candidates; neither X nor candidates may exceed U.
      scorer: the target's vocabulary projection of the U tokens, where the drafter has none.
    """
    drafted, U = drafter.draft_token_ids, drafter.config.draft_vocab_size
    W = tree.beam_width
    context = drafter.read_context(context)

    def draft_round(
        frontier: _Frontier, round_noise: Float[Array, "B U"]
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        V = drafter.config.vocab_size
        embedded = read_rows(embedding, frontier.tokens, V, frontier.states.dtype)
        states = drafter.step(frontier.states, embedded)
        logits = drafter.logits(context[:, None], states, scorer)
        best, tokens = rank_tokens(logits, round_noise[:, None], sampling, tree, U)
        totals = (frontier.log_probs[..., None] + best).reshape(len(root), -1)
        log_probs, winners = highest(totals, tree.extensions)
        parents = winners // tree.extensions
        tokens = jnp.take_along_axis(tokens.reshape(totals.shape), winners, axis=1)
        tokens = tokens if drafted is None else drafted[tokens]
        states = jnp.take_along_axis(states, parents[:, :W, None], axis=1)
        return _Frontier(tokens[:, :W], states, log_probs[:, :W]), (tokens, parents, log_probs)

    start = _Frontier(
        root[:, None],
        jnp.zeros_like(context)[:, None],
        jnp.zeros((len(root), 1), jnp.float32),
    )
    rounds = jnp.moveaxis(noise[:, : tree.draft_rounds], 1, 0)
    rounds = rounds if drafted is None else rounds[..., drafted]
    frontier, first = draft_round(start, rounds[0])
    _, rest = jax.lax.scan(draft_round, frontier, rounds[1:])
    trace = jax.tree.map(lambda head, tail: jnp.concatenate([head[None], tail]), first, rest)
    return Beams(*(jnp.moveaxis(leaf, 0, 1) for leaf in trace))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentDrafter(HeadDrafter):
    """A recurrent head, and the beams that it drafts."""

    module = RecurrentHead

    @property
    def name(self) -> str:
        return "recurrent"

    def propose(
        self,
        target: Decoder,
        own: Float[Array, "B Z"],
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del cache
        beams = beam_search(
            self.model.merge(),
            target.embed_tokens.get_value(),
            own,
            view.root,
            noise,
            view.sampling,
            tree,
            self.scorer(target),
        )
        return build_tree(view.root, beams, tree)
