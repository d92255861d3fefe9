"""The library's configurations as settings of a command line."""

from abc import abstractmethod
from typing import Any

from pydantic import Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from redrafter_jax.command_line import Settings
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.errors import InputError


class BuildableSettings(Settings):
    """Settings that stand for one of the library's values, and are refused as it would be."""

    @model_validator(mode="after")
    def _check_together(self) -> "BuildableSettings":
        try:
            self.build()
        except InputError as error:
            raise PydanticCustomError("build", "{reason}", {"reason": str(error)}) from None
        return self

    @abstractmethod
    def build(self) -> Any:
        """The library's value.

        Raises:
          InputError: the settings do not go together.
        """


class DraftSettings(BuildableSettings):
    """How trees are drafted; the fields and defaults of `redrafter_jax.DraftConfig`."""

    beam_width: PositiveInt = DraftConfig.beam_width
    draft_rounds: PositiveInt = DraftConfig.draft_rounds
    num_nodes: PositiveInt | None = DraftConfig.num_nodes
    final_beams_only: bool = DraftConfig.final_beams_only
    sharpness: float = Field(default=DraftConfig.sharpness, gt=0)
    candidates: PositiveInt | None = DraftConfig.candidates

    def build(self) -> DraftConfig:
        """The library's configuration."""
        return DraftConfig(**self.model_dump())


class SamplingSettings(BuildableSettings):
    """How tokens are chosen; the fields and defaults of `redrafter_jax.SamplingConfig`."""

    temperature: float = Field(default=SamplingConfig.temperature, ge=0)
    top_k: PositiveInt | None = SamplingConfig.top_k
    top_p: float | None = Field(default=SamplingConfig.top_p, gt=0, le=1)
    min_p: float | None = Field(default=SamplingConfig.min_p, ge=0, le=1)

    def build(self) -> SamplingConfig:
        """The library's configuration."""
        return SamplingConfig(**self.model_dump())
