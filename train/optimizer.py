"""Optimizers of training and pre-training: gradient clipping, AdamW or Muon, and a schedule."""

from typing import Any

import jax
import optax

from .config import OptimizerSettings

# Scales Muon updates to the RMS of AdamW updates, so that both share one learning rate
# (arXiv 2502.16982, section 2.2).
_MUON_RMS = 0.2
# Matrices with a vocabulary axis.
_EMBEDDINGS = {"embed_tokens", "lm_head"}


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """Make an optimizer: gradients are clipped by their global norm, then AdamW or Muon is applied.

    With Muon, AdamW still updates embeddings, output heads and vectors. The learning rate reaches
    zero after `steps` steps.
    """
    schedule = make_schedule(settings, steps)
    clip = optax.clip_by_global_norm(settings.clip_norm)
    if settings.rule == "adamw":
        rule = optax.adamw(
            schedule, settings.beta1, settings.beta2, weight_decay=settings.weight_decay
        )
        return optax.chain(clip, rule)

    def dimensions(params: Any) -> Any:
        matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)

        def choose(path: tuple[Any, ...], leaf: jax.Array) -> Any:
            names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
            return matrix if leaf.ndim == 2 and _EMBEDDINGS.isdisjoint(names) else None

        return jax.tree.map_with_path(choose, params)

    rule = optax.contrib.muon(
        schedule,
        weight_decay=settings.weight_decay,
        adam_b1=settings.beta1,
        adam_b2=settings.beta2,
        adam_learning_rate=schedule,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=_MUON_RMS,
    )
    return optax.chain(clip, rule)


def make_schedule(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Make the learning rate schedule, a function of the number of finished steps."""
    return optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, int(settings.warmup_fraction * steps), steps
    )
