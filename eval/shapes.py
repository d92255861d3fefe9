"""Settings of the commands that need only the shapes of target and drafter."""

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
    """The fields of `redrafter_jax.TargetConfig` that determine time and memory.

    In settings, the folder or hub id of a model may stand in place of the fields; its `config.json`
    gives the shape.
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
            raise InputError("target is missing; give --target, a folder or hub id, or --config")
        if not isinstance(stated, str):
            return stated
        if stated.endswith((".yaml", ".yml")):
            raise InputError(f"{stated} is a settings file; pass it as --config.")
        config = open_target(stated).config
        return {name: getattr(config, name) for name in cls.model_fields}

    def build(self) -> TargetConfig:
        """Build the target's configuration; fields without effect on time get fixed values."""
        return TargetConfig(
            **self.model_dump(), rope_theta=10000.0, rms_norm_eps=1e-5, eos_token_ids=()
        )


class PairShape(Settings):
    """The shapes of a target and a drafter, for commands that load no weights.

    Attributes:
      target: shape of the target, or its folder or hub id.
      drafter: shape of the drafter.
      dtype: dtype of both models' parameters and of the cache.
      report_dir: output folder, created if missing.
    """

    target: TargetShape
    drafter: DrafterShape = DrafterShape()
    dtype: Dtype = "bfloat16"
    report_dir: Path

    def drafter_config(self, rounds: int) -> HeadConfig:
        """Build the configuration of a drafter for this target that drafts R = `rounds` tokens."""
        return self.drafter.build_for(self.target.build(), rounds)


class PlanSettings(PairShape):
    """The settings of `python -m eval plan`: memory and step times on a GPU, from shapes alone.

    Attributes:
      tree: draft tree.
      quantize: format of the target's matrices, "int8", "int4" or "fp8"; the embedding and the head
        then have the format int8. None: not quantized.
      quantize_drafter: format of the drafter's matrices; None: not quantized.
      batch_size: number of rows decoded together.
      gpu: name of a GPU in `pallas_kernels.gpus`.
      slots: number of cache slots per row, one per token.
      mesh: GPUs that share the work.
      launch_microseconds: time between two dependent launches; the default was measured on an H100
        with a CUDA graph, in Hazy Research's "Look Ma, No Bubbles!" (May 2025).
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
    """The settings of `python -m eval steps`: measure the cost of a decode step and its parts.

    Attributes:
      trees: grids of draft trees.
      batch_sizes: numbers of rows decoded together, each measured in turn.
      slots: numbers of cache slots per row, each measured in turn; `generate` allocates multiples
        of 256.
      samplings: sampling settings, each measured in turn and compared with the first.
      steps: number of iterations per timed run of a whole step, of propose (drafting) and of verify
        (the target call).
      short_turns: number of iterations per timed run of finish (the choice of the accepted tokens)
        and of the sampling noise, which may take only microseconds.
      repeats: number of timed runs of each part.
    """

    trees: list[TreeGrid] = Field(default=[TreeGrid()], min_length=1)
    batch_sizes: list[PositiveInt] = Field(default=[1], min_length=1)
    slots: list[Annotated[int, Field(ge=32, multiple_of=32)]] = Field(min_length=1)
    samplings: list[SamplingSettings] = Field(default=[SamplingConfig()], min_length=1)
    steps: PositiveInt = 16
    short_turns: PositiveInt = 200
    repeats: PositiveInt = 10
