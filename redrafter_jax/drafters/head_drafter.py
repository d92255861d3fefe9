"""What drafters with a head have in common: layers, the tokens to draft, the state, the checks."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import HeadConfig, TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, check_context_layers
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import linear
from redrafter_jax.models.projection import Lender, Projection
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Scorer, StepTrace, Verified

# A trained head of any kind, from `load_drafter`; `kinds` has their records.
LoadedHead = Model[Any, Any]
_WEIGHT_INIT = nnx.initializers.lecun_normal()


class Dense(nnx.Module):
    """An affine map, its kernel stored [in, out]."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool, rngs: nnx.Rngs) -> None:
        self.width_out = width_out
        self.kernel = nnx.Param(_WEIGHT_INIT(rngs.params(), (width_in, width_out)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(width_out))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = linear(x, self.kernel.get_value())
        y = y + self.bias[...] if hasattr(self, "bias") else y
        return all_gather(y, self.width_out)


def make_blocks(width: int, count: int, rngs: nnx.Rngs) -> nnx.List[Dense]:
    """The layers of so many residual blocks, which all kinds of heads have alike."""
    return nnx.List([Dense(width, width, bias=True, rngs=rngs) for _ in range(count)])


def run_blocks(blocks: Sequence[Dense], x: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """`x + SiLU(A x + a)`, block after block."""
    for block in blocks:
        x = x + jax.nn.silu(block(x))
    return x


class HeadWeights(nnx.Module):
    """Parameters that draft from the target's hidden states; a kind for each configuration.

    Attributes:
      config: the head's shape, a subclass of `HeadConfig`.
    """

    config: Any

    @property
    def draft_token_ids(self) -> Int[Array, " U"] | None:
        """The token of every score; None where the scores are those of all V tokens."""
        tokens = self.config.draft_tokens
        return None if tokens is None else jnp.asarray(tokens, jnp.int32)

    @abstractmethod
    def unroll(
        self,
        hidden: Float[Array, "B C Z"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """What training compares, round by round: scores at C positions after true tokens.

        Args:
          hidden: the target's hidden states at the positions.
          embedded: embeddings of the tokens that follow: position c feeds `embedded[:, c + i]` in
            round i, which predicts the token after that.
          rounds: R.
          scorer: the target's vocabulary projection of the U tokens, for a head that has none.
        """


@dataclass(frozen=True)
class HeadDrafter(Drafter):
    """A head and the trees that it drafts; its state is the context, `[B Z]`.

    Attributes:
      model: the head.
      tree: beam width, draft rounds, node budget; `lookup_tokens` belong to `Combined`.
      borrowed: the target's projection of the head's tokens, from `prepare`, if it has none.
    """

    model: LoadedHead
    tree: TreeConfig = field(metadata={"static": True})
    borrowed: Model[None, Projection] | None = None

    @property
    def max_path(self) -> int:
        return self.tree.draft_rounds + 1

    @property
    def num_nodes(self) -> int:
        return self.tree.beam_nodes

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.model.config.context_layers

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return (self.model,)

    def check(self, target: TargetConfig) -> None:
        """Refuse prompt lookup, which is another drafter's, and what `check_pair` refuses."""
        if self.tree.lookup_tokens:
            raise InputError(
                f"TreeConfig.lookup_tokens is {self.tree.lookup_tokens}, but "
                f"{type(self).__name__} does no prompt lookup; use bind_drafter, or Combined with "
                "PromptLookup."
            )
        check_pair(target, self.model.config, self.tree)

    def prepare(self, lender: Lender) -> "HeadDrafter":
        """With the target's projection gathered for the head's tokens, if the head has none."""
        config = self.model.config
        if config.head != "target" or config.draft_tokens is None or self.borrowed is not None:
            return self
        return replace(self, borrowed=lender.projection(config.draft_tokens))

    def scorer(self, decoder: Decoder) -> Scorer | None:
        """The target's projection of the head's tokens; None for a head that has its own."""
        if self.model.config.head != "target":
            return None
        if self.borrowed is not None:
            return self.borrowed.merge()
        return decoder.scorer(self.model.merge().draft_token_ids)

    def init(self, hidden: Float[Array, "B Z"]) -> Float[Array, "B context"]:
        return self._own_context(hidden)

    def observe(
        self, drafter_state: Float[Array, "B context"], verified: Verified, trace: StepTrace
    ) -> Float[Array, "B context"]:
        """The hidden state at the last accepted node, which chose the new root."""
        newest = jnp.maximum(trace.gained - 1, 0)[:, None]
        node = jnp.take_along_axis(trace.accepted.path, newest, axis=1)
        context = jnp.take_along_axis(verified.hidden, node[..., None], axis=1)[:, 0]
        return jnp.where(trace.gained[:, None] > 0, self._own_context(context), drafter_state)

    def _own_context(self, hidden: Float[Array, "B Z"]) -> Float[Array, "B context"]:
        size = self.model.config.context_size
        if hidden.shape[-1] < size:
            raise InputError(
                f"The hidden states are {hidden.shape[-1]} wide and the drafter reads {size}; "
                f"prefill with context_layers={self.context_layers}."
            )
        # Another drafter's layers, which this one does not read, may come before.
        return hidden[..., -size:]


def check_pair(target: TargetConfig, drafter: HeadConfig, tree: TreeConfig) -> None:
    """Refuse a head of another target, and trees that it cannot draft or that reach too far."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter, name), getattr(target, name)
        if ours != theirs:
            raise InputError(
                f"The drafter's {name} is {ours} and the target's is {theirs}; use a drafter "
                "trained for this target."
            )
    check_context_layers(target, drafter.context_layers, "The drafter's context_layers")
    if tree.max_path > target.position_limit:
        lookup = f" and lookup_tokens {tree.lookup_tokens}" if tree.lookup_tokens else ""
        raise InputError(
            f"TreeConfig.draft_rounds is {tree.draft_rounds}{lookup}, but the target has "
            f"{target.position_limit} positions; draft fewer."
        )
    drafter.check_tree(tree)
