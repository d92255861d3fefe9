"""Frozen, hashable configurations: static under `jax.jit`, checked on construction."""

from redrafter_jax.config.drafting import SamplingConfig, TreeConfig
from redrafter_jax.config.quantization import Quantization, WeightFormat
from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.config.target import (
    Activation,
    Dtype,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    TargetConfig,
    YarnScaling,
)

__all__ = [
    "Activation",
    "Dtype",
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Quantization",
    "RopeScaling",
    "SamplingConfig",
    "ServeConfig",
    "TargetConfig",
    "TreeConfig",
    "WeightFormat",
    "YarnScaling",
]
