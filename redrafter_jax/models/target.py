"""The target: a decoder of the Llama kind that verifies a token tree in one pass."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import TargetConfig, YarnScaling
from redrafter_jax.models.attention import prefill_attention, tree_attention
from redrafter_jax.models.cache import append
from redrafter_jax.models.layers import rms_norm, rotary_angles, rotate, swiglu
from redrafter_jax.models.rotary import rotary_frequencies
from redrafter_jax.parallel.collectives import all_gather, all_reduce_sum, gather_rows
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import KVCache, Scorer, TokenTree, Verified

Attend = Callable[
    [Float[Array, "B T Q H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    Float[Array, "B T Q H"],
]
Angles = tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]

_WEIGHT_INIT = nnx.initializers.normal(0.02)


class Attention(nnx.Module):
    """Projections of grouped-query attention, stored [in, out]."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        width = config.hidden_size
        self.head_dim = config.head_dim
        self.epsilon = config.rms_norm_eps
        self.q_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (width, query_width)))
        self.k_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (width, key_width)))
        self.v_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (width, key_width)))
        self.o_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (query_width, width)))
        self.q_bias = _zeros(query_width) if config.attention_bias else None
        self.k_bias = _zeros(key_width) if config.attention_bias else None
        self.v_bias = _zeros(key_width) if config.attention_bias else None
        self.o_bias = _zeros(width) if config.attention_output_bias else None
        self.q_norm = _ones(config.head_dim) if config.qk_norm else None
        self.k_norm = _ones(config.head_dim) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "B T D"], angles: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """The block's output, and the keys (rotated) and values of the tokens in x."""

        def heads(
            projection: nnx.Param, bias: nnx.Param | None, norm: nnx.Param | None = None
        ) -> Float[Array, "B T heads H"]:
            projected = _add(x @ projection[...], bias).reshape(*x.shape[:2], -1, self.head_dim)
            return projected if norm is None else rms_norm(projected, norm[...], self.epsilon)

        q = rotate(heads(self.q_proj, self.q_bias, self.q_norm), *angles)
        k = rotate(heads(self.k_proj, self.k_bias, self.k_norm), *angles)
        v = heads(self.v_proj, self.v_bias)
        # Held, for attention reads them now and `commit` at the end of the step: XLA for GPUs would
        # keep their products in float32 parts until then, to add them up a second time.
        k, v = jax.lax.optimization_barrier((k, v))
        attended = attend(q, k, v).reshape(*x.shape[:2], -1)
        return _add(all_reduce_sum(attended @ self.o_proj[...]), self.o_bias), k, v


def _add(product: Float[Array, "B T out"], bias: nnx.Param | None) -> Float[Array, "B T out"]:
    return product if bias is None else product + bias[...]


def _zeros(size: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(size))


def _ones(size: int) -> nnx.Param:
    return nnx.Param(jnp.ones(size))


