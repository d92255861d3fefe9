"""The decoder layer that a drafter has of its own, for decoding and for training.

The layer has an entry (keys and values) for each pair of a hidden state and the next token. In
decoding, the entries of decided tokens are in the drafter's layer of the cache. In training, the
entries of a whole row are computed at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.text_attention import attend_to_text
from redrafter_jax.models.attention import prefill_attention
from redrafter_jax.models.cache import append
from redrafter_jax.models.decoder_layer import (
    Angles,
    Attend,
    Attention,
    FeedForward,
    norm_weight,
    normalised,
)
from redrafter_jax.models.rotary import rotary_angles, rotary_frequencies
from redrafter_jax.types import Decided, KVCache

# Fields of a layer's configuration that it shares with a target's configuration.
LAYER_FIELDS = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_theta", "rms_norm_eps"),
)
# Outputs of a layer at some tokens, and their keys and values.
Passed = tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]


class PairLayer(nnx.Module):
    """A decoder layer over pairs of a hidden state and the embedding of the next token.

    Attention reads both, each through its own norm. The residual connection carries the hidden
    state alone. A new layer returns the hidden state unchanged, because its output weights are
    zero.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding_norm, self.hidden_norm = norm_weight(config), norm_weight(config)
        self.self_attn = Attention(config, rngs=rngs, inputs=2 * config.hidden_size)
        self.mlp_norm = norm_weight(config)
        self.mlp = FeedForward(config, rngs=rngs)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            last[...] = jnp.zeros_like(last[...])

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> Passed:
        """Return the hidden states after the layer, and the keys and values of the entries.

        Args:
          hidden: hidden states, which the residual connection carries.
          embedded: embedding of the token after each hidden state.
          positions: position of each pair, for the rotary embedding.
          attend: attention over the entries of earlier pairs and of these.
        """
        config = self.config
        pair = (
            normalised(embedded, self.embedding_norm, config),
            normalised(hidden, self.hidden_norm, config),
        )
        x = jnp.concatenate(pair, axis=-1)
        attended, keys, values = self.self_attn(x, angles_of(config, positions), attend)
        x = hidden + attended
        return x + self.mlp(normalised(x, self.mlp_norm, config)), keys, values


def layer_config(
    vocab_size: int, width: int, shape: object, layers: int = 1, **more: Any
) -> TargetConfig:
    """Return the configuration of a drafter's own layers, in the form of a target's configuration.

    Args:
      vocab_size: V, the target's vocabulary size.
      width: width of the layers' inputs and outputs.
      shape: object that has all attributes in `LAYER_FIELDS`.
      layers: number of layers.
      more: further fields of the configuration.

    Raises:
      FieldError: the sizes do not fit each other.
    """
    return TargetConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        max_position_embeddings=1,  # unused: the target's limit applies
        tie_word_embeddings=True,
        eos_token_ids=(),
        **{name: getattr(shape, name) for name in LAYER_FIELDS},
        **more,
    )


def angles_of(config: TargetConfig, positions: Int[Array, "B T"]) -> Angles:
    """Return the rotary angles of a layer at these positions."""
    return rotary_angles(
        positions, rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    )


def read_decided(
    run: Callable[[Int[Array, "B C"], Attend], Passed],
    own: Float[Array, "B D"],
    cache: KVCache,
    decided: Decided,
    scale: float,
) -> tuple[Float[Array, "B D"], KVCache]:
    """Run the layer on decided tokens, and append their entries to the cache.

    Args:
      run: function from positions and attention to the layer's outputs at the tokens.
      own: the layer's output at the last token before `decided`; rows without new tokens keep it.
      cache: the drafter's layer, with the entries before `decided.start`.
      decided: the decided tokens.
      scale: factor on the scores of attention.

    Returns:
      The output at each row's last token, and the cache with the entries of the tokens.
    """
    B, C = decided.tokens.shape
    positions = decided.start[:, None] + jnp.arange(C)
    chain = jnp.broadcast_to(jnp.tri(C, dtype=bool), (B, C, C))
    output, keys, values = run(positions, attend_to_text(cache, 0, chain, scale))
    # Barrier: all reads of the cache must precede the in-place write; see `finish`.
    output, lengths = jax.lax.optimization_barrier((output, cache.lengths))
    cache = cache._replace(lengths=lengths)
    newest = jnp.maximum(decided.count - 1, 0)[:, None, None]
    last = jnp.take_along_axis(output, newest, axis=1)[:, 0].astype(own.dtype)
    cache = append(cache, (keys,), (values,), decided.count)
    return jnp.where(decided.count[:, None] > 0, last, own), cache


def attend_in_rows(
    segments: Int[Array, "B T"],
    scale: float,
    rollout: Sequence[tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]] = (),
) -> Attend:
    """Return the attention of training: a token attends to its own document, up to itself.

    In a rollout, the layer's outputs are its inputs in the next draft round. In later rounds of a
    rollout, a position attends to its own drafted entries instead of the true token's entry.
    `rollout` holds keys and values: first those of the true tokens, then those of each round so
    far. Attention scores are not stored; the backward pass recomputes them.
    """
    within = partial(prefill_attention, segments=segments, scale=scale)

    @jax.checkpoint
    def attend(
        q: Float[Array, "B T Q H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> Float[Array, "B T Q H"]:
        if not rollout:
            return within(q, k, v)
        true, *drafted = rollout
        keys, values = (jnp.stack(part, axis=2) for part in zip(*drafted, (k, v), strict=True))
        return within(q, *true, beside=(keys, values))

    return attend
