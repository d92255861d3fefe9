"""Pairs that are known by their shapes alone, for commands that need no weights."""

from pathlib import Path
from typing import Any

from pydantic import PositiveInt, model_validator

from redrafter_jax.checkpoints.huggingface import load_target_config
from redrafter_jax.config import DrafterConfig, Dtype, MedusaConfig, TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import Settings
from redrafter_jax.settings.sections import BuildableSettings, DrafterShape


class TargetShape(BuildableSettings):
    """The fields of `redrafter_jax.TargetConfig` that cost time.

    A string stands for the shape of a model: its folder or hub id, of which `config.json` is read.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool

    @model_validator(mode="before")
    @classmethod
    def _read_model(cls, stated: Any) -> Any:
        if not isinstance(stated, str):
            return stated
        if stated.endswith((".yaml", ".yml")):
            raise InputError(f"{stated} is a file of settings; give it as --config.")
        config = load_target_config(stated)
        return {name: getattr(config, name) for name in cls.model_fields}

    def build(self) -> TargetConfig:
        """The library's configuration."""
        return TargetConfig(
            **self.model_dump(), rope_theta=10000.0, rms_norm_eps=1e-5, eos_token_ids=()
        )


class PairShape(Settings):
    """A pair known by its shape alone, its weights random or absent.

    Attributes:
      target: its shape, or a folder or hub id.
      drafter: shape of the drafter.
      dtype: of both models' parameters and of the cache.
      report_dir: folder for what the command writes, made if it is missing.
    """

    target: TargetShape
    drafter: DrafterShape = DrafterShape()
    dtype: Dtype = "bfloat16"
    report_dir: Path

    def drafter_config(self, rounds: int) -> DrafterConfig | MedusaConfig:
        """The library's configuration of a drafter for this target, that drafts so many tokens."""
        return self.drafter.build_for(self.target.build(), rounds)
