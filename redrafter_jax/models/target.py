"""The target: a decoder of the Llama family, which verifies a token tree in one pass."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import LongRopeScaling, RopeScaling, TargetConfig, YarnScaling
from redrafter_jax.models.attention import prefill_attention, tree_attention
from redrafter_jax.models.cache import append
from redrafter_jax.models.decoder_layer import (
    WEIGHT_INIT,
    Angles,
    Attend,
    DecoderLayer,
    Stream,
    norm_weight,
    normalised,
)
from redrafter_jax.models.linear import dequantize, fewest_rows, read_rows, table_length
from redrafter_jax.models.projection import Projection
from redrafter_jax.models.rotary import positions_in, rotary_angles, rotary_frequencies
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Halfway, KVCache, Scorer, TokenTree, Verified

# Maximum number of rows, over all texts, for which the matrix products of a GPU take no longer than
# reading the weights.
_FEW_ROWS = 64

# The hidden states, and the keys and the values of each layer.
_PerLayer = tuple[Float[Array, "B T K H"], ...]
Passed = tuple[Float[Array, "B T Z"], _PerLayer, _PerLayer]


class Decoder(nnx.Module):
    """The parameters of a language model of the Llama family (arXiv 2302.13971).

    The configuration selects the variant of the family. Biases and norms that the variant lacks are
    None.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed_tokens = nnx.Param(WEIGHT_INIT(rngs.params(), shape))
        self.layers = nnx.List(
            [DecoderLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = norm_weight(config)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(WEIGHT_INIT(rngs.params(), shape[::-1]))

    def forward(
        self,
        tokens: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        context_layers: tuple[int, ...] = (),
    ) -> Passed:
        """Run a causal pass over left-aligned sequences.

        Args:
          tokens: token ids.
          segments: number of each token's sequence, for rows that hold several consecutive
            sequences. Sequences do not attend to each other, and each begins at position 0. None
            for one sequence per row.
          context_layers: indices of the context layers, from 0: layers whose outputs are returned
            as well, concatenated before the last hidden states.

        Returns:
          The hidden states, and the keys and the values of each layer. The final norm has been
          applied to the last hidden states, but not to the outputs of context layers; see
          `of_one_scale`.
        """
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        positions = places if segments is None else positions_in(segments)

        def attend_in(layer: int) -> Attend:
            return partial(
                prefill_attention,
                scale=self.config.attention_scale,
                window=self.config.window_of(layer),
                segments=segments,
            )

        return self.run(tokens, positions, attend_in, context_layers)

    def tree_forward(
        self,
        tree: TokenTree,
        cache: KVCache,
        context_layers: tuple[int, ...] = (),
    ) -> Verified:
        """Run a pass over the nodes of a tree whose root follows the cached tokens.

        A node has the position `lengths + depth`, and attends to the cache, to itself and to its
        ancestors. The keys and values of the nodes are returned, and not written to the cache. The
        hidden states have the layout of those that `forward` returns.

        Args:
          tree: the trees.
          cache: the target's layers of the cache.
          context_layers: indices of the context layers, as in `forward`.
        """
        whole = self.tree_layers(None, tree, cache, len(self.layers), context_layers)
        return self.tree_outputs(whole, tree)

    def tree_layers(
        self,
        begun: Halfway | None,
        tree: TokenTree,
        cache: KVCache,
        end: int,
        context_layers: tuple[int, ...] = (),
    ) -> Halfway:
        """Continue the pass of `tree_forward` until `end` layers have been run.

        Args:
          begun: the pass through the first layers; None to start at layer 0.
          tree: the trees.
          cache: the target's layers of the cache; layers from `end` on are not needed.
          end: number of layers that have been run after this call.
          context_layers: as in `forward`.
        """
        tokens, depth, mask = self._widen(tree)
        if begun is None:
            begun = Halfway(self.embed(tokens), (), (), ())
        rest = self._through(
            begun.hidden,
            cache.lengths[:, None] + depth,
            partial(self.attend_below, cache=cache, mask=mask),
            range(len(begun.keys), end),
            context_layers,
        )
        return Halfway(
            rest.hidden,
            begun.context + rest.context,
            begun.keys + rest.keys,
            begun.values + rest.values,
        )

    def tree_outputs(self, whole: Halfway, tree: TokenTree) -> Verified:
        """Return the outputs of `tree_forward`, given the pass through all layers."""
        hidden, N = self._states(whole), tree.tokens.shape[1]
        # Keys and values keep the padding: slicing them would copy them in every layer.
        return Verified(self.logits(hidden)[:, :N], hidden[:, :N], whole.keys, whole.values)

    def exit_states(
        self, begun: Halfway, context_layers: tuple[int, ...] = ()
    ) -> Float[Array, "B rows Z"]:
        """Return the hidden states as `forward` would if the model had only the computed layers.

        For context layers that have not been computed, the last computed output is used.
        """
        missing = len(context_layers) - len(begun.context)
        return self._states(begun._replace(context=begun.context + (begun.hidden,) * missing))

    def _widen(
        self, tree: TokenTree
    ) -> tuple[Int[Array, "B rows"], Int[Array, "B rows"], Bool[Array, "B rows rows"]]:
        """Return tokens, depth and mask of a tree's nodes, padded with further nodes.

        The number of nodes is then at least the number of rows that the device computes at once.
        """
        B, N = tree.tokens.shape
        # Pad to the number of rows that the device computes at once, unless there are many texts.
        # With fewer rows, XLA for GPUs splits a norm into two kernels, and attention pads anyway.
        fewest = fewest_rows()
        missing = max(fewest - N, 0) if B * fewest <= _FEW_ROWS else 0
        own = jnp.eye(N + missing, dtype=bool)
        mask = jnp.pad(tree.mask, ((0, 0), (0, missing), (0, missing))) | own
        tokens, depth = (jnp.pad(one, ((0, 0), (0, missing))) for one in (tree.tokens, tree.depth))
        # Padding nodes have token -1. Their embedding is arbitrary, because no other node attends
        # to them.
        return jnp.maximum(tokens, 0), depth, mask

    def extend(
        self,
        tokens: Int[Array, "B C"],
        cache: KVCache,
        count: Int[Array, " B"],
        context_layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B C Z"], KVCache]:
        """Run a pass over C tokens that follow the cached tokens, and append them to the cache.

        Args:
          tokens: token ids.
          cache: the target's layers of the cache, with room for the tokens.
          count: number of tokens to append to each row; the others are computed, but not written.
          context_layers: indices of the context layers, as in `forward`.

        Returns:
          The hidden states, as in `forward`, and the cache with the keys and values of the tokens.
        """
        return append_chunk(cache, self.chunk_forward(tokens, cache, context_layers), count)

    def chunk_forward(
        self,
        tokens: Int[Array, "B C"],
        cache: KVCache,
        context_layers: tuple[int, ...] = (),
    ) -> Passed:
        """Run the pass of `extend`, without writing to the cache."""
        B, C = tokens.shape
        depth = jnp.broadcast_to(jnp.arange(C), (B, C))
        return self._below(cache, tokens, depth, chain_mask(B, C), context_layers)

    def run(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend_in: Callable[[int], Attend],
        context_layers: tuple[int, ...] = (),
    ) -> Passed:
        """Run the layers; `attend_in` decides what a token attends to.

        Args:
          tokens: token ids.
          positions: positions of the tokens, from 0.
          attend_in: function from a layer's index to its attention.
          context_layers: indices of the context layers, as in `forward`.

        Returns:
          The result of `forward`.
        """
        embedded, layers = self.embed(tokens), range(len(self.layers))
        passed = self._through(embedded, positions, attend_in, layers, context_layers)
        return self._states(passed), passed.keys, passed.values

    def _through(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend_in: Callable[[int], Attend],
        layers: range,
        context_layers: tuple[int, ...],
    ) -> Halfway:
        """Run the given layers, in order; x is the input of the first one."""
        angles = self._angles(positions)
        keys, values, context, stream = [], [], [], Stream(x)
        for index in layers:
            stream, k, v = self.layers[index].through(stream, angles[index], attend_in(index))
            keys.append(k)
            values.append(v)
            if index in context_layers:
                stream = Stream(stream.whole())
                context.append(stream.hidden)
        return Halfway(stream.whole(), tuple(context), tuple(keys), tuple(values))

    def _states(self, passed: Halfway) -> Float[Array, "B T Z"]:
        """Concatenate the hidden states as `forward` returns them."""
        last = normalised(passed.hidden, self.norm, self.config)
        return jnp.concatenate([*passed.context, last], axis=-1)

    def of_one_scale(self, hidden: Float[Array, "... Z"]) -> Float[Array, "... Z"]:
        """Apply the final norm to the outputs of context layers.

        The last hidden states have passed this norm already, so all hidden states then have one
        scale.
        """
        D = self.config.hidden_size
        states = jnp.split(hidden, hidden.shape[-1] // D, axis=-1)
        normed = [normalised(one, self.norm, self.config) for one in states[:-1]]
        return jnp.concatenate([*normed, states[-1]], axis=-1) if normed else hidden

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Return the embeddings of tokens, as the first layer reads them."""
        embedded = self.stored_embeddings(tokens)
        if not self.config.scaled_embeddings:
            return embedded
        return embedded * jnp.asarray(self.config.hidden_size**0.5, embedded.dtype)

    def stored_embeddings(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Return the embeddings of tokens as stored, without scaling, for drafters."""
        table = self.embed_tokens.get_value()
        return read_rows(table, tokens, self.config.vocab_size, self.dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and cache, which is the dtype of the norms.

        Norms are never quantized.
        """
        return self.norm[...].dtype

    def logits(self, hidden: Float[Array, "... Z"]) -> Float[Array, "... V"]:
        """Return float32 scores of the next token; only the last hidden states are used.

        On a mesh, the scores are this device's shard of V.
        """
        return self.scorer()(hidden[..., -self.config.hidden_size :])

    def scorer(self, tokens: Int[Array, " U"] | None = None) -> Scorer:
        """Return the vocabulary projection to all V tokens, or to `tokens` in their order.

        `scorer` gathers the weights of `tokens`, so call it outside of loops. On a mesh, the scores
        of all V tokens are this device's shard, but the scores of `tokens` are complete.
        """
        whole, V = self.projection, self.config.vocab_size
        if tokens is None:
            return whole
        if table_length(self.embed_tokens.get_value()) < V:
            return lambda hidden: all_gather(whole(hidden), V)[..., tokens]
        return whole.of_tokens(tokens)

    @property
    def projection(self) -> Projection:
        """The vocabulary projection; a model with tied weights uses the embedding as its weight."""
        tied = self.config.tie_word_embeddings
        weight = self.embed_tokens if tied else self.lm_head
        return Projection(weight.get_value(), embedding=tied)

    @property
    def head(self) -> Float[Array, "D V"]:
        """The weight of the vocabulary projection, dequantized if needed.

        In a model with tied weights, this is the transposed embedding.
        """
        if self.config.tie_word_embeddings:
            return dequantize(self.embed_tokens.get_value(), self.dtype).T
        return dequantize(self.lm_head.get_value(), self.dtype)

    def _angles(self, positions: Int[Array, "B T"]) -> tuple[Angles, ...]:
        """Return the rotary angles of every layer; layers with equal settings share them."""
        config = self.config
        rotaries = [config.rotary_of(layer) for layer in range(config.num_hidden_layers)]

        def angles(theta: float, scaling: RopeScaling | None) -> Angles:
            frequencies = rotary_frequencies(config.head_dim, theta, scaling)
            sharpened = isinstance(scaling, YarnScaling | LongRopeScaling)
            gain = scaling.attention_factor if sharpened else None
            return rotary_angles(positions, frequencies, gain)

        made = {rotary: angles(*rotary) for rotary in dict.fromkeys(rotaries)}
        return tuple(made[rotary] for rotary in rotaries)

    def _below(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        depth: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        context_layers: tuple[int, ...],
    ) -> Passed:
        """Call `run` for tokens that follow the cached tokens, at positions `lengths + depth`.

        A token attends to the cache, and to the tokens that the mask allows.
        """

        def attend_in(layer: int) -> Attend:
            return self.attend_below(layer, cache, mask)

        return self.run(tokens, cache.lengths[:, None] + depth, attend_in, context_layers)

    def attend_below(self, layer: int, cache: KVCache, mask: Bool[Array, "B T T"]) -> Attend:
        """Return the attention of a layer to the cache, and between tokens by the mask."""
        return lambda q, k, v: tree_attention(
            q,
            k_cache=cache.keys[layer],
            v_cache=cache.values[layer],
            table=cache.table,
            lengths=cache.lengths,
            k_tree=k,
            v_tree=v,
            mask=mask,
            scale=self.config.attention_scale,
            window=self.config.window_of(layer),
        )


def append_chunk(
    cache: KVCache, passed: Passed, count: Int[Array, " B"]
) -> tuple[Float[Array, "B C Z"], KVCache]:
    """Append the tokens of `chunk_forward` to the cache, and return the result of `extend`."""
    hidden, keys, values = passed
    # Barrier: all reads of the cache must precede the in-place write; see `finish`.
    hidden, lengths = jax.lax.optimization_barrier((hidden, cache.lengths))
    return hidden, append(cache._replace(lengths=lengths), keys, values, count)


def chain_mask(batch: int, length: int) -> Bool[Array, "B T T"]:
    """Return the ancestor mask of B chains of T tokens."""
    return jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))


Target = Model[TargetConfig, Decoder]


def init_target(config: TargetConfig, seed: int) -> Target:
    """Return a target with random float32 parameters, for pre-training and tests."""
    params_key = jax.random.key(seed)
    return Model.split(config, Decoder(config, rngs=nnx.Rngs(params_key)))
