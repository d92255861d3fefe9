"""Hydra heads (arXiv 2402.05109): one head per draft round, which reads the tokens drafted before.

Head k, counted from 0, reads the target's hidden state at the token before the root, and the
embeddings of the root and of the k tokens drafted after the root. So the scores differ between
beams. Hydra++ first passes the hidden states through a decoder layer with its own keys and values.
Like Medusa heads, heads with `grounded=False` read no embeddings.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import LinearScaling, TargetConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import Checked, Count, Natural, Positive, require
from redrafter_jax.drafters.head_drafter import Dense, HeadWeights
from redrafter_jax.drafters.own_layer import angles_of, layer_config
from redrafter_jax.errors import InputError
from redrafter_jax.models.decoder_layer import Attend, DecoderLayer, norm_weight, normalised
from redrafter_jax.models.linear import linear
from redrafter_jax.types import Scorer


@dataclass(frozen=True)
class PrefixLayer(Checked):
    """Configuration of the decoder layer of Hydra++, which is like the target's layers.

    Attributes:
      intermediate_size: width of the feed-forward block.
      num_attention_heads: Q, number of query heads.
      num_key_value_heads: K, number of key/value heads.
      head_dim: H, width of a head.
      rms_norm_eps: epsilon of the layer's norms, and of the norm after the layer.
      rope_theta: base of the rotary embedding; the authors' code uses the same constant for every
        target.
      rope_scaling: scaling of the rotary frequencies; None for no scaling. The authors' code has
        linear and dynamic scaling, of which only linear scaling is supported.
    """

    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    rope_scaling: LinearScaling | None = None


@dataclass(frozen=True)
class HydraConfig(HeadConfig):
    """Configuration of Hydra heads, whose width is the target's.

    Attributes:
      num_heads: number of tokens predicted after the root, each by its own head.
      num_draft_layers: number of residual blocks per head. In a grounded head, all blocks but the
        first are the same block, applied repeatedly.
      grounded: whether a head reads the embeddings of the root and of the tokens drafted so far.
      hidden_state_offset: number of layers by which the layer whose output is read precedes the
        last layer; 0 reads the last hidden state, after the final norm.
      prefix: configuration of the decoder layer of Hydra++; None for heads without this layer.
    """

    num_heads: Count
    num_draft_layers: Count
    grounded: bool = True
    hidden_state_offset: Natural = 0
    prefix: PrefixLayer | None = None
    head: Literal["own", "target"] = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"is {self.context_layers}; for Hydra heads set hidden_state_offset instead."
        require(not self.context_layers, self, "context_layers", problem)
        if self.prefix is not None:
            _ = self.layer  # which checks its sizes

    @property
    def layer(self) -> TargetConfig:
        """The configuration of the layer of Hydra++, in the form of a target's configuration."""
        prefix = self.prefix
        assert prefix is not None, "heads without a layer"
        return layer_config(
            self.vocab_size, self.hidden_size, prefix, rope_scaling=prefix.rope_scaling
        )

    def layers_of(self, target: TargetConfig) -> tuple[int, ...]:
        """The index of the layer whose output the heads read, as a tuple; () for the last layer.

        Raises:
          InputError: the target has too few layers.
        """
        if not self.hidden_state_offset:
            return ()
        layer = target.num_hidden_layers - 1 - self.hidden_state_offset
        if layer < 0:
            raise InputError(
                f"The drafter's hidden_state_offset is {self.hidden_state_offset}, but the target "
                f"has {target.num_hidden_layers} layers; use a drafter trained for this target."
            )
        return (layer,)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a static tree, more draft rounds than heads, and more beams than tokens."""
        tree.check_beams("Hydra heads")
        if tree.draft_rounds > self.num_heads:
            raise InputError(
                f"TreeConfig.draft_rounds is {tree.draft_rounds}, but the drafter has "
                f"{self.num_heads} Hydra heads; give that number or fewer."
            )
        super().check_tree(tree)


class HydraBlock(nnx.Module):
    """A residual block, `R x + SiLU(A x + a)`; R is the identity if the width does not change."""

    def __init__(self, inputs: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.linear = Dense(inputs, width, bias=True, rngs=rngs)
        if inputs != width:
            self.residual = Dense(inputs, width, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... D"]:
        kept = self.residual(x) if hasattr(self, "residual") else x
        return kept + jax.nn.silu(self.linear(x))


class HydraHead(nnx.Module):
    """The blocks of one head, and its vocabulary projection unless the head uses the target's."""

    def __init__(self, config: HydraConfig, number: int, *, rngs: nnx.Rngs) -> None:
        D, repeated = config.hidden_size, config.num_draft_layers
        self.config = config
        if config.grounded:
            repeated -= 1
            self.first = HydraBlock((number + 2) * D, D, rngs=rngs)
        if repeated:
            self.again = HydraBlock(D, D, rngs=rngs)
        if config.head == "own":
            self.lm_head = Dense(D, config.draft_vocab_size, bias=True, rngs=rngs)

    def __call__(
        self, x: Float[Array, "... I"], scorer: Scorer | None = None
    ) -> Float[Array, "... U"]:
        """Return float32 scores of the U draftable tokens; on a mesh, this device's shard.

        Args:
          x: input of the first block: for `grounded` heads the hidden state and the embeddings of
            the root and of the tokens drafted so far, side by side; for others the hidden state.
          scorer: the target's vocabulary projection; required for `head="target"` only.
        """
        repeated = self.config.num_draft_layers
        if self.config.grounded:
            x, repeated = self.first(x), repeated - 1
        for _ in range(repeated):
            x = self.again(x)
        if self.config.head == "own":
            kernel, bias = self.lm_head.kernel.get_value(), self.lm_head.bias[...]
            return linear(x, kernel, jnp.float32) + bias.astype(jnp.float32)
        assert scorer is not None, "head='target' has no projection of its own: pass scorer="
        return scorer(x)


class HydraHeads(HeadWeights):
    """Parameters of Hydra heads; head k, from 0, predicts token k + 1 after the root."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        if config.prefix is not None:
            self.prefix = DecoderLayer(config.layer, rngs=rngs)
            self.prefix_norm = norm_weight(config.layer)
        numbers = range(config.num_heads)
        self.heads = nnx.List([HydraHead(config, number, rngs=rngs) for number in numbers])

    @property
    def dtype(self) -> jnp.dtype:
        """The activation dtype, taken from a bias because biases are never quantized."""
        head = self.heads[0]
        block = head.first if self.config.grounded else head.again
        return block.linear.bias[...].dtype

    def pass_layer(
        self, hidden: Float[Array, "B C D"], positions: Int[Array, "B C"], attend: Attend
    ) -> tuple[Float[Array, "B C D"], Float[Array, "B C K H"], Float[Array, "B C K H"]]:
        """Apply the layer of Hydra++ and its norm; return the outputs, the keys and the values."""
        layer = self.config.layer
        passed, keys, values = self.prefix(hidden, angles_of(layer, positions), attend)
        return normalised(passed, self.prefix_norm, layer), keys, values
