"""DFlash and DSpark heads: a few decoder layers fill a block of masked tokens in one pass.

The head fuses the target's hidden states of several layers. From the fused states, each layer of
the head computes the keys and values of every text token; the text tokens themselves do not pass
through the layers. The block consists of the root (the last decided token) followed by mask tokens.
Each place (position in the block) attends to the text and to the whole block. Every mask token's
place predicts a token; in some heads the root's place does too. This is DFlash (arXiv 2602.06036).

DSpark (arXiv 2607.05147) adds two heads. The sequential head corrects the scores at a place, given
the token drafted before that place. The confidence head predicts how much of the target's
probability agrees with the corrected scores.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import LinearScaling, Llama3Scaling, RopeScaling, TargetConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig, check_depth
from redrafter_jax.config.limits import Count, Natural, Positive, require
from redrafter_jax.drafters.head_drafter import Dense, HeadWeights
from redrafter_jax.drafters.own_layer import angles_of, layer_config
from redrafter_jax.errors import InputError
from redrafter_jax.models.decoder_layer import (
    WEIGHT_INIT,
    Attend,
    DecoderLayer,
    norm_weight,
    normalised,
)
from redrafter_jax.models.linear import linear, read_rows
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.types import Scorer

_PerLayer = tuple[Float[Array, "B T K H"], ...]


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Configuration of a DFlash or DSpark head, whose width is the target's.

    `context_layers` must name at least one target layer whose output the head reads. A place is a
    position in the block. A sequential (Markov) head corrects the logits at a place, given the
    tokens drafted before that place.

    Attributes:
      num_layers: number of the head's decoder layers.
      intermediate_size: width of the feed-forward blocks.
      num_attention_heads: Q, number of query heads.
      num_key_value_heads: K, number of key/value heads.
      head_dim: H, width of a head.
      block_size: number of places of the block, including the root's.
      mask_token: id of the token whose embedding is used at masked places.
      sample_from_anchor: whether the root's place predicts the token after the root, as in
        DeepSpec's heads; otherwise the first mask token's place does, as in DFlash's heads.
      rms_norm_eps: epsilon of all norms of the head.
      rope_theta: base of the rotary embedding.
      rope_scaling: scaling of the rotary frequencies; None for no scaling.
      attention_bias: whether the query, key, value and output projections have a bias.
      markov_rank: width of the sequential head's embedding and state; 0 for no sequential head.
      markov_head_type: input of the sequential head: "vanilla" for the embedding of the previous
        token, "gated" for this embedding and the layers' output at the place, "rnn" for both and a
        recurrent state.
      confidence: whether there is a confidence head.
      confidence_with_markov: whether the confidence head also reads the sequential head's
        embedding.
      num_target_layers: number of layers of the target that the head was trained for; None if its
        files do not state it.
    """

    num_layers: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    block_size: Count
    mask_token: Natural
    sample_from_anchor: bool = False
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    markov_rank: Natural = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    num_target_layers: Count | None = None
    head: Literal["own", "target"] = field(default="target", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.layer  # which checks its sizes
        problem = f"is {self.mask_token}; it must be below vocab_size, {self.vocab_size}."
        require(self.mask_token < self.vocab_size, self, "mask_token", problem)
        problem = "is 1 and sample_from_anchor is False, so no token is predicted; give 2 or more."
        require(self.places > 0, self, "block_size", problem)
        problem = "is empty; name the target layers that the head reads."
        require(bool(self.context_layers), self, "context_layers", problem)
        scaled = isinstance(self.rope_scaling, LinearScaling | Llama3Scaling | None)
        name = type(self.rope_scaling).__name__
        problem = f"is {name}; only linear scaling and Llama 3.1's are supported."
        require(scaled, self, "rope_scaling", problem)
        reads = self.markov_rank > 0 and self.confidence
        problem = (
            "is True, which needs a confidence head (confidence=True) and a markov_rank above 0."
        )
        require(reads or not self.confidence_with_markov, self, "confidence_with_markov", problem)
        kind = self.markov_head_type
        problem = f"is {kind!r}, which needs a markov_rank above 0; give one, or 'vanilla'."
        require(self.markov_rank > 0 or kind == "vanilla", self, "markov_head_type", problem)
        problem = (
            "is 'rnn' and sample_from_anchor is False; programs disagree on the state after the "
            "root for this combination, so use a head of another kind."
        )
        require(kind != "rnn" or self.sample_from_anchor, self, "markov_head_type", problem)

    def layers_of(self, target: TargetConfig) -> tuple[int, ...]:
        """The indices of the target layers whose outputs the head fuses.

        Raises:
          InputError: the head was trained for a target with another number of layers.
        """
        check_depth(target, self.num_target_layers)
        return self.context_layers

    @property
    def layer(self) -> TargetConfig:
        """The configuration of the head's decoder layers, as a target's configuration."""
        return layer_config(
            self.vocab_size,
            self.hidden_size,
            self,
            self.num_layers,
            rope_scaling=self.rope_scaling,
            attention_bias=self.attention_bias,
            attention_output_bias=self.attention_bias,
            qk_norm=True,
        )

    @property
    def first_place(self) -> int:
        """The index of the place that predicts the token after the root."""
        return 0 if self.sample_from_anchor else 1

    @property
    def places(self) -> int:
        """The number of places that predict a token, which is the maximum of draft rounds."""
        return self.block_size - self.first_place

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a static tree, and a tree that is deeper than the block or has too many beams."""
        tree.check_beams("a DFlash or DSpark head")
        if tree.draft_rounds > self.places:
            raise InputError(
                f"TreeConfig.draft_rounds is {tree.draft_rounds}, but the head's block predicts "
                f"{self.places} tokens; give that number or fewer."
            )
        super().check_tree(tree)


class Corrected(NamedTuple):
    """The output of the sequential head in one round.

    Attributes:
      state: state for the next round if the head is of type "rnn"; otherwise the unchanged input
        state.
      embedded: embedding of the previous token of each beam.
      bias: values to add to the scores of the U draftable tokens; on a mesh possibly a shard.
    """

    state: Float[Array, "B w r"]
    embedded: Float[Array, "B w r"]
    bias: Float[Array, "B w U"]


class SequentialHead(nnx.Module):
    """The sequential head of DSpark, which corrects the scores after each drafted token.

    It adds a bias to the scores. The bias is projected from an embedding of width `markov_rank`.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        V, D, r = config.vocab_size, config.hidden_size, config.markov_rank
        self.config = config
        self.embed_tokens = nnx.Param(WEIGHT_INIT(rngs.params(), (V, r)))
        if config.markov_head_type == "gated":
            self.gate = Dense(D + r, r, bias=True, rngs=rngs)
        elif config.markov_head_type == "rnn":
            # Gate, candidate and output, concatenated.
            self.joint = Dense(D + 2 * r, 3 * r, bias=True, rngs=rngs)
        self.scores = Dense(r, config.draft_vocab_size, bias=False, rngs=rngs)

    def __call__(
        self,
        state: Float[Array, "B w r"],
        tokens: Int[Array, "B w"],
        hidden: Float[Array, "B 1 D"],
    ) -> Corrected:
        """Compute the bias to add to the scores of the tokens that follow `tokens`.

        Args:
          state: state of the previous round; zeros in the first.
          tokens: newest token of each beam.
          hidden: output of the layers at the round's place, shared by all beams.
        """
        embedded = read_rows(
            self.embed_tokens.get_value(), tokens, self.config.vocab_size, hidden.dtype
        )
        hidden = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        match self.config.markov_head_type:
            case "vanilla":
                read = embedded
            case "gated":
                gate = self.gate(jnp.concatenate([hidden, embedded], axis=-1))
                read = jax.nn.sigmoid(gate) * embedded
            case "rnn":
                joint = self.joint(jnp.concatenate([state, embedded, hidden], axis=-1))
                gate, candidate, output = jnp.split(joint, 3, axis=-1)
                gate = jax.nn.sigmoid(gate)
                state = gate * state + (1 - gate) * jnp.tanh(candidate)
                read = jnp.tanh(output)
        bias = linear(read, self.scores.kernel.get_value(), jnp.float32)
        return Corrected(state, embedded, bias)


class BlockHead(HeadWeights):
    """Parameters of a DFlash or DSpark head."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        layer, D = config.layer, config.hidden_size
        self.config = config
        self.fc = Dense(len(config.context_layers) * D, D, bias=False, rngs=rngs)
        self.hidden_norm, self.norm = norm_weight(layer), norm_weight(layer)
        self.layers = nnx.List([DecoderLayer(layer, rngs=rngs) for _ in range(config.num_layers)])
        if config.markov_rank:
            self.markov = SequentialHead(config, rngs=rngs)
        if config.confidence:
            read = D + (config.markov_rank if config.confidence_with_markov else 0)
            self.confidence = Dense(read, 1, bias=True, rngs=rngs)
        if config.head == "own":
            self.lm_head = Dense(D, config.draft_vocab_size, bias=False, rngs=rngs)

    @property
    def dtype(self) -> jnp.dtype:
        """The activation dtype, taken from a norm because norms are never quantized."""
        return self.norm[...].dtype

    def remember(
        self, hidden: Float[Array, "B C Z"], positions: Int[Array, "B C"]
    ) -> tuple[_PerLayer, _PerLayer]:
        """Compute the keys and values of text tokens in every layer of the head.

        They depend on the outputs of the context layers at these tokens. The last hidden state in
        `hidden`, after the target's final norm, is not read.
        """
        config = self.config
        read = hidden[..., : len(config.context_layers) * config.hidden_size].astype(self.dtype)
        fused = normalised(self.fc(read), self.hidden_norm, config.layer)
        angles = angles_of(self.config.layer, positions)
        pairs = [layer.self_attn.keys_and_values(fused, angles) for layer in self.layers]
        keys, values = zip(*pairs, strict=True)
        return keys, values

    def fill(
        self,
        root: Int[Array, " B"],
        lengths: Int[Array, " B"],
        target: Decoder,
        attend_in: Callable[[int], Attend],
    ) -> Float[Array, "B places D"]:
        """Run the layers on the block; return the normalised outputs at the places that predict.

        Args:
          root: the last decided token.
          lengths: position of the root.
          target: the target, whose embedding is used.
          attend_in: function from a layer's index to the layer's attention, which covers the text
            and the block.
        """
        config, M = self.config, self.config.block_size
        masks = jnp.full((len(root), M - 1), config.mask_token, root.dtype)
        block = jnp.concatenate([root[:, None], masks], axis=1)
        x = target.stored_embeddings(block).astype(self.dtype)
        angles = angles_of(self.config.layer, lengths[:, None] + jnp.arange(M))
        for number, layer in enumerate(self.layers):
            x, _, _ = layer(x, angles, attend_in(number))
        return normalised(x[:, config.first_place :], self.norm, config.layer)

    def logits(
        self, hidden: Float[Array, "... D"], scorer: Scorer | None = None
    ) -> Float[Array, "... U"]:
        """Return float32 scores of the U draftable tokens at each place, before any correction.

        On a mesh, the scores are this device's shard. With `head="target"`, `scorer` computes them.
        """
        if self.config.head == "own":
            return linear(hidden, self.lm_head.kernel.get_value(), jnp.float32)
        assert scorer is not None, "head='target' has no projection of its own: pass scorer="
        return scorer(hidden)

    def follow(
        self,
        state: Float[Array, "B w r"],
        tokens: Int[Array, "B w"],
        hidden: Float[Array, "B 1 D"],
        scores: Float[Array, "B 1 U"],
    ) -> tuple[Float[Array, "B w r"], Float[Array, "B _ U"], Float[Array, "B w"] | None]:
        """Run one round of the sequential head and of the confidence head, if the head has them.

        Args:
          state: state of the previous round.
          tokens: newest token of each beam.
          hidden: output of the layers at the round's place.
          scores: scores of the place, from `logits`.

        Returns:
          The state; the corrected scores, which all beams share if there is no sequential head; and
          the log-probability that the scores are right, None without a confidence head.
        """
        read = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        if self.config.markov_rank:
            state, embedded, bias = self.markov(state, tokens, hidden)
            if bias.shape[-1] < scores.shape[-1]:  # a mesh splits the bias, but not all scores
                bias = all_gather(bias, scores.shape[-1])
            scores = scores + bias
            if self.config.confidence_with_markov:
                read = jnp.concatenate([read, embedded], axis=-1)
        if not self.config.confidence:
            return state, scores, None
        confidence = self.confidence(read)[..., 0].astype(jnp.float32)
        return state, scores, jax.nn.log_sigmoid(confidence)
