"""Frozen, hashable configurations: static under `jax.jit`, checked on construction."""

from redrafter_jax.config.drafter import Cell, DrafterConfig, Head, HeadConfig, MedusaConfig
from redrafter_jax.config.drafting import DraftConfig, SamplingConfig
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
    "Cell",
    "DraftConfig",
    "DrafterConfig",
    "Dtype",
    "DynamicScaling",
    "Head",
    "HeadConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MedusaConfig",
    "Quantization",
    "RopeScaling",
    "SamplingConfig",
    "ServeConfig",
    "TargetConfig",
    "WeightFormat",
    "YarnScaling",
]
