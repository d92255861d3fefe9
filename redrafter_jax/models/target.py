"""The target: a decoder of the Llama family that verifies a token tree in one pass."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from redrafter_jax.config import LongRopeScaling, RopeScaling, TargetConfig, YarnScaling
from redrafter_jax.models.attention import prefill_attention, tree_attention
from redrafter_jax.models.cache import append
from redrafter_jax.models.decoder_layer import (
    WEIGHT_INIT,
    Angles,
    Attend,
    DecoderLayer,
    norm_weight,
    normalised,
)
from redrafter_jax.models.linear import dequantize, fewest_rows, read_rows, table_length
from redrafter_jax.models.projection import Projection
from redrafter_jax.models.rotary import positions_in, rotary_angles, rotary_frequencies
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Halfway, KVCache, Scorer, TokenTree, Verified

# Number of rows, over all texts, up to which a GPU's matrix products take no longer than reading
# the weights.
_FEW_ROWS = 64

# Hidden states, and the keys and values per layer.
_PerLayer = tuple[Float[Array, "B T K H"], ...]
_Read = tuple[Float[Array, "B T Z"], _PerLayer, _PerLayer]


class Decoder(nnx.Module):
    """A language model of the Llama family (arXiv 2302.13971), parameters only.

    The configuration has the variations of its family; absent biases and norms are None.
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
    ) -> _Read:
        """Run a causal pass over left-aligned sequences.

        Args:
          tokens: token ids.
          segments: number of each token's sequence, for rows with several consecutive sequences,
            which do not attend to each other and each begin at position 0. None for one per row.
          context_layers: layers, counted from 0, whose outputs precede the last hidden states.

        Returns:
          The hidden states, and the keys and values per layer. The last hidden states are after the
          final norm; outputs of context layers are not normalised, see `of_one_scale`.
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
        nodes: Int[Array, " M"] | None = None,
    ) -> Verified:
        """Run a pass over the nodes of a tree below the cached tokens.

        A node is at position `lengths + depth`, and attends to the cache and its ancestors. Keys
        and values of the nodes are returned, not written to the cache. Hidden states are as in
        `forward`.

        Args:
          tree: the trees.
          cache: the target's layers of the cache.
          context_layers: as in `forward`.
          nodes: numbers of the nodes to run, from `share_nodes`; results at other nodes are
            garbage. None for all nodes.
        """
        if nodes is not None:
            return self._forward_some(tree, cache, context_layers, nodes)
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
        """Run the layers of `tree_forward` from the first that `begun` lacks up to layer `end`.

        Args:
          begun: the pass through earlier layers; None if there are none.
          tree: the trees.
          cache: the target's layers of the cache; layers from `end` on are not needed.
          end: number of layers that have been run in the end.
          context_layers: as in `forward`.
        """
        tokens, depth, mask = self._widen(tree)
        if begun is None:
            begun = Halfway(self.embed(tokens), (), (), ())
        rest = self._through(
            begun.hidden,
            cache.lengths[:, None] + depth,
            partial(self._attend_below, cache=cache, mask=mask),
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
        """Return the outputs of `tree_forward` from its pass through all layers."""
        hidden, N = self._states(whole), tree.tokens.shape[1]
        # Keys and values keep the padding: slicing them would copy them in every layer.
        return Verified(self.logits(hidden)[:, :N], hidden[:, :N], whole.keys, whole.values)

    def exit_states(
        self, begun: Halfway, context_layers: tuple[int, ...] = ()
    ) -> Float[Array, "B rows Z"]:
        """Return the hidden states as `forward` would if the computed layers were all its layers.

        The last computed output replaces context layers that have not been reached.
        """
        missing = len(context_layers) - len(begun.context)
        return self._states(begun._replace(context=begun.context + (begun.hidden,) * missing))

    def _widen(
        self, tree: TokenTree
    ) -> tuple[Int[Array, "B rows"], Int[Array, "B rows"], Bool[Array, "B rows rows"]]:
        """Return tokens, depth and mask of a tree's nodes, padded to the device's minimum rows."""
        B, N = tree.tokens.shape
        # Pad to the number of rows that the device computes at once, unless there are many texts:
        # with fewer rows XLA for GPUs splits a norm into two kernels, and attention would pad
        # anyway.
        fewest = fewest_rows()
        missing = max(fewest - N, 0) if B * fewest <= _FEW_ROWS else 0
        own = jnp.eye(N + missing, dtype=bool)
        mask = jnp.pad(tree.mask, ((0, 0), (0, missing), (0, missing))) | own
        tokens, depth = (jnp.pad(one, ((0, 0), (0, missing))) for one in (tree.tokens, tree.depth))
        # Padding nodes have token -1; their embedding is arbitrary, as no other node sees them.
        return jnp.maximum(tokens, 0), depth, mask

    def _forward_some(
        self,
        tree: TokenTree,
        cache: KVCache,
        context_layers: tuple[int, ...],
        nodes: Int[Array, " M"],
    ) -> Verified:
        """Run `tree_forward` for M nodes, packed into one row except in attention."""
        B, N = tree.tokens.shape
        place = jnp.zeros(B * N, jnp.int32).at[nodes].set(jnp.arange(len(nodes)))

        def pack(whole: Shaped[Array, "B N ..."]) -> Shaped[Array, "1 M ..."]:
            return whole.reshape(B * N, *whole.shape[2:])[nodes][None]

        def unpack(packed: Shaped[Array, "1 M ..."]) -> Shaped[Array, "B N ..."]:
            return packed[0, place].reshape(B, N, *packed.shape[2:])

        mask = tree.mask | jnp.eye(N, dtype=bool)

        def attend_in(layer: int) -> Attend:
            attend = self._attend_below(layer, cache, mask)
            return lambda *heads: pack(attend(*map(unpack, heads)))

        positions = pack(cache.lengths[:, None] + tree.depth)
        tokens = pack(jnp.maximum(tree.tokens, 0))
        hidden, keys, values = self.run(tokens, positions, attend_in, context_layers)
        logits = unpack(self.logits(hidden))
        return Verified(
            logits, unpack(hidden), tuple(map(unpack, keys)), tuple(map(unpack, values))
        )

    def extend(
        self,
        tokens: Int[Array, "B C"],
        cache: KVCache,
        count: Int[Array, " B"],
        context_layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B C Z"], KVCache]:
        """Run a pass over C tokens after the cached ones, and append them to the cache.

        Args:
          tokens: the tokens.
          cache: the target's layers of the cache, with room for the tokens.
          count: number of tokens to read; a row that reads none keeps its slots.
          context_layers: as in `forward`.

        Returns:
          The hidden states, as in `forward`, and the cache with the tokens.
        """
        B, C = tokens.shape
        depth = jnp.broadcast_to(jnp.arange(C), (B, C))
        chain = jnp.broadcast_to(jnp.tri(C, dtype=bool), (B, C, C))
        hidden, keys, values = self._below(cache, tokens, depth, chain, context_layers)
        # Barrier: all reads of the cache must precede the in-place write; see `finish`.
        hidden, lengths = jax.lax.optimization_barrier((hidden, cache.lengths))
        return hidden, append(cache._replace(lengths=lengths), keys, values, count)

    def run(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend_in: Callable[[int], Attend],
        context_layers: tuple[int, ...] = (),
    ) -> _Read:
        """Run the layers; `attend_in` decides what a token attends to.

        Args:
          tokens: token ids.
          positions: positions of the tokens, from 0.
          attend_in: function from a layer's index to its attention.
          context_layers: as in `forward`.

        Returns:
          As `forward`.
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
        """Run some layers, given the input of the first of them."""
        angles = self._angles(positions)
        keys, values, context = [], [], []
        for index in layers:
            x, k, v = self.layers[index](x, angles[index], attend_in(index))
            keys.append(k)
            values.append(v)
            if index in context_layers:
                context.append(x)
        return Halfway(x, tuple(context), tuple(keys), tuple(values))

    def _states(self, passed: Halfway) -> Float[Array, "B T Z"]:
        """Concatenate the hidden states as `forward` returns them."""
        last = normalised(passed.hidden, self.norm, self.config)
        return jnp.concatenate([*passed.context, last], axis=-1)

    def of_one_scale(self, hidden: Float[Array, "... Z"]) -> Float[Array, "... Z"]:
        """Apply the final norm to the outputs of context layers, as to the last hidden states."""
        D = self.config.hidden_size
        states = jnp.split(hidden, hidden.shape[-1] // D, axis=-1)
        normed = [normalised(one, self.norm, self.config) for one in states[:-1]]
        return jnp.concatenate([*normed, states[-1]], axis=-1) if normed else hidden

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Return the embeddings of tokens as input of the first layer."""
        embedded = self.stored_embeddings(tokens)
        if not self.config.scaled_embeddings:
            return embedded
        return embedded * jnp.asarray(self.config.hidden_size**0.5, embedded.dtype)

    def stored_embeddings(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Return the embeddings of tokens as stored, without scaling; drafters read these."""
        table = self.embed_tokens.get_value()
        return read_rows(table, tokens, self.config.vocab_size, self.dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and cache: that of the norms, which are never quantized."""
        return self.norm[...].dtype

    def logits(self, hidden: Float[Array, "... Z"]) -> Float[Array, "... V"]:
        """Return float32 scores of the next token; only the last hidden states are used.

        On a mesh, the scores are this device's shard of V.
        """
        return self.scorer()(hidden[..., -self.config.hidden_size :])

    def scorer(self, tokens: Int[Array, " U"] | None = None) -> Scorer:
        """Return the vocabulary projection of all V tokens, or of `tokens` in their order.

        The weights of `tokens` are gathered by this call, so call it outside of loops. On a mesh
        the scores of all tokens are this device's shard, those of `tokens` are complete.
        """
        whole, V = self.projection, self.config.vocab_size
        if tokens is None:
            return whole
        if table_length(self.embed_tokens.get_value()) < V:
            return lambda hidden: all_gather(whole(hidden), V)[..., tokens]
        return whole.of_tokens(tokens)

    @property
    def projection(self) -> Projection:
        """The vocabulary projection; its weight is the embedding if the two are tied."""
        tied = self.config.tie_word_embeddings
        weight = self.embed_tokens if tied else self.lm_head
        return Projection(weight.get_value(), embedding=tied)

    @property
    def head(self) -> Float[Array, "D V"]:
        """The weight of the vocabulary projection, dequantized if needed.

        It is the embedding if the two are tied.
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
    ) -> _Read:
        """Call `run` at positions `lengths + depth`, with attention to the cache and the mask."""

        def attend_in(layer: int) -> Attend:
            return self._attend_below(layer, cache, mask)

        return self.run(tokens, cache.lengths[:, None] + depth, attend_in, context_layers)

    def _attend_below(self, layer: int, cache: KVCache, mask: Bool[Array, "B T T"]) -> Attend:
        """Return the attention of a layer to the cache and by the mask."""
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


Target = Model[TargetConfig, Decoder]


def init_target(config: TargetConfig, seed: int) -> Target:
    """Return a target with random float32 parameters, for pre-training and tests."""
    params_key = jax.random.key(seed)
    return Model.split(config, Decoder(config, rngs=nnx.Rngs(params_key)))
