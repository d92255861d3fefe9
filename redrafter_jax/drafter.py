"""The drafter: Apple's recurrent head (arXiv 2403.09919, section 3), parameters only.

It drafts from the target's last hidden state and from the embeddings of the tokens drafted so far;
it knows nothing else of the target.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import DrafterConfig
from redrafter_jax.model import Model

_WEIGHT_INIT = nnx.initializers.lecun_normal()


class Dense(nnx.Module):
    """An affine map, its kernel stored [in, out]."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(_WEIGHT_INIT(rngs.params(), (width_in, width_out)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(width_out))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = x @ self.kernel[...]
        return y + self.bias[...] if hasattr(self, "bias") else y


class RecurrentHead(nnx.Module):
    """`[context ; state]` -> projection -> residual blocks -> the tokens that can be drafted.

    One set of weights serves every round; the state is zero before the root is fed.
    """

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs) -> None:
        D, E = config.hidden_size, config.exit_dim
        self.config = config
        if config.rnn:
            self.rnn_w = Dense(D, D, bias=False, rngs=rngs)
            self.rnn_u = Dense(D, D, bias=True, rngs=rngs)
        if config.has_input_projection:
            self.input_proj = Dense(2 * D, E, bias=True, rngs=rngs)
        self.blocks = nnx.List(
            [Dense(E, E, bias=True, rngs=rngs) for _ in range(config.num_draft_layers)]
        )
        self.lm_head = Dense(E, config.draft_vocab_size, bias=False, rngs=rngs)

    def step(
        self, state: Float[Array, "... D"], embedding: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """The state after a token: `SiLU(W e + U s + b)`, or `s + e` where there is no RNN."""
        if not self.config.rnn:
            return state + embedding
        return jax.nn.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def features(
        self, context: Float[Array, "... D"], state: Float[Array, "... D"]
    ) -> Float[Array, "... E"]:
        """Input of the vocabulary projection; `context` broadcasts against `state`."""
        context = jnp.broadcast_to(context, state.shape)
        x = jnp.concatenate([context, state], axis=-1)
        if self.config.has_input_projection:
            x = self.input_proj(x)
        for block in self.blocks:
            x = x + jax.nn.silu(block(x))
        return x

    def logits(
        self, context: Float[Array, "... D"], state: Float[Array, "... D"]
    ) -> Float[Array, "... U"]:
        """Scores of the token after the one that `state` was last fed, float32.

        One for each of the tokens that can be drafted, in their order; see `draft_token_ids`.
        """
        features = self.features(context, state)
        return jnp.matmul(features, self.lm_head.kernel[...], preferred_element_type=jnp.float32)

    @property
    def draft_token_ids(self) -> Int[Array, " U"] | None:
        """The token of every score; None where the scores are those of all V tokens."""
        tokens = self.config.draft_tokens
        return None if tokens is None else jnp.asarray(tokens, jnp.int32)


Drafter = Model[DrafterConfig, RecurrentHead]


def init_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """A drafter with random float32 parameters, where training starts."""
    return Model.split(config, RecurrentHead(config, rngs=nnx.Rngs(seed)))
