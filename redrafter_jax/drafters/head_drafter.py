"""The parts that all drafters with a head share: layers, draftable tokens, state and checks."""

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
    """An affine map; its kernel is stored [in, out]."""

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
        """The output for an input of zeros, which is the bias; this does not read the kernel."""
        return all_gather(self.bias[...], self.width_out)


def make_blocks(width: int, count: int, rngs: nnx.Rngs) -> nnx.List[Dense]:
    """Return the layers of `count` residual blocks."""
    return nnx.List([Dense(width, width, bias=True, rngs=rngs) for _ in range(count)])


def run_blocks(blocks: Sequence[Dense], x: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """Apply residual blocks, each of which computes `x + SiLU(A x + a)`."""
    for block in blocks:
        x = x + jax.nn.silu(block(x))
    return x


class HeadWeights(nnx.Module):
    """Parameters of a head that drafts from the target's hidden states; one subclass per kind.

    Attributes:
      config: the head's configuration, a subclass of `HeadConfig`.
    """

    config: Any

    @property
    def draft_token_ids(self) -> Int[Array, " U"] | None:
        """Ids of the U draftable tokens, in the order of the scores; None for all V tokens."""
        tokens = self.config.draft_tokens
        return None if tokens is None else jnp.asarray(tokens, jnp.int32)


class TrainedHead(HeadWeights):
    """Parameters of a head that this library can train."""

    @property
    def attends(self) -> bool:
        """Whether the result of `contexts` at a position depends on earlier positions."""
        return False

    def contexts(
        self,
        hidden: Float[Array, "B T Z"],
        embedded: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        rounds: int,
    ) -> Float[Array, "B T Y"]:
        """Return the vectors from which `unroll` drafts; by default the hidden states.

        Args:
          hidden: the target's hidden states.
          embedded: at each position, the embedding of the next token; arbitrary at the last one.
          segments: index of each token's document; documents do not attend to each other.
          rounds: R, number of draft rounds.
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
        """Yield the scores of each draft round at C positions, for the training loss.

        Args:
          contexts: vectors that the method `contexts` returned for these positions.
          embedded: embeddings of the true next tokens. In round i, position c reads
            `embedded[:, c + i]` and predicts the token after it.
          rounds: R, number of draft rounds.
          scorer: the target's projection to the U draftable tokens, for heads without a projection.
        """


@dataclass(frozen=True)
class HeadDrafter(Drafter):
    """A drafter with a head; its state `own` is the hidden state at the last read token, `[B Z]`.

    Attributes:
      model: the head.
      borrowed: the target's projection to the draftable tokens, set by `prepare`; None if the head
        needs none.
    """

    model: LoadedHead
    borrowed: Model[None, Projection] | None = None

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        return self.model.config.layers_of(target)

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return (self.model,)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit the head."""
        _check_target(target, self.model.config)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a tree that this kind of head cannot draft."""
        self.model.config.check_tree(tree)

    def prepare(self, lender: Lender) -> "HeadDrafter":
        """Return the drafter with the target's projection to its `draft_tokens`, if it needs one.

        The drafter needs none if its head has a projection, if its head drafts all tokens, or on a
        mesh that splits the vocabulary.
        """
        config = self.model.config
        if config.head != "target" or config.draft_tokens is None or self.borrowed is not None:
            return self
        return replace(self, borrowed=lender.projection(config.draft_tokens))

    def scorer(self, target: Decoder) -> Scorer | None:
        """The target's vocabulary projection to the draftable tokens.

        None if the head has a projection of its own.
        """
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
        """Keep the target's hidden state at the last token, from which it chose the root."""
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
