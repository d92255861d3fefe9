"""Apple's recurrent head (arXiv 2403.09919, section 3) and its variants: configuration, parameters.

The head drafts from the target's hidden states and the embeddings of the tokens drafted so far.
Some variants compute the scores from their features with the target's vocabulary projection.

A head with `attention` first passes the hidden states through its own decoder layer, once per
decided token, as Hydra++ does (arXiv 2402.05109). Unlike Hydra++, the layer also reads the
embedding of the token after each hidden state. A hidden state does not determine the token that is
chosen after it. Without the embedding, the layer could therefore not find earlier occurrences of
the root and the tokens that followed them (compare arXiv 2401.15077).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import Count, FieldError, Natural, Positive, require
from redrafter_jax.drafters.head_drafter import Dense, TrainedHead, make_blocks, run_blocks
from redrafter_jax.drafters.own_layer import LAYER_FIELDS, PairLayer, attend_in_rows, layer_config
from redrafter_jax.models.linear import linear
from redrafter_jax.models.rotary import positions_in
from redrafter_jax.types import Scorer

Cell = Literal["simple", "gru", "sum"]


@dataclass(frozen=True)
class RecurrentConfig(HeadConfig):
    """Configuration of a recurrent head; the defaults are the features of Apple's layout.

    The recurrent state has the target's width. `head="low_rank"` factors the vocabulary projection
    through `head_rank`. `head="target"` projects the features to the target's width and applies the
    target's vocabulary projection.

    Attributes:
      exit_dim: width of the residual blocks and of the features; training uses twice the target's
        width by default, as Apple's code does.
      num_draft_layers: number of residual blocks; training uses 2 by default.
      cell: recurrence: "simple" for `SiLU(W e + U s + b)` with the token's embedding e and the
        state s, "sum" for a running sum of embeddings, "gru" for a gated recurrent unit. Apple's
        layout has the first two.
      head_rank: rank of the factored projection for `head="low_rank"`; None for other heads.
      attention: whether a decoder layer attends to the text before the recurrence. The fields below
        configure this layer and are None without it; training takes unset fields from the target.
      intermediate_size: width of the layer's feed-forward block.
      num_attention_heads: Q, number of query heads.
      num_key_value_heads: K, number of key/value heads.
      head_dim: H, width of a head.
      rope_theta: base of the rotary embedding.
      rms_norm_eps: epsilon of the layer's norms.
    """

    exit_dim: Count
    num_draft_layers: Natural
    cell: Cell = "simple"
    head_rank: Count | None = None
    attention: bool = field(default=False, kw_only=True)
    intermediate_size: Count | None = field(default=None, kw_only=True)
    num_attention_heads: Count | None = field(default=None, kw_only=True)
    num_key_value_heads: Count | None = field(default=None, kw_only=True)
    head_dim: Count | None = field(default=None, kw_only=True)
    rope_theta: Positive | None = field(default=None, kw_only=True)
    rms_norm_eps: Positive | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in LAYER_FIELDS:
            stated = getattr(self, name)
            problem = f"is {stated} and attention is {self.attention}; "
            problem += "give a value." if self.attention else "leave it out."
            require((stated is not None) == self.attention, self, name, problem)
        if self.attention:
            _ = self.layer  # which checks its sizes
        rank, low = self.head_rank, self.head == "low_rank"
        problem = f"is {rank}, but head is {self.head!r}; head_rank is for head='low_rank' only."
        require(low or rank is None, self, "head_rank", problem)
        limit = "exit_dim" if rank is None else f"exit_dim={self.exit_dim}"
        problem = f"is {rank}; for head='low_rank' it must be less than {limit}."
        fits = rank is not None and rank < self.exit_dim
        require(fits or not low, self, "head_rank", problem)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a static tree, and a tree that has more beams than the head has tokens."""
        tree.check_beams("a recurrent head")
        super().check_tree(tree)

    @property
    def layer(self) -> TargetConfig:
        """The configuration of the attention layer, in the form of a target's configuration."""
        try:
            return layer_config(self.vocab_size, self.hidden_size, self)
        except FieldError as error:
            raise FieldError(self, error.field, error.problem) from None

    @property
    def beyond_apple(self) -> dict[str, Any]:
        """The fields that Apple's layout lacks, without those that change nothing.

        The mapping is empty for a drafter that Apple's code can read.
        """
        fields = {
            "cell": self.cell if self.cell == "gru" else None,
            "draft_tokens": self.draft_tokens,
            "head": self.head if self.head != "own" else None,
            "head_rank": self.head_rank,
            "context_layers": self.context_layers or None,
            "attention": self.attention or None,
            **{name: getattr(self, name) for name in LAYER_FIELDS},
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def has_input_projection(self) -> bool:
        """Whether `input_proj` exists.

        Apple's layout omits it if the concatenated context and state, `[h ; s]`, have width
        `exit_dim`.
        """
        return self.exit_dim != 2 * self.hidden_size


class RecurrentHead(TrainedHead):
    """Scores the next token from the context and the recurrent state.

    The context is computed from the target's hidden states. The concatenation `[context ; state]`
    passes through a projection, residual blocks and the vocabulary projection. All rounds share one
    set of weights. The state is zero before the root is read.
    """

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs) -> None:
        D, E = config.hidden_size, config.exit_dim
        self.config = config
        if config.cell == "simple":
            self.rnn_w = Dense(D, D, bias=False, rngs=rngs)
            self.rnn_u = Dense(D, D, bias=True, rngs=rngs)
        elif config.cell == "gru":
            # Reset gate, update gate and candidate side by side, as PyTorch's GRU has them.
            self.gru_w = Dense(D, 3 * D, bias=True, rngs=rngs)
            self.gru_u = Dense(D, 3 * D, bias=True, rngs=rngs)
        if config.context_layers:
            self.context_proj = Dense(config.context_size, D, bias=False, rngs=rngs)
            # The initial projection selects the last hidden state, which is Apple's context.
            self.context_proj.kernel[...] = jnp.eye(config.context_size, D, D - config.context_size)
        if config.attention:
            self.attention = PairLayer(config.layer, rngs=rngs)
        if config.has_input_projection:
            self.input_proj = Dense(2 * D, E, bias=True, rngs=rngs)
        self.blocks = make_blocks(E, config.num_draft_layers, rngs)
        rank = config.head_rank or E
        if config.head != "own":
            self.head_proj = Dense(E, D if config.head == "target" else rank, bias=False, rngs=rngs)
        if config.head != "target":
            self.lm_head = Dense(rank, config.draft_vocab_size, bias=False, rngs=rngs)

    def read_context(self, context: Float[Array, "... Z"]) -> Float[Array, "... D"]:
        """Project the target's hidden states to the context of all rounds, once per decode step.

        With `attention`, the result is the input of the attention layer.
        """
        return self.context_proj(context) if self.config.context_layers else context

    @property
    def attends(self) -> bool:
        return self.config.attention

    def contexts(
        self,
        hidden: Float[Array, "B T Z"],
        embedded: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        rounds: int,
    ) -> Float[Array, "B T Y"]:
        """Return the projected hidden states, or the outputs of the attention layer.

        See `TrainedHead.contexts` for the arguments.
        """
        del rounds
        if not self.attends:
            return hidden
        context = self.read_context(hidden)
        attend = attend_in_rows(segments, self.config.layer.attention_scale)
        embedded = embedded.astype(context.dtype)
        read, _, _ = self.attention(context, embedded, positions_in(segments), attend)
        return read

    def step(
        self, state: Float[Array, "... D"] | None, embedding: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """Return the state after a token; if `state` is None, the previous state is zero.

        The cells are `SiLU(W e + U s + b)`, the running sum `s + e`, and the gated recurrent unit
        of arXiv 1406.1078 with the reset gate applied after U (arXiv 1412.3555), as in PyTorch's
        GRU.
        """

        def recur(layer: Dense) -> Float[Array, "..."]:
            return layer.of_zeros() if state is None else layer(state)

        match self.config.cell:
            case "sum":
                return embedding if state is None else state + embedding
            case "simple":
                if state is not None and hasattr(self, "rnn_joined"):
                    both = jnp.concatenate([embedding, state], axis=-1)
                    joined = linear(both, self.rnn_joined.get_value())
                    return jax.nn.silu(joined + self.rnn_u.bias[...])
                return jax.nn.silu(self.rnn_w(embedding) + recur(self.rnn_u))
            case "gru":
                reset_e, update_e, candidate_e = jnp.split(self.gru_w(embedding), 3, axis=-1)
                reset_s, update_s, candidate_s = jnp.split(recur(self.gru_u), 3, axis=-1)
                reset = jax.nn.sigmoid(reset_e + reset_s)
                update = jax.nn.sigmoid(update_e + update_s)
                candidate = jnp.tanh(candidate_e + reset * candidate_s)
                kept = 0 if state is None else update * state
                return (1 - update) * candidate + kept

    def join_cell(self) -> None:
        """Also store W and U as one matrix, with which a GPU computes `W e + U s` as one product.

        The weights must not be quantized.
        """
        self.rnn_joined = nnx.Param(
            jnp.concatenate([self.rnn_w.kernel[...], self.rnn_u.kernel[...]])
        )

    def inputs(
        self, context: Float[Array, "... D"], state: Float[Array, "... D"]
    ) -> Float[Array, "... twice"]:
        """Concatenate `[context ; state]`; `context` from `read_context` broadcasts to `state`."""
        return jnp.concatenate([jnp.broadcast_to(context, state.shape), state], axis=-1)

    def features(self, x: Float[Array, "... twice"]) -> Float[Array, "... E"]:
        """Return the features from which the scores are computed; `x` is the result of `inputs`."""
        if self.config.has_input_projection:
            x = self.input_proj(x)
        return run_blocks(self.blocks, x)

    def logits(
        self, inputs: Float[Array, "... twice"], scorer: Scorer | None = None
    ) -> Float[Array, "... U"]:
        """Return float32 scores of the next token, after the last one that the state has read.

        There is a score for each of the U draftable tokens, in the order of `draft_token_ids`; on a
        mesh, the scores are this device's shard. With `head="target"`, `scorer` computes them.
        """
        features = self.features(inputs)
        if self.config.head != "own":
            features = self.head_proj(features)
        if self.config.head != "target":
            return linear(features, self.lm_head.kernel.get_value(), jnp.float32)
        assert scorer is not None, "head='target' has no projection of its own: pass scorer="
        return scorer(features)

    def unroll(
        self,
        contexts: Float[Array, "B C Y"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """Yield the scores of each round of the recurrence, with the true tokens as input.

        See `TrainedHead.unroll` for the arguments.
        """
        context = contexts if self.attends else self.read_context(contexts)
        state = jnp.zeros_like(context)
        for fed in range(rounds):
            own = embedded[:, fed : fed + context.shape[1]].astype(context.dtype)
            state = self.step(state, own)
            yield self.logits(self.inputs(context, state), scorer)
