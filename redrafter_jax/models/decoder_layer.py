"""A decoder layer: attention and feed-forward, their projections and norms."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.models.linear import (
    Joint,
    add_norm,
    joined_linear,
    joined_param,
    linear,
    product_in_parts,
)
from redrafter_jax.models.rotary import rotate
from redrafter_jax.parallel.collectives import all_reduce

Attend = Callable[
    [Float[Array, "B T Q H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    Float[Array, "B T Q H"],
]
Angles = tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}

WEIGHT_INIT = nnx.initializers.normal(0.02)


class Attention(nnx.Module):
    """The projections of grouped-query attention, stored [in, out].

    The query, key and value projections are one weight. The outputs of this weight are grouped by
    key head: the query heads that share a key head, then the key head and its value head.

    Args:
      config: the configuration of the model.
      rngs: random number generators for the initial weights.
      inputs: input width of the query, key and value projections, the axis I of `x`; None takes
        the model's width. The output projection always returns the model's width.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, inputs: int | None = None) -> None:
        K, H = config.num_key_value_heads, config.head_dim
        query_width = config.num_attention_heads * H
        width = config.hidden_size
        inputs = inputs or width
        self.config = config
        widths = query_width // K, H, H
        weights = Joint(("q_proj", "k_proj", "v_proj"), K, widths)
        self.qkv_proj = joined_param(weights, (inputs or width,), partial(_draw, rngs))
        self.o_proj = nnx.Param(_draw(rngs, (query_width, width)))
        biases = Joint(("q_bias", "k_bias", "v_bias"), K, widths)
        self.qkv_bias = joined_param(biases, (), jnp.zeros) if config.attention_bias else None
        self.o_bias = nnx.Param(jnp.zeros(width)) if config.attention_output_bias else None
        self.q_norm = norm_weight(config, H) if config.qk_norm else None
        self.k_norm = norm_weight(config, H) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "B T I"], angles: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Return the output of the attention block, and the tokens' rotated keys and values."""
        attended, k, v = self.attend(x, angles, attend)
        return self.project(attended), k, v

    def attend(
        self, x: Float[Array, "B T I"], angles: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T QH"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Return the concatenated outputs of all heads, and keys and values as in `__call__`."""
        q, k, v = self._heads(x, angles)
        return attend(q, k, v).reshape(*x.shape[:2], -1), k, v

    def project(self, attended: Float[Array, "B T QH"]) -> Float[Array, "B T D"]:
        """Apply the output projection."""
        projected = all_reduce(linear(attended, self.o_proj.get_value()))
        return projected if self.o_bias is None else projected + self.o_bias[...]

    def keys_and_values(
        self, x: Float[Array, "B T I"], angles: Angles
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Return only the tokens' rotated keys and values."""
        return self._heads(x, angles)[1:]

    def _heads(
        self, x: Float[Array, "B T I"], angles: Angles
    ) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        config = self.config
        heads = joined_linear(x, self.qkv_proj, self.qkv_bias)
        heads = heads.reshape(*heads.shape[:-1], -1, config.head_dim)
        if config.qk_norm:
            q, k, v = jnp.split(heads, [-2, -1], axis=-2)
            q, k = normalised(q, self.q_norm, config), normalised(k, self.k_norm, config)
            heads = jnp.concatenate([q, k, v], axis=-2)
        # All heads are rotated as one array, in which the last head of each group is the value.
        # Barrier: attention, and `commit` at the end of the step, read parts of this array, and XLA
        # for GPUs would otherwise compute them twice.
        is_value = jnp.arange(heads.shape[-2]) == heads.shape[-2] - 1
        cosine, sine = (angle[..., None, :] for angle in angles)
        heads = jnp.where(is_value[:, None], heads, rotate(heads, cosine, sine))
        q, k, v = jnp.split(jax.lax.optimization_barrier(heads), [-2, -1], axis=-2)
        return q.reshape(*x.shape[:2], -1, config.head_dim), k[..., 0, :], v[..., 0, :]


def _draw(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    return WEIGHT_INIT(rngs.params(), shape)


class FeedForward(nnx.Module):
    """The gated feed-forward block, SwiGLU or GeGLU (arXiv 2002.05202), stored [in, out].

    The gate and up projections are one weight. The outputs of this weight are grouped, so a mesh
    can split both projections in the same way.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.config = config
        groups = math.gcd(config.num_key_value_heads, inner)
        weights = Joint(("gate_proj", "up_proj"), groups, (inner // groups,) * 2)
        self.gate_up_proj = joined_param(weights, (width,), partial(_draw, rngs))
        self.down_proj = nnx.Param(_draw(rngs, (inner, width)))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.project(self.gated(x))

    def gated(self, x: Float[Array, "B T D"]) -> Float[Array, "B T inner"]:
        """Return the activation of the gate projection, times the up projection."""
        gate, up = jnp.split(joined_linear(x, self.gate_up_proj), 2, axis=-1)
        return (_ACTIVATIONS[self.config.hidden_act](gate) * up).reshape(*x.shape[:2], -1)

    def project(self, gated: Float[Array, "B T inner"]) -> Float[Array, "B T D"]:
        """Apply the down projection."""
        return all_reduce(linear(gated, self.down_proj.get_value()))


class Stream(NamedTuple):
    """The residual stream between two blocks.

    Attributes:
      hidden: the stream, without `parts`.
      parts: the output of the previous block, in parts from `product_in_parts`. The kernel of the
        next block's norm adds them to `hidden`. None if `hidden` already includes the output.
    """

    hidden: Float[Array, "B T D"]
    parts: Float[Array, "parts B T D"] | None = None

    def whole(self) -> Float[Array, "B T D"]:
        """Return the sum of the stream and its parts."""
        if self.parts is None:
            return self.hidden
        return self.hidden + self.parts.sum(axis=0).astype(self.hidden.dtype)

    def enter(
        self, norm: nnx.Param, config: TargetConfig
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Return the sum of the stream and its parts, and this sum after the norm."""
        if self.parts is None:
            return self.hidden, normalised(self.hidden, norm, config)
        *shape, D = self.hidden.shape
        added, normed = add_norm(
            self.hidden.reshape(-1, D),
            self.parts.reshape(len(self.parts), -1, D),
            norm[...],
            epsilon=config.rms_norm_eps,
            zero_centered=config.zero_centered_norms,
        )
        return added.reshape(*shape, D), normed.reshape(*shape, D)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward blocks, each with norms and a residual."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm = norm_weight(config)
        self.attention_output_norm = norm_weight(config) if config.output_norms else None
        self.self_attn = Attention(config, rngs=rngs)
        self.mlp_norm = norm_weight(config)
        self.mlp_output_norm = norm_weight(config) if config.output_norms else None
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], angles: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        stream, k, v = self.through(Stream(x), angles, attend)
        return stream.whole(), k, v

    def through(
        self, stream: Stream, angles: Angles, attend: Attend
    ) -> tuple[Stream, Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Run the layer on the residual stream that the previous layer returned."""
        attention, config = self.self_attn, self.config
        x, normed = stream.enter(self.attention_norm, config)
        attended, k, v = attention.attend(normed, angles, attend)
        parts = None
        if attention.o_bias is None and self.attention_output_norm is None:
            parts = product_in_parts(attended, attention.o_proj.get_value())
        if parts is None:
            projected = attention.project(attended)
            x = x + normalised(projected, self.attention_output_norm, config)
        x, normed = Stream(x, parts).enter(self.mlp_norm, config)
        gated, parts = self.mlp.gated(normed), None
        if self.mlp_output_norm is None:
            parts = product_in_parts(gated, self.mlp.down_proj.get_value())
        if parts is None:
            x = x + normalised(self.mlp.project(gated), self.mlp_output_norm, config)
        return Stream(x, parts), k, v


def norm_weight(config: TargetConfig, size: int | None = None) -> nnx.Param:
    """Create the weight of a norm that scales by 1; `size` defaults to the model's width."""
    shape = size or config.hidden_size
    return nnx.Param(jnp.zeros(shape) if config.zero_centered_norms else jnp.ones(shape))


def normalised(
    x: Float[Array, "..."], norm: nnx.Param | None, config: TargetConfig
) -> Float[Array, "..."]:
    """Apply the model's root-mean-square norm (arXiv 1910.07467); return x if `norm` is None.

    The norm is computed in float32 and returned in the dtype of x. A zero-centered norm multiplies
    by one plus its weight in float32; other norms multiply by their weight in the dtype of x.
    """
    if norm is None:
        return x
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide**2, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(mean + config.rms_norm_eps)
    if config.zero_centered_norms:
        return (scaled * (1 + norm[...].astype(jnp.float32))).astype(x.dtype)
    return scaled.astype(x.dtype) * norm[...]
