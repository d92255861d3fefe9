"""What the heads of every kind have: layers, the tokens that they can draft, scores of those."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import linear
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.types import Scorer

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


def score(
    features: Float[Array, "... E"], own: Dense | None, scorer: Scorer | None
) -> Float[Array, "... U"]:
    """Scores of the tokens that can be drafted, float32; on a mesh those of this device's part.

    Args:
      features: what is projected to the vocabulary.
      own: the head's own projection; None where it has head="target".
      scorer: the target's projection then, of these tokens.

    Raises:
      InputError: there is neither.
    """
    if own is not None:
        return linear(features, own.kernel.get_value(), jnp.float32)
    if scorer is None:
        raise InputError(
            "The drafter has head='target' and no vocabulary projection of its own; pass "
            "scorer=, the target's."
        )
    return scorer(features)


class DraftHead(nnx.Module):
    """Parameters that draft from the target's hidden states; a kind for each configuration.

    Attributes:
      config: its shape, a `DrafterConfig` or a `MedusaConfig`.
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
