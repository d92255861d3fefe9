"""Defaults and initial weights for training an EAGLE-3 head."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from redrafter_jax.config import LinearScaling, Llama3Scaling, TargetConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.eagle_head import EagleHead

# Fields of the head's layer whose default is the target's value.
_ALIKE = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_theta"),
)


def train_defaults(told: Mapping[str, Any], target: TargetConfig, rounds: int) -> dict[str, Any]:
    """Return values for configuration fields that the user left out.

    The head's layer gets the sizes of the target's layers. Rotary scaling is copied only if a head
    supports it: linear scaling and Llama 3.1's.
    """
    del told, rounds
    known = isinstance(target.rope_scaling, LinearScaling | Llama3Scaling)
    return {
        "version": "3",
        "width": target.hidden_size,
        "rope_scaling": target.rope_scaling if known else None,
        **{name: getattr(target, name) for name in _ALIKE},
    }


def start_from_target(module: EagleHead, projection: Float[Array, "D U"]) -> None:
    """Initialise the head's vocabulary projection with the target's.

    Raises:
      FieldError: the head does not have its own projection.
    """
    if module.config.head == "target":
        problem = (
            "is 'target', so the head already uses the target's projection; remove initial_head."
        )
        raise FieldError(module.config, "head", problem)
    module.lm_head.kernel[...] = projection
