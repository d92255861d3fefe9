"""Medusa heads (arXiv 2401.10774, section 2.1.1): one for every token after the next.

Parameters only. All of them read the target's last hidden state, and nothing of what is drafted.
"""

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from redrafter_jax.config import MedusaConfig
from redrafter_jax.drafters.head import Dense, DraftHead, make_blocks, run_blocks, score
from redrafter_jax.types import Scorer


class MedusaHead(nnx.Module):
    """Residual blocks, and a vocabulary projection unless the target lends its own."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs) -> None:
        D = config.hidden_size
        self.blocks = make_blocks(D, config.num_draft_layers, rngs)
        if config.head == "own":
            self.lm_head = Dense(D, config.draft_vocab_size, bias=False, rngs=rngs)


class MedusaHeads(DraftHead):
    """K heads; head k predicts the token k + 2 places after the one whose hidden state it reads.

    The target itself predicts the token before that of head 0, the root.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.heads = nnx.List([MedusaHead(config, rngs=rngs) for _ in range(config.num_heads)])

    def logits(
        self, hidden: Float[Array, "... D"], rounds: int, scorer: Scorer | None = None
    ) -> Float[Array, "... R U"]:
        """Scores of the first R heads, float32, for each of the tokens that can be drafted.

        On a mesh, those of this device's part of them. With `head="target"` the scorer makes them,
        of all heads in one pass over its weights.

        Raises:
          InputError: there is no scorer, but the projection is the target's.
        """
        used = self.heads[:rounds]
        features = [run_blocks(head.blocks, hidden) for head in used]
        if self.config.head == "target":
            return score(jnp.stack(features, axis=-2), None, scorer)
        own = [score(x, head.lm_head, None) for head, x in zip(used, features, strict=True)]
        return jnp.stack(own, axis=-2)

    def unroll(
        self,
        hidden: Float[Array, "B C D"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """See `DraftHead`: a head for every round, whatever tokens follow."""
        del embedded
        yield from jnp.moveaxis(self.logits(hidden, rounds, scorer), -2, 0)
