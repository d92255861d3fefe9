"""The optimizers of training and pre-training: clipping, then AdamW or Muon, one schedule."""

from typing import Any

import jax
import optax

from .config import OptimizerSettings

# Muon's updates scaled to the size of AdamW's, so that one learning rate suits both
# (arXiv 2502.16982, section 2.2).
_MUON_RMS = 0.2
# Matrices with an axis of the vocabulary.
_EMBEDDINGS = {"embed_tokens", "lm_head"}


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then the chosen rule under a warm-up cosine schedule.

    Muon updates hidden matrices; embeddings, heads and vectors are AdamW's. The schedule falls to
    zero after `steps`.
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
    """The learning rate of every step, counted from 0."""
    return optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, int(settings.warmup_fraction * steps), steps
    )
