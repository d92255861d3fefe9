"""One optimizer step of a drafter: a pass of the frozen target, the losses, and an update."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import FULLY_SHARDED, RULES, constrain

from .config import LossSettings
from .gradients import Batches, add_gradients
from .loss import RoundSums, TopTokens


class TrainState(NamedTuple):
    """Training state: the drafter's float32 parameters and the optimizer state."""

    params: nnx.State
    optimizer: optax.OptState


class StepMetrics(NamedTuple):
    """Metrics of a step.

    Attributes:
      loss: the training loss.
      rounds: means over the positions that carry loss, per draft round.
      gradient_norm: global norm of the gradients before clipping.
    """

    loss: Float[Array, ""]
    rounds: RoundSums
    gradient_norm: Float[Array, ""]


def init_state(drafter: LoadedHead, optimizer: optax.GradientTransformation) -> TrainState:
    """Make the training state before the first step."""
    return TrainState(drafter.params, optimizer.init(drafter.params))


@partial(
    jax.jit,
    static_argnames=("rounds", "loss_settings", "optimizer", "fully_sharded"),
    donate_argnames="state",
)
def train_step(
    state: TrainState,
    target: Target,
    graphdef: nnx.GraphDef,
    tokens: Int[Array, "A B T"],
    loss_mask: Bool[Array, "A B T"],
    segments: Int[Array, "A B T"],
    hidden: Float[Array, "A B T Z"] | None = None,
    log_probs: Float[Array, "A B T k"] | None = None,
    token_ids: Int[Array, "A B T k"] | None = None,
    *,
    rounds: int,
    loss_settings: LossSettings,
    optimizer: optax.GradientTransformation,
    fully_sharded: bool = False,
) -> tuple[TrainState, StepMetrics]:
    """Update the parameters once, from A accumulated batches of B rows of T tokens.

    The loss is a weighted sum over R = `rounds` draft rounds. The loss of a round is the mean over
    all positions of the A batches that carry loss. So the split into batches changes the memory use
    but not the gradient. No prediction crosses from one document of a row to the next.

    The state is donated. The arrays are those of `Batches`, and `optimizer` is the optimizer of the
    state. Pass the features (`hidden`, `log_probs` and `token_ids`) all together or not at all.
    With features, the target's layers do not run and may be missing. On a mesh, `fully_sharded`
    also splits the state over the axis `data`.
    """
    batches = Batches(tokens, loss_mask, segments, hidden, None)
    if log_probs is not None and token_ids is not None:
        batches = batches._replace(top=TopTokens(log_probs, token_ids))
    gradients, value, means = add_gradients(
        graphdef, state.params, target, batches, rounds=rounds, settings=loss_settings
    )
    rules = FULLY_SHARDED if fully_sharded else RULES
    gradients = constrain(gradients, target.mesh, rules)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    metrics = StepMetrics(value, means, optax.tree.norm(gradients))
    new_state = constrain(TrainState(params, optimizer_state), target.mesh, rules)
    return new_state, constrain(metrics, target.mesh, {})
