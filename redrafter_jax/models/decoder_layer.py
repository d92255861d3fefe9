"""A decoder layer: attention and feed-forward, their projections and norms."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.models.linear import linear
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
    """Projections of grouped-query attention, stored [in, out].

    They read as many `inputs` as are given, by default the model's width, which the output has.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, inputs: int | None = None) -> None:
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        width = config.hidden_size
        inputs = inputs or width
        self.config = config
        self.q_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (inputs, query_width)))
        self.k_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (inputs, key_width)))
        self.v_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (inputs, key_width)))
        self.o_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (query_width, width)))
        self.q_bias = _zeros(query_width) if config.attention_bias else None
        self.k_bias = _zeros(key_width) if config.attention_bias else None
        self.v_bias = _zeros(key_width) if config.attention_bias else None
        self.o_bias = _zeros(width) if config.attention_output_bias else None
        self.q_norm = norm_weight(config, config.head_dim) if config.qk_norm else None
        self.k_norm = norm_weight(config, config.head_dim) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "B T I"], angles: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """The block's output, and the keys (rotated) and values of the tokens in x."""
        q = rotate(self._by_head(x, self.q_proj, self.q_bias, self.q_norm), *angles)
        k, v = self.keys_and_values(x, angles)
        # A barrier, for attention reads them now and `commit` at the end of the step: XLA for GPUs
        # would keep their products in float32 parts until then, to add them up a second time.
        k, v = jax.lax.optimization_barrier((k, v))
        attended = attend(q, k, v).reshape(*x.shape[:2], -1)
        projected = all_reduce(linear(attended, self.o_proj.get_value()))
        return _add(projected, self.o_bias), k, v

    def keys_and_values(
        self, x: Float[Array, "B T I"], angles: Angles
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """The keys (rotated) and values of the tokens in x."""
        k = rotate(self._by_head(x, self.k_proj, self.k_bias, self.k_norm), *angles)
        return k, self._by_head(x, self.v_proj, self.v_bias)

    def _by_head(
        self,
        x: Float[Array, "B T I"],
        projection: nnx.Param,
        bias: nnx.Param | None,
        norm: nnx.Param | None = None,
    ) -> Float[Array, "B T heads H"]:
        projected = _add(linear(x, projection.get_value()), bias)
        by_head = projected.reshape(*x.shape[:2], -1, self.config.head_dim)
        return normalised(by_head, norm, self.config)


def _add(product: Float[Array, "B T out"], bias: nnx.Param | None) -> Float[Array, "B T out"]:
    return product if bias is None else product + bias[...]


def _zeros(size: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(size))


class FeedForward(nnx.Module):
    """The gated feed-forward block, SwiGLU or GeGLU (arXiv 2002.05202), stored [in, out]."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.config = config
        self.gate_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (width, inner)))
        self.up_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (width, inner)))
        self.down_proj = nnx.Param(WEIGHT_INIT(rngs.params(), (inner, width)))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = _ACTIVATIONS[self.config.hidden_act](linear(x, self.gate_proj.get_value()))
        gated = gate * linear(x, self.up_proj.get_value())
        return all_reduce(linear(gated, self.down_proj.get_value()))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with its norms and its residual."""

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
        config = self.config
        attended, k, v = self.self_attn(normalised(x, self.attention_norm, config), angles, attend)
        x = x + normalised(attended, self.attention_output_norm, config)
        fed = self.mlp(normalised(x, self.mlp_norm, config))
        return x + normalised(fed, self.mlp_output_norm, config), k, v


def norm_weight(config: TargetConfig, size: int | None = None) -> nnx.Param:
    """The weight of a norm that does not scale; of the model's width, unless a size is given."""
    shape = size or config.hidden_size
    return nnx.Param(jnp.zeros(shape) if config.zero_centered_norms else jnp.ones(shape))


def normalised(
    x: Float[Array, "..."], norm: nnx.Param | None, config: TargetConfig
) -> Float[Array, "..."]:
    """Through the model's root-mean-square norm (arXiv 1910.07467), where there is one.

    It is computed in float32 and returned in x's dtype. A zero-centered one multiplies by one plus
    its weight, before the result is cast.
    """
    if norm is None:
        return x
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide**2, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(mean + config.rms_norm_eps)
    if config.zero_centered_norms:
        return (scaled * (1 + norm[...].astype(jnp.float32))).astype(x.dtype)
    return scaled.astype(x.dtype) * norm[...]
