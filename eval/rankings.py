"""Ways for a beam search to rank drafts while the target samples, for comparison.

The library has one of them, "shared". They differ in how much of the target's noise and filters the
drafter is shown. This changes the speed alone: the target chooses with its own.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import DecodeState, StepTrace, TokenTree, Verified

Ranking = Literal["shared", "weak noise", "unfiltered", "blind"]

RANKINGS: dict[Ranking, str] = {
    "shared": "sharpness * (filtered logits + temperature * noise)",
    "weak noise": "sharpness * filtered logits + temperature * noise",
    "unfiltered": "sharpness * (logits + temperature * noise), filters left to the target",
    "blind": "sharpness * filtered logits, no noise",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ranked(Drafter):
    """A drafter that is shown other noise and filters than the target chooses with.

    Attributes:
      drafter: any other.
      noise_weight: factor on the noise that it is shown, a float scalar.
      filtered: whether it is shown the filters, a bool scalar.
    """

    drafter: Drafter
    # Arrays, or whatever JAX maps the leaves of a pytree to.
    noise_weight: Any
    filtered: Any

    @property
    def max_path(self) -> int:
        return self.drafter.max_path

    @property
    def num_nodes(self) -> int:
        return self.drafter.num_nodes

    @property
    def names(self) -> tuple[str, ...]:
        return self.drafter.names

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.drafter.context_layers

    def prepare(self, lender: Lender) -> "Ranked":
        return replace(self, drafter=self.drafter.prepare(lender))

    def init(self, hidden: Float[Array, "B Z"]) -> Any:
        return self.drafter.init(hidden)

    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        sampling = state.sampling
        shown = sampling._replace(
            top_k=jnp.where(self.filtered, sampling.top_k, jnp.iinfo(jnp.int32).max),
            top_p=jnp.where(self.filtered, sampling.top_p, 1.0),
            min_p=jnp.where(self.filtered, sampling.min_p, 0.0),
        )
        return self.drafter.propose(
            decoder, state._replace(sampling=shown), self.noise_weight * noise
        )

    def observe(self, drafter_state: Any, verified: Verified, trace: StepTrace) -> Any:
        return self.drafter.observe(drafter_state, verified, trace)


def with_ranking(drafter: Drafter, ranking: Ranking, tree: TreeConfig) -> Ranked:
    """The drafter with this ranking; one program serves all rankings."""
    weights = {"weak noise": 1 / tree.sharpness, "blind": 0.0}
    weight = jnp.float32(weights.get(ranking, 1.0))
    return Ranked(drafter, weight, jnp.bool_(ranking != "unfiltered"))
