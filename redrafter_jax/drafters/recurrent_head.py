"""Apple's recurrent head (arXiv 2403.09919, section 3) and its variants.

Parameters only. It drafts from the target's hidden states and from the embeddings of the tokens
drafted so far, and knows nothing else of the target, except that some leave the last step, from
features to scores, to the target's vocabulary projection.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafters.head import Dense, DraftHead, make_blocks, run_blocks, score
from redrafter_jax.types import Scorer


class RecurrentHead(DraftHead):
    """`[context ; state]` -> projection -> residual blocks -> head -> the tokens to draft from.

    One set of weights serves every round; the state is zero before the root is fed.
    """

    config: DrafterConfig

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs) -> None:
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

        Raises:
          InputError: there is no scorer, but the head is the target's.
        """
        features = self.features(context, state)
        if self.config.head != "own":
            features = self.head_proj(features)
        return score(features, getattr(self, "lm_head", None), scorer)

    def unroll(
        self,
        hidden: Float[Array, "B C Z"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """See `DraftHead`: the decoder's recurrence, fed with true tokens."""
        context = self.read_context(hidden)
        state = jnp.zeros_like(context)
        for fed in range(rounds):
            own = embedded[:, fed : fed + context.shape[1]].astype(context.dtype)
            state = self.step(state, own)
            yield self.logits(context, state, scorer)
