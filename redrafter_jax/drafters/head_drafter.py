"""What drafters with a head have in common: layers, the tokens to draft, the state, the checks."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead, check_context_layers
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import linear
from redrafter_jax.models.projection import Lender, Projection
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Decided, KVCache, Scorer

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

    def of_zeros(self) -> Float[Array, " O"]:
        """What it makes of zeros, for which the kernel need not be read; it has a bias."""
        return all_gather(self.bias[...], self.width_out)


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


class TrainedHead(HeadWeights):
    """Parameters of a head that is trained here."""

    @property
    def attends(self) -> bool:
        """Whether what it drafts from at a position depends on the positions before."""
        return False

    def contexts(
        self,
        hidden: Float[Array, "B T Z"],
        embedded: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        rounds: int,
    ) -> Float[Array, "B T Y"]:
        """What `unroll` drafts from at each position; without attention the hidden states.

        Args:
          hidden: the target's hidden states.
          embedded: embeddings of the tokens that follow, the last of a row any.
          segments: number of each token's document; none reads another's.
          rounds: R.
        """
        del embedded, segments, rounds
        return hidden

    @abstractmethod
    def unroll(
        self,
        contexts: Float[Array, "B C Y"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """What training compares, round by round: scores at C positions after true tokens.

        Args:
          contexts: those of the positions, from `contexts`.
          embedded: embeddings of the tokens that follow: position c feeds `embedded[:, c + i]` in
            round i, which predicts the token after that.
          rounds: R.
          scorer: the target's vocabulary projection of the U tokens, for a head that has none.
        """


@dataclass(frozen=True)
class HeadDrafter(Drafter):
    """A head, which drafts from the target's hidden state at the last token: its state, `[B Z]`.

    Attributes:
      model: the head.
      borrowed: the target's projection of the head's tokens, from `prepare`, if it has none.
    """

    model: LoadedHead
    borrowed: Model[None, Projection] | None = None

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        return self.model.config.layers_of(target)

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return (self.model,)

    def check(self, target: TargetConfig) -> None:
        """Refuse the target of another head."""
        _check_target(target, self.model.config)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse trees that a head of this kind cannot draft."""
        self.model.config.check_tree(tree)

    def prepare(self, lender: Lender) -> "HeadDrafter":
        """The drafter with the target's projection of its `draft_tokens`, where it needs that.

        It stays as it is where it has a projection of its own, drafts all tokens, or lies on a mesh
        that splits the vocabulary.
        """
        config = self.model.config
        if config.head != "target" or config.draft_tokens is None or self.borrowed is not None:
            return self
        return replace(self, borrowed=lender.projection(config.draft_tokens))

    def scorer(self, target: Decoder) -> Scorer | None:
        """The target's projection of the head's tokens; None for a head that has its own."""
        if self.model.config.head != "target":
            return None
        if self.borrowed is not None:
            return self.borrowed.merge()
        return target.scorer(self.model.merge().draft_token_ids)

    def empty(self, target: Decoder, rows: int) -> Float[Array, "B context"]:
        return jnp.zeros((rows, self.model.config.context_size), target.dtype)

    def read(
        self, target: Decoder, own: Float[Array, "B context"], cache: KVCache, decided: Decided
    ) -> tuple[Float[Array, "B context"], KVCache]:
        """The hidden state at the last token, which chose the root."""
        newest = jnp.maximum(decided.count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(decided.hidden, newest, axis=1)[:, 0]
        hidden = target.of_one_scale(hidden)
        return jnp.where(decided.count[:, None] > 0, hidden, own), cache


def _check_target(target: TargetConfig, drafter: HeadConfig) -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter, name), getattr(target, name)
        if ours != theirs:
            raise InputError(
                f"The drafter's {name} is {ours} and the target's is {theirs}; use a drafter "
                "trained for this target."
            )
    check_context_layers(target, drafter.layers_of(target), "The drafter's context_layers")
