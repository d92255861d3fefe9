"""Defaults and initial weights for training a recurrent head."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.own_layer import LAYER_FIELDS
from redrafter_jax.drafters.recurrent_head import RecurrentHead


def train_defaults(told: Mapping[str, Any], target: TargetConfig, rounds: int) -> dict[str, Any]:
    """Return values for configuration fields that the user left out.

    An attention layer gets the sizes of the target's layers.
    """
    del rounds
    open_fields = {"exit_dim": 2 * target.hidden_size, "num_draft_layers": 2}
    layer = {name: getattr(target, name) for name in LAYER_FIELDS} if told.get("attention") else {}
    return {**open_fields, **layer}


def start_from_target(module: RecurrentHead, projection: Float[Array, "D U"]) -> None:
    """Initialise the head with the target's vocabulary projection.

    A head that is narrower than the target gets the best approximation of its rank.

    Raises:
      FieldError: the head is wider than the target.
    """
    config = module.config
    D, E = config.hidden_size, config.exit_dim
    name, width = ("head_rank", config.head_rank) if config.head_rank else ("exit_dim", E)
    if width > D and config.head != "target":
        limit = f"with initial_head=target it must be at most {D}, the target's width."
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
    """Return the best rank-E approximation of the projection, as two factors.

    The factors are the E leading directions of the projection, and the projection onto them. For E
    = D they are the identity and the projection itself.
    """
    if rank == len(projection):
        return jnp.eye(rank), projection
    _, directions = jnp.linalg.eigh(projection @ projection.T)
    leading = directions[:, : -rank - 1 : -1].T
    return leading, leading @ projection
