"""Settings of the comparison with Apple's trainer."""

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt, field_validator

from redrafter_jax.settings.files import Settings
from tools.apple.process import WaitPolicy
from tools.pretrain_settings import TargetSettings
from train.config import LossSettings, OptimizerSettings
from train.data.settings import DataSettings


class SpeedSettings(Settings):
    """Speed and memory: a target of random weights, rows of random tokens, all of which carry loss.

    After two steps to warm up each side takes `turns` turns of `steps_per_turn` steps.
    """

    target: TargetSettings
    batch_size: PositiveInt
    sequence_length: PositiveInt
    turns: PositiveInt = 3
    steps_per_turn: PositiveInt = 2


class CurveSettings(Settings):
    """Loss: a real target and real rows, `steps` of them."""

    target: Path
    data: DataSettings
    batch_size: PositiveInt
    steps: PositiveInt

    @field_validator("data")
    @classmethod
    def _a_document_a_row(cls, data: DataSettings) -> DataSettings:
        if data.pack:
            raise ValueError(
                "pack is true, but in Apple's trainer the documents of a row would see each "
                "other; leave it out"
            )
        return data


class AppleSettings(Settings):
    """`python -m tools.apple train`: the same steps by Apple's trainer and by ours.

    `torch_python` is a Python with PyTorch and a transformers 4 that Apple's code can use (4.47.1
    can); `repository` a clone of github.com/apple/ml-recurrent-drafter. `exit_dim` is twice the
    target's width on both sides: their trainer skips `input_proj`, which is then not there.
    `accuracies` is their `drafter_top_k`: how many accuracies they take of every round; ours
    always takes 5. `threads` is the processor's cores that both sides share;
    `wait_policy` is OMP_WAIT_POLICY of PyTorch's threads.
    """

    torch_python: Path
    repository: Path
    speed: SpeedSettings
    curve: CurveSettings
    draft_rounds: PositiveInt
    num_draft_layers: PositiveInt = 1
    chunk_length: PositiveInt = LossSettings().chunk_length
    accuracies: Literal[0, 1, 2, 3, 4, 5] = 5
    learning_rate: PositiveFloat = 1e-3
    seed: int = 0
    threads: PositiveInt = 2
    wait_policy: WaitPolicy = "PASSIVE"
    output: Path

    @property
    def optimizer(self) -> OptimizerSettings:
        """AdamW, as both sides have it; the batch is the case's own."""
        return OptimizerSettings(learning_rate=self.learning_rate, batch_size=1)
