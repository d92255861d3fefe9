"""Settings of `python -m tools.pretrain`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from redrafter_jax.settings.files import Settings
from train.config import OptimizerSettings
from train.data.settings import DataSettings


class TargetSettings(Settings):
    """Shape of a target that is trained from nothing (`tools.pretrain`)."""

    vocab_size: int = Field(ge=257)  # the 256 bytes and the end token
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rope_theta: PositiveFloat
    rms_norm_eps: PositiveFloat
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool


class PretrainSettings(Settings):
    """`python -m tools.pretrain`: a tokenizer and a small target from text files."""

    target: TargetSettings
    data: DataSettings
    optimizer: OptimizerSettings
    steps: PositiveInt
    seed: int = 0
    log_every: PositiveInt = 20
    evaluate_every: PositiveInt = 200
    evaluation_windows: PositiveInt = 64
    output_dir: Path
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    @model_validator(mode="after")
    def _fitting_length(self) -> "PretrainSettings":
        length, positions = self.data.sequence_length, self.target.max_position_embeddings
        if not 2 <= length <= positions:
            raise ValueError(
                f"data.sequence_length is {length}; give it 2 to {positions}, which is "
                "target.max_position_embeddings"
            )
        return self