class FeedForward(nnx.Module):
    """The gated feed-forward block, stored [in, out]."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (width, inner)))
        self.up_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (width, inner)))
        self.down_proj = nnx.Param(_WEIGHT_INIT(rngs.params(), (inner, width)))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return all_reduce_sum(
            swiglu(x, self.gate_proj[...], self.up_proj[...], self.down_proj[...])
        )


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        self.epsilon = config.rms_norm_eps
        self.input_layernorm = nnx.Param(jnp.ones(config.hidden_size))
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = nnx.Param(jnp.ones(config.hidden_size))
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], angles: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        normalised = rms_norm(x, self.input_layernorm[...], self.epsilon)
        attended, k, v = self.self_attn(normalised, angles, attend)
        x = x + attended
        x = x + self.mlp(rms_norm(x, self.post_attention_layernorm[...], self.epsilon))
        return x, k, v


class Decoder(nnx.Module):
    """A language model of the Llama kind (arXiv 2302.13971), parameters only.

    What its family adds is in the configuration; biases and norms that are absent are None.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed_tokens = nnx.Param(_WEIGHT_INIT(rngs.params(), shape))
        self.layers = nnx.List(
            [DecoderLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(_WEIGHT_INIT(rngs.params(), shape[::-1]))

    def forward(
        self,
        tokens: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        context_layers: tuple[int, ...] = (),
    ) -> tuple[
        Float[Array, "B T Z"],
        tuple[Float[Array, "B T K H"], ...],
        tuple[Float[Array, "B T K H"], ...],
    ]:
        """Causal pass over left-aligned sequences.

        Args:
          tokens: token ids.
          segments: several sequences may share a row, one after the other, each with a number of
            its own: none sees another, and each begins at position 0. None for one per row.
          context_layers: layers, counted from 0, whose hidden states come before the last ones.

        Returns:
          The last hidden states (after the final norm), and per layer the keys and the values.
          Other layers' hidden states go through the final norm too, so that all are of one scale.
        """
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        positions = places
        if segments is not None:
            begins = jnp.diff(segments, axis=1, prepend=-1) != 0
            positions = places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)

        def attend_in(layer: int) -> Attend:
            window = self.config.window_of(layer)
            return partial(prefill_attention, window=window, segments=segments)

        return self._layers(tokens, positions, attend_in, context_layers)

    def tree_forward(
        self, tree: TokenTree, cache: KVCache, context_layers: tuple[int, ...] = ()
    ) -> Verified:
        """One pass over the nodes of a tree that hangs below the cached tokens.

        Each node sits at position `lengths + depth`, sees the cache and its ancestors, and its
        keys and values are returned beside the cache, not written to it. Hidden states are those
        of `forward`.
        """
        # A padding node has token -1; whatever it is embedded as, no other node sees it.
        tokens = jnp.maximum(tree.tokens, 0)
        hidden, keys, values = self._below(cache, tokens, tree.depth, tree.mask, context_layers)
        return Verified(self.logits(hidden), hidden, keys, values)

    def extend(
        self, tokens: Int[Array, "B C"], cache: KVCache, context_layers: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B C Z"], KVCache]:
        """One pass over C tokens that follow the cached ones, which must leave C slots.

        Returns:
          Their hidden states, those of `forward`, and the cache with them in it.
        """
        B, C = tokens.shape
        depth = jnp.broadcast_to(jnp.arange(C), (B, C))
        chain = jnp.broadcast_to(jnp.tri(C, dtype=bool), (B, C, C))
        hidden, keys, values = self._below(cache, tokens, depth, chain, context_layers)
        return hidden, append(cache, keys, values, jnp.full(B, C))

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embeddings of the tokens."""
        return gather_rows(self.embed_tokens[...], tokens, self.config.vocab_size)

    def logits(self, hidden: Float[Array, "... Z"]) -> Float[Array, "... V"]:
        """Scores of the next token, float32, from the last of the hidden states alone.

        On a mesh, those of this device's part of V.
        """
        return self.scorer()(hidden[..., -self.config.hidden_size :])

    def scorer(self, tokens: Int[Array, " U"] | None = None) -> Scorer:
        """The vocabulary projection of all V tokens, or of some in their order.

        The weights of some are gathered by this call: make it outside of loops. On a mesh it is
        this device's part of all, and the whole of some, of which each device may hold but a few.
        """
        V = self.config.vocab_size
        if tokens is not None and len(self.embed_tokens[...]) < V:
            score_part = self.scorer()
            return lambda hidden: all_gather(score_part(hidden), V)[..., tokens]
        if not self.config.tie_word_embeddings:
            head = self.lm_head[...] if tokens is None else self.lm_head[...][:, tokens]
            return lambda hidden: jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        embedding = self.embed_tokens[...] if tokens is None else self.embed_tokens[...][tokens]

        def score(hidden: Float[Array, "... D"]) -> Float[Array, "... U"]:
            # Written as the embedding times a few columns, and held so by the barriers: on the CPU
            # XLA would otherwise transpose the whole embedding in every step.
            columns = jax.lax.optimization_barrier(jnp.moveaxis(hidden, -1, 0))
            scores = jnp.tensordot(embedding, columns, 1, preferred_element_type=jnp.float32)
            return jnp.moveaxis(jax.lax.optimization_barrier(scores), 0, -1)

        return score

    @property
    def head(self) -> Float[Array, "D V"]:
        """The vocabulary projection: its own weight, or the embedding where the two are tied."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens[...].T
        return self.lm_head[...]

    def _angles(self, positions: Int[Array, "B T"]) -> Angles:
        config, scaling = self.config, self.config.rope_scaling
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, scaling)
        gain = scaling.attention_factor if isinstance(scaling, YarnScaling) else None
        return rotary_angles(positions, frequencies, gain)

    def _below(
        self,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        depth: Int[Array, "B N"],
        mask: Bool[Array, "B N N"],
        context_layers: tuple[int, ...],
    ) -> tuple[
        Float[Array, "B N Z"],
        tuple[Float[Array, "B N K H"], ...],
        tuple[Float[Array, "B N K H"], ...],
    ]:
        """As `_layers`, at positions `lengths + depth`; sees the cache, and what the mask shows."""

        def attend_in(layer: int) -> Attend:
            return partial(
                tree_attention,
                k_cache=cache.keys[layer],
                v_cache=cache.values[layer],
                lengths=cache.lengths,
                mask=mask,
                window=self.config.window_of(layer),
            )

        return self._layers(tokens, cache.lengths[:, None] + depth, attend_in, context_layers)

    def _layers(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend_in: Callable[[int], Attend],
        context_layers: tuple[int, ...],
    ) -> tuple[
        Float[Array, "B T Z"],
        tuple[Float[Array, "B T K H"], ...],
        tuple[Float[Array, "B T K H"], ...],
    ]:
        x = self.embed(tokens)
        angles = self._angles(positions)
        keys, values, context = [], [], []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(x, angles, attend_in(index))
            keys.append(k)
            values.append(v)
            if index in context_layers:
                context.append(x)
        normalised = [
            rms_norm(one, self.norm[...], self.config.rms_norm_eps) for one in (*context, x)
        ]
        return jnp.concatenate(normalised, axis=-1), tuple(keys), tuple(values)


Target = Model[TargetConfig, Decoder]


def init_target(config: TargetConfig, seed: int) -> Target:
    """A target with random float32 parameters, for pre-training and tests."""
    params_key = jax.random.key(seed)
    return Model.split(config, Decoder(config, rngs=nnx.Rngs(params_key)))
