"""Recurrent speculative decoding in JAX: the target's own text, in fewer target calls."""

from redrafter_jax.checkpoints.huggingface import (
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from redrafter_jax.config import DraftConfig, DrafterConfig, SamplingConfig, TargetConfig
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.errors import InputError
from redrafter_jax.generate import Generation, generate, generate_autoregressive
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.streaming import KeptCache, Update, stream

__all__ = [
    "DraftConfig",
    "DrafterConfig",
    "Generation",
    "InputError",
    "KeptCache",
    "PromptLookup",
    "SamplingConfig",
    "TargetConfig",
    "Update",
    "generate",
    "generate_autoregressive",
    "load_drafter",
    "load_target",
    "make_mesh",
    "save_drafter",
    "save_target",
    "stream",
]
