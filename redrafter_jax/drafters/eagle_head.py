"""EAGLE heads: one decoder layer over pairs of a hidden state and the next token's embedding.

The pair of the hidden state at position i and token i + 1 has an entry (keys and values) at
position i of the layer's own cache. The layer's output at this entry predicts token i + 2. While
drafting, the target's hidden state at i + 1 is not known yet, so the layer reads its own output
instead. EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858) read the target's last hidden state and
use the target's vocabulary projection. EAGLE-3 (arXiv 2503.01840) fuses the outputs of several
target layers and has a vocabulary projection of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import LinearScaling, Llama3Scaling, RopeScaling, TargetConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig, check_depth
from redrafter_jax.config.limits import Count, Positive, require
from redrafter_jax.drafters.head_drafter import Dense, TrainedHead
from redrafter_jax.drafters.own_layer import angles_of, attend_in_rows, layer_config
from redrafter_jax.errors import InputError
from redrafter_jax.models.decoder_layer import (
    WEIGHT_INIT,
    Attend,
    Attention,
    FeedForward,
    norm_weight,
    normalised,
)
from redrafter_jax.models.linear import linear, read_rows
from redrafter_jax.models.rotary import positions_in
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import Scorer

# Default fused layers: SafeAILab's `modeling_llama_kv.py` takes the inputs of layers 2, L // 2 and
# L - 3 of L, which are the outputs of the layers before them.
_FUSED = 3
_LEAST_LAYERS = 7


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Configuration of an EAGLE head.

    `vocab_size` and `hidden_size` are the sizes of the target. `context_layers` are the target
    layers whose outputs EAGLE-3 fuses into one hidden state. If `context_layers` is empty, EAGLE-3
    fuses the second layer, one in the middle, and the fourth from the end.

    Attributes:
      version: "1" for EAGLE and EAGLE-2, which have the same heads; "3" for EAGLE-3.
      width: width of the head's hidden state; for version 1 it must be the target's width.
      intermediate_size: width of the feed-forward block.
      num_attention_heads: Q, number of query heads.
      num_key_value_heads: K, number of key/value heads.
      head_dim: H, width of a head.
      rms_norm_eps: epsilon of all norms of the head.
      rope_theta: base of the rotary embedding.
      rope_scaling: scaling of the rotary frequencies; None for no scaling.
      fc_bias: whether `fc` has a bias. `fc` projects the hidden states to fuse, or in version 1 the
        pair of hidden state and embedding.
      attention_bias: whether the query, key and value projections have a bias.
      attention_output_bias: whether the output projection of attention has a bias.
      qk_norm: whether queries and keys are normalised per head before the rotary embedding.
      own_embedding: whether the head has its own embedding; required if `width` differs from the
        target's width.
      norm_before_residual: whether the residual around attention adds the hidden state after its
        norm, rather than before it.
      norm_before_fc: whether one norm over all fused hidden states precedes `fc`.
      fc_norm: whether each fused hidden state has its own norm before `fc` (EAGLE-3.1, arXiv
        2605.09992).
      norm_output: whether the next round reads the output after the last norm, rather than before
        it.
      num_target_layers: number of layers of the target that the head was trained for; None if its
        files do not state it.
    """

    version: Literal["1", "3"]
    width: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    fc_bias: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_target_layers: Count | None = None
    head: Literal["own", "target"] = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.layer  # which checks its sizes
        target, own = self.hidden_size, self.width
        alike = own == target
        problem = f"is {own} and the target's is {target}; give own_embedding=True for this."
        require(alike or self.own_embedding, self, "width", problem)
        problem = f"is 'target', which needs width={target}, but width is {own}; give 'own'."
        require(alike or self.head == "own", self, "head", problem)
        scaled = isinstance(self.rope_scaling, LinearScaling | Llama3Scaling | None)
        name = type(self.rope_scaling).__name__
        problem = f"is {name}; only linear scaling and Llama 3.1's are supported."
        require(scaled, self, "rope_scaling", problem)
        problem = "is True and fc_norm is True; set only one of them."
        require(not (self.norm_before_fc and self.fc_norm), self, "norm_before_fc", problem)
        if self.version == "1":
            self._check_first_version()

    def _check_first_version(self) -> None:
        third = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
        for name in third:
            problem = "is True, but version '1' has no such norm; leave it out."
            require(not getattr(self, name), self, name, problem)
        problem = (
            f"is {self.context_layers}, but version '1' reads only the last layer; leave it out."
        )
        require(not self.context_layers, self, "context_layers", problem)
        problem = f"is {self.head!r}, but version '1' has no projection of its own; give 'target'."
        require(self.head == "target", self, "head", problem)
        problem = f"is {self.width}; for version '1' it must be hidden_size, {self.hidden_size}."
        require(self.width == self.hidden_size, self, "width", problem)

    @property
    def layer(self) -> TargetConfig:
        """The configuration of the head's decoder layer, as a target's configuration."""
        return layer_config(
            self.vocab_size,
            self.width,
            self,
            rope_scaling=self.rope_scaling,
            attention_bias=self.attention_bias,
            attention_output_bias=self.attention_output_bias,
            qk_norm=self.qk_norm,
        )

    @property
    def fused(self) -> int:
        """The number of hidden states that are fused; version 1 reads only the last one."""
        return 1 if self.version == "1" else len(self.context_layers) or _FUSED

    def layers_of(self, target: TargetConfig) -> tuple[int, ...]:
        """The indices of the target layers whose outputs the head fuses.

        Raises:
          InputError: the head was trained for a target with another number of layers, or its
            default layers need a target with more.
        """
        check_depth(target, self.num_target_layers)
        if self.version == "1" or self.context_layers:
            return self.context_layers
        layers = target.num_hidden_layers
        if layers < _LEAST_LAYERS:
            raise InputError(
                f"The EAGLE-3 head names no target layers to read, and its three default layers "
                f"need a target of {_LEAST_LAYERS} layers or more, but this one has {layers}; name "
                "layers in context_layers."
            )
        return 1, layers // 2 - 1, layers - 4

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a static tree, and a tree that has more beams than the head has tokens."""
        tree.check_beams("an EAGLE head")
        super().check_tree(tree)


class EagleHead(TrainedHead):
    """Parameters of an EAGLE head.

    `run` applies the layer, and `logits` computes scores of tokens from the layer's output.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs) -> None:
        layer, third = config.layer, config.version == "3"
        D, width = config.hidden_size, config.width
        inputs = config.fused * D if third else 2 * D
        self.config = config
        if config.norm_before_fc:
            self.input_norm = norm_weight(layer, inputs)
        if config.fc_norm:
            self.fc_norm = nnx.List([norm_weight(layer, D) for _ in range(config.fused)])
        self.fc = Dense(inputs, width, bias=config.fc_bias, rngs=rngs)
        if third:
            self.embedding_norm, self.hidden_norm = norm_weight(layer), norm_weight(layer)
            self.norm = norm_weight(layer)
        self.self_attn = Attention(layer, rngs=rngs, inputs=2 * width if third else width)
        self.mlp_norm = norm_weight(layer)
        self.mlp = FeedForward(layer, rngs=rngs)
        if config.own_embedding:
            self.embed_tokens = nnx.Param(WEIGHT_INIT(rngs.params(), (config.vocab_size, width)))
        if config.head == "own":
            self.lm_head = Dense(width, config.draft_vocab_size, bias=False, rngs=rngs)

    @property
    def dtype(self) -> jnp.dtype:
        """The activation dtype, taken from a norm because norms are never quantized."""
        return self.mlp_norm[...].dtype

    def embed(self, tokens: Int[Array, "..."], target: Decoder) -> Float[Array, "... width"]:
        """Return the embeddings of tokens, from the head's own table if it has one.

        Otherwise they come from the target's table, without the target's scaling of embeddings.
        """
        if not self.config.own_embedding:
            return target.stored_embeddings(tokens).astype(self.dtype)
        table = self.embed_tokens.get_value()
        return read_rows(table, tokens, self.config.vocab_size, self.dtype)

    def fuse(self, hidden: Float[Array, "... Z"]) -> Float[Array, "... width"]:
        """Return the hidden state that the layer reads, from the target's hidden states.

        EAGLE-3 fuses several hidden states into one; version 1 reads the last one.
        """
        config, D = self.config, self.config.hidden_size
        hidden = hidden.astype(self.dtype)
        if config.version == "1":
            return hidden
        hidden = hidden[..., : config.fused * D]  # only version 1 reads the last hidden state
        if config.norm_before_fc:
            hidden = normalised(hidden, self.input_norm, config.layer)
        if config.fc_norm:
            parts = zip(jnp.split(hidden, config.fused, axis=-1), self.fc_norm, strict=True)
            normed = [normalised(part, norm, config.layer) for part, norm in parts]
            hidden = jnp.concatenate(normed, axis=-1)
        return self.fc(hidden)

    def run(
        self,
        embedded: Float[Array, "B T width"],
        hidden: Float[Array, "B T width"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> tuple[Float[Array, "B T width"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Run the layer once.

        Args:
          embedded: embeddings of tokens; index i holds the token after position i.
          hidden: hidden states at the positions: the output of `fuse`, or while drafting the output
            of `feed_back` at the previous entry.
          positions: rotary positions.
          attend: attention, which decides which entries are visible.

        Returns:
          The layer's output, and the keys and the values of the entries.
        """
        config, layer = self.config, self.config.layer
        if config.version == "1":
            residual = x = self.fc(jnp.concatenate([embedded, hidden], axis=-1))
        else:
            normed = normalised(hidden, self.hidden_norm, layer)
            residual = normed if config.norm_before_residual else hidden
            x = jnp.concatenate([normalised(embedded, self.embedding_norm, layer), normed], axis=-1)
        attended, keys, values = self.self_attn(x, angles_of(layer, positions), attend)
        x = residual + attended
        x = x + self.mlp(normalised(x, self.mlp_norm, layer))
        return x, keys, values

    def feed_back(self, output: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Return the layer's output as the hidden state that the next round reads."""
        return self._last_norm(output) if self.config.norm_output else output

    def logits(
        self, output: Float[Array, "... width"], scorer: Scorer | None = None
    ) -> Float[Array, "... U"]:
        """Return float32 scores of the U draftable tokens, from the layer's output.

        On a mesh, the scores are this device's shard. With `head="target"`, `scorer` computes them.
        """
        output = output if self.config.version == "1" else self._last_norm(output)
        if self.config.head == "own":
            return linear(output, self.lm_head.kernel.get_value(), jnp.float32)
        assert scorer is not None, "head='target' has no projection of its own: pass scorer="
        return scorer(output)

    @property
    def attends(self) -> bool:
        return True

    def contexts(
        self,
        hidden: Float[Array, "B T Z"],
        embedded: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        rounds: int,
    ) -> Float[Array, "B T Y"]:
        """Return the layer's outputs of all rounds, concatenated; see `TrainedHead.contexts`.

        In round i, position t reads the true token at t + i + 1. In round 0, position t also reads
        the target's hidden state at t. In later rounds, it reads the layer's output of the previous
        round instead (arXiv 2503.01840, section 3.2).
        """
        positions, scale = positions_in(segments), self.config.layer.attention_scale
        state, embedded = self.fuse(hidden), embedded.astype(self.dtype)
        outputs, rollout = [], []
        for ahead in range(rounds):
            # Past the row's end there is no true token and no loss.
            fed = jnp.pad(embedded[:, ahead:], ((0, 0), (0, ahead), (0, 0)))
            attend = attend_in_rows(segments, scale, rollout)
            output, keys, values = self.run(fed, state, positions + ahead, attend)
            rollout = [*rollout, (keys, values)]
            outputs.append(output)
            state = self.feed_back(output)
        return jnp.concatenate(outputs, axis=-1)

    def unroll(
        self,
        contexts: Float[Array, "B C Y"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """Yield the scores of the layer's outputs, round by round; see `TrainedHead.unroll`."""
        del embedded
        for output in jnp.split(contexts, rounds, axis=-1):
            yield self.logits(output, scorer)

    def _last_norm(self, output: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return normalised(output, self.norm, self.config.layer)
