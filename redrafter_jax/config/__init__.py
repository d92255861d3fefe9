"""Frozen, hashable configurations: static under `jax.jit`, checked on construction."""

from redrafter_jax.config.drafting import Grammar, MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.config.target import (
    Activation,
    Dtype,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    TargetConfig,
    WeightFormat,
    YarnScaling,
)

__all__ = [
    "Activation",
    "Dtype",
    "DynamicScaling",
    "Grammar",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MirrorConfig",
    "RopeScaling",
    "SamplingConfig",
    "TargetConfig",
    "TreeConfig",
    "WeightFormat",
    "YarnScaling",
]
