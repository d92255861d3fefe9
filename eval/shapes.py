"""Pairs that are known by their shapes alone, and the settings of the commands for them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from redrafter_jax.config import Dtype, SamplingConfig, TargetConfig, TreeConfig, WeightFormat
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.settings.files import Settings
from redrafter_jax.settings.sections import (
    BuildableSettings,
    DrafterShape,
    MeshSettings,
    SamplingSettings,
)

from .trees import TreeGrid


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
        if stated is None:
            raise InputError("no model to plan for; give --target, a folder or hub id, or --config")
        if not isinstance(stated, str):
            return stated
        if stated.endswith((".yaml", ".yml")):
            raise InputError(f"{stated} is a file of settings; give it as --config.")
        config = open_target(stated).config
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

    def drafter_config(self, rounds: int) -> HeadConfig:
        """The library's configuration of a drafter for this target, that drafts so many tokens."""
        return self.drafter.build_for(self.target.build(), rounds)


class PlanSettings(PairShape):
    """`python -m eval plan`: what the pair is meant for.

    Attributes:
      tree: how trees are drafted.
      quantize: of the target's matrices, "int8", "int4" or "fp8"; embedding and head are int8 then.
      quantize_drafter: of the drafter's.
      batch_size: rows decoded together.
      gpu: the GPU, one of those in `pallas_kernels.gpus`.
      slots: cache slots per row.
      mesh: GPUs that share the work.
      launch_microseconds: between two launches that depend on each other; of an H100 in a CUDA
        graph by Hazy Research's "Look Ma, No Bubbles!" (May 2025).
    """

    tree: TreeConfig = TreeConfig()
    quantize: WeightFormat | None = None
    quantize_drafter: WeightFormat | None = None
    batch_size: PositiveInt = 1
    gpu: Literal["h100", "h200", "b200"] = "h200"
    mesh: MeshSettings = MeshSettings()
    slots: int = Field(default=4096, ge=32)
    launch_microseconds: float = Field(default=1.3, ge=0, allow_inf_nan=False)


class StepsSettings(PairShape):
    """`python -m eval steps`: the grid, and how long each of it is timed.

    Attributes:
      trees: how trees are drafted.
      batch_sizes: rows decoded together, each in turn.
      slots: cache slots per row, each in turn; `generate` makes them in multiples of 256.
      samplings: how tokens are chosen, each in turn; the first is what others are compared with.
      steps: turns per timed run of a whole step, of propose and of verify.
      short_turns: turns of finish and of the noise, which may take microseconds.
      repeats: timed runs of each, interleaved.
    """

    trees: list[TreeGrid] = Field(default=[TreeGrid()], min_length=1)
    batch_sizes: list[PositiveInt] = Field(default=[1], min_length=1)
    slots: list[Annotated[int, Field(ge=32, multiple_of=32)]] = Field(min_length=1)
    samplings: list[SamplingSettings] = Field(default=[SamplingConfig()], min_length=1)
    steps: PositiveInt = 16
    short_turns: PositiveInt = 200
    repeats: PositiveInt = 10
