"""Shapes, trees and sampling settings of the measured targets and drafters."""

from typing import NamedTuple

import jax.numpy as jnp

from eval.abstract import abstract_drafter, abstract_target, random_weights
from redrafter_jax.config import SamplingConfig, TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, as_drafter
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.models.target import Target

# Width, inner width, layers, query heads, key heads, head dimension, vocabulary.
_SIZES = {
    "llama_3_1_8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "vicuna_7b": (4096, 11008, 32, 32, 32, 128, 32000),
    "small": (64, 96, 2, 4, 2, 16, 512),
}
TREE = TreeConfig(8, 4, 32)
OTHER_TREES = (TreeConfig(8, 4, 16), TreeConfig(4, 2), TreeConfig(4, 4), TreeConfig(16, 4, 64))
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "T 1": SamplingConfig(1.0),
    "T 0.7, top_p 0.9": SamplingConfig(0.7, top_p=0.9),
}


class Measured(NamedTuple):
    """Sizes of a measurement, full or small.

    Attributes:
      slots: number of cache slots per row.
      steps: number of decode steps in a timed run.
      short_turns: number of turns in a timed run of a short part of a step.
      repeats: number of timed runs.
    """

    slots: int
    steps: int
    short_turns: int
    repeats: int


FULL, SMALL = Measured(4096, 32, 200, 7), Measured(256, 2, 2, 2)


def make_pair(name: str) -> tuple[Target, Drafter]:
    """Make a target of this shape and a recurrent drafter, with random weights in bfloat16."""
    width, inner, layers, query_heads, key_heads, head_dim, vocabulary = _SIZES[name]
    target = TargetConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        eos_token_ids=(),
    )
    head = RecurrentConfig(
        vocab_size=vocabulary, hidden_size=width, exit_dim=2 * width, num_draft_layers=2
    )
    models = abstract_target(target, jnp.bfloat16), abstract_drafter(head, jnp.bfloat16)
    target, drafter = map(random_weights, models)
    return target, as_drafter(drafter)
