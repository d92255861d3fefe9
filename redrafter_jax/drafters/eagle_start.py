"""Where the training of an EAGLE-3 head starts."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from redrafter_jax.config import LinearScaling, Llama3Scaling, TargetConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.eagle_head import EagleHead

# Of the head's layer, what is as in the target's where a training run does not tell.
_ALIKE = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_theta"),
)


def train_defaults(told: Mapping[str, Any], target: TargetConfig, rounds: int) -> dict[str, Any]:
    """Values for the fields that a training run leaves open; the layer is like the target's.

    Other scalings of its rotary embedding than those that heads are published with are left out.
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
    """Start the head from the target's vocabulary projection.

    Raises:
      FieldError: the head has no projection of its own.
    """
    if module.config.head == "target":
        problem = "is 'target', which is the target's own from the start; leave initial_head out."
        raise FieldError(module.config, "head", problem)
    module.lm_head.kernel[...] = projection
