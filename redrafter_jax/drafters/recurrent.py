"""Apple's recurrent head (arXiv 2403.09919, section 3), its variants, and the beams it drafts.

The head drafts from the target's hidden states and from the embeddings of the tokens drafted so
far, and knows nothing else of the target, except that some leave the last step, from features to
scores, to the target's vocabulary projection. The trace of its beam search is the token tree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import HeadConfig, TreeConfig
from redrafter_jax.config.limits import Count, FieldError, Natural, require
from redrafter_jax.drafters.grow import Grown, grow
from redrafter_jax.drafters.head_drafter import (
    Dense,
    HeadDrafter,
    TrainedHead,
    make_blocks,
    run_blocks,
)
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.models.linear import Weight, linear, read_rows
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import (
    Beams,
    DraftReads,
    KVCache,
    Sampling,
    Scorer,
    TokenTree,
    View,
)

MODEL_TYPE = "recurrent_drafting_drafter"
Cell = Literal["simple", "gru", "sum"]


@dataclass(frozen=True)
class RecurrentConfig(HeadConfig):
    """Shape of a recurrent head; the defaults are Apple's layout.

    The recurrent state has the target's width. `head="low_rank"` has factors from exit_dim to
    head_rank to the tokens, and `head="target"` a projection to the target's width that the
    target's own vocabulary projection scores.

    Attributes:
      exit_dim: width of the residual blocks and of what they hand to the head; training takes twice
        the target's width, as Apple's code does, if it is not told.
      num_draft_layers: number of residual blocks; training takes 2 if it is not told.
      cell: "simple" for `SiLU(W e + U s + b)` and "sum" for a running sum of embeddings, both of
        Apple's layout; "gru" for a gated recurrent unit.
      head_rank: of the two factors; None for the other heads.
    """

    exit_dim: Count
    num_draft_layers: Natural
    cell: Cell = "simple"
    head_rank: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rank, low = self.head_rank, self.head == "low_rank"
        problem = f"is {rank} and head is {self.head!r}; give it to head='low_rank' alone."
        require(low or rank is None, self, "head_rank", problem)
        limit = "exit_dim" if rank is None else f"exit_dim={self.exit_dim}"
        problem = f"is {rank}; head='low_rank' needs one, less than {limit}."
        fits = rank is not None and rank < self.exit_dim
        require(fits or not low, self, "head_rank", problem)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse trees of ranks, and those whose beams take more tokens than can be drafted."""
        tree.check_beams("a recurrent head")
        super().check_tree(tree)

    @property
    def beyond_apple(self) -> dict[str, Any]:
        """The fields that Apple's layout does not have, where they say more than it does.

        Empty for a drafter that Apple's code can read.
        """
        fields = {
            "cell": self.cell if self.cell == "gru" else None,
            "draft_tokens": self.draft_tokens,
            "head": self.head if self.head != "own" else None,
            "head_rank": self.head_rank,
            "context_layers": self.context_layers or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def has_input_projection(self) -> bool:
        """Apple's layout leaves the projection out when `[h ; s]` already has the exit width."""
        return self.exit_dim != 2 * self.hidden_size


class RecurrentHead(TrainedHead):
    """`[context ; state]` -> projection -> residual blocks -> head -> the tokens to draft from.

    One set of weights serves every round; the state is zero before the root is fed.
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
            # It begins with Apple's context: the last hidden state alone.
            self.context_proj.kernel[...] = jnp.eye(config.context_size, D, D - config.context_size)
        if config.has_input_projection:
            self.input_proj = Dense(2 * D, E, bias=True, rngs=rngs)
        self.blocks = make_blocks(E, config.num_draft_layers, rngs)
        rank = config.head_rank or E
        if config.head != "own":
            self.head_proj = Dense(E, D if config.head == "target" else rank, bias=False, rngs=rngs)
        if config.head != "target":
            self.lm_head = Dense(rank, config.draft_vocab_size, bias=False, rngs=rngs)

    def read_context(self, context: Float[Array, "... Z"]) -> Float[Array, "... D"]:
        """What conditions every round, from the target's hidden states; once per decode step."""
        return self.context_proj(context) if self.config.context_layers else context

    def step(
        self, state: Float[Array, "... D"], embedding: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """The state after a token.

        `SiLU(W e + U s + b)`, the running sum `s + e`, or the gated recurrent unit of
        arXiv 1406.1078, its reset gate where PyTorch's GRU has it (arXiv 1412.3555): after U.
        """
        match self.config.cell:
            case "sum":
                return state + embedding
            case "simple":
                return jax.nn.silu(self.rnn_w(embedding) + self.rnn_u(state))
            case "gru":
                reset_e, update_e, candidate_e = jnp.split(self.gru_w(embedding), 3, axis=-1)
                reset_s, update_s, candidate_s = jnp.split(self.gru_u(state), 3, axis=-1)
                reset = jax.nn.sigmoid(reset_e + reset_s)
                update = jax.nn.sigmoid(update_e + update_s)
                candidate = jnp.tanh(candidate_e + reset * candidate_s)
                return (1 - update) * candidate + update * state

    def features(
        self, context: Float[Array, "... D"], state: Float[Array, "... D"]
    ) -> Float[Array, "... E"]:
        """What the head reads; `context`, of `read_context`, broadcasts against `state`."""
        context = jnp.broadcast_to(context, state.shape)
        x = jnp.concatenate([context, state], axis=-1)
        if self.config.has_input_projection:
            x = self.input_proj(x)
        return run_blocks(self.blocks, x)

    def logits(
        self,
        context: Float[Array, "... D"],
        state: Float[Array, "... D"],
        scorer: Scorer | None = None,
    ) -> Float[Array, "... U"]:
        """Scores of the token after the one that `state` was last fed, float32.

        One for each of the tokens that can be drafted, in their order; see `draft_token_ids`. On a
        mesh, those of this device's part of them. With `head="target"` the scorer makes them, of
        these tokens.
        """
        features = self.features(context, state)
        if self.config.head != "own":
            features = self.head_proj(features)
        if self.config.head != "target":
            return linear(features, self.lm_head.kernel.get_value(), jnp.float32)
        assert scorer is not None, "head='target' has no projection of its own: pass scorer="
        return scorer(features)

    def unroll(
        self,
        hidden: Float[Array, "B C Z"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """See `TrainedHead`: the decoder's recurrence, fed with true tokens."""
        context = self.read_context(hidden)
        state = jnp.zeros_like(context)
        for fed in range(rounds):
            own = embedded[:, fed : fed + context.shape[1]].astype(context.dtype)
            state = self.step(state, own)
            yield self.logits(context, state, scorer)


def beam_search(
    drafter: RecurrentHead,
    embedding: Weight,
    context: Float[Array, "B Z"],
    root: Int[Array, " B"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    tree: TreeConfig,
    scorer: Scorer | None = None,
) -> Beams:
    """Draft R tokens on each of W beams below the root, each from its own recurrent state.

    Args:
      drafter: the recurrent head.
      embedding: the target's token embedding; on a mesh, this device's part of it.
      context: the target's hidden states before the root: the context layers', then the last.
      root: the last decided token.
      noise: as `grow` takes it.
      sampling: the rows' temperature and filters.
      tree: as `grow` takes it.
      scorer: the target's vocabulary projection of the U tokens, where the drafter has none.
    """
    context = drafter.read_context(context)

    def advance(
        grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
    ) -> tuple[Grown, Float[Array, "B w U"]]:
        del round
        V = drafter.config.vocab_size
        embedded = read_rows(embedding, tokens, V, grown.beams.dtype)
        states = drafter.step(grown.beams, embedded)
        return Grown(states), drafter.logits(context[:, None], states, scorer)

    start = Grown(jnp.zeros_like(context)[:, None])
    return grow(advance, start, root, noise, sampling, tree, drafter.draft_token_ids)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentDrafter(HeadDrafter):
    """A recurrent head, and the beams that it drafts."""

    @property
    def name(self) -> str:
        return "recurrent"

    def propose(
        self,
        target: Decoder,
        own: Float[Array, "B Z"],
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del cache
        beams = beam_search(
            self.model.merge(),
            target.embed_tokens.get_value(),
            own,
            view.root,
            noise,
            view.sampling,
            tree,
            self.scorer(target),
        )
        return build_tree(view.root, beams, tree)


def to_files(config: RecurrentConfig) -> dict[str, Any]:
    """What Apple's code states of a drafter in `config.json` (`configuration_drafter.py`).

    And what it does not know, where the drafter has it: `RecurrentConfig.beyond_apple`.
    """
    return {
        "architectures": ["Drafter"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": config.cell != "sum",
        **config.beyond_apple,
    }


def from_files(stated: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The field `cell` as `config.json` means it; nothing where it states the cell by name.

    Apple's layout has `rnn` alone: true is the cell "simple", false is "sum". Ours adds `cell`.

    Raises:
      FieldError: `rnn` and `cell` contradict each other.
    """
    del shapes
    has_cell, cell = stated["rnn"], stated.get("cell")
    if cell is None:
        return {"cell": "simple" if has_cell else "sum"}
    if has_cell == (cell == "sum"):
        problem = f"is {cell!r} and rnn is {has_cell}, which contradict each other."
        raise FieldError(RecurrentConfig, "cell", problem)
    return {}


def stored_name(config: RecurrentConfig, name: str) -> str:
    """Ours: blocks.0.kernel, lm_head.kernel ... Apple's: one `lm_head` list holds them all."""
    name = name.replace("kernel", "weight")
    if name == "lm_head.weight":
        return f"lm_head.{config.num_draft_layers}.weight"
    first, *rest = name.split(".")
    return f"lm_head.{rest[0]}.linear.{rest[1]}" if first == "blocks" else name


def start_from_target(module: RecurrentHead, projection: Float[Array, "D U"]) -> None:
    """Start the head from the target's vocabulary projection, or from its strongest directions.

    Raises:
      FieldError: the head is wider.
    """
    config = module.config
    D, E = config.hidden_size, config.exit_dim
    name, width = ("head_rank", config.head_rank) if config.head_rank else ("exit_dim", E)
    if width > D and config.head != "target":
        limit = f"with initial_head=target it may be {D}, the target's width, at most."
        raise FieldError(config, name, f"is {width}; {limit}")
    match config.head:
        case "own":
            module.lm_head.kernel[...] = _low_rank(projection, E)[1]
        case "low_rank":
            module.head_proj.kernel[...] = jnp.eye(E, width)
            module.lm_head.kernel[...] = _low_rank(projection, width)[1]
        case "target":
            start = _low_rank(projection, E)[0] if E < D else jnp.eye(E, D)
            module.head_proj.kernel[...] = start


def _low_rank(
    projection: Float[Array, "D U"], rank: int
) -> tuple[Float[Array, "E D"], Float[Array, "E U"]]:
    """The best approximation by rank E: its E leading directions, and the head of these.

    With E = D they are the identity and the projection itself.
    """
    if rank == len(projection):
        return jnp.eye(rank), projection
    _, directions = jnp.linalg.eigh(projection @ projection.T)
    leading = directions[:, : -rank - 1 : -1].T
    return leading, leading @ projection


def count_reads(config: RecurrentConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Every round reads all weights, but the projection of the context, which is read once."""
    rounds = tree.draft_rounds
    weights = [(part, 1 if name == "context_proj" else rounds) for name, part in params.items()]
    # The root alone is fed in the first round, W tokens in every later one.
    fed = 1 + tree.beam_width * (rounds - 1)
    return DraftReads(weights, rounds if config.head == "target" else 0, fed)
