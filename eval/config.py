"""Settings of `python -m eval`, validated by pydantic at the edge."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from redrafter_jax.command_line import Settings
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.errors import InputError

Dtype = Literal["float32", "bfloat16"]


class DraftSettings(Settings):
    """How trees are drafted; the fields and defaults of `redrafter_jax.DraftConfig`."""

    beam_width: PositiveInt = DraftConfig.beam_width
    draft_rounds: PositiveInt = DraftConfig.draft_rounds
    num_nodes: PositiveInt | None = DraftConfig.num_nodes
    final_beams_only: bool = DraftConfig.final_beams_only
    sharpness: float = Field(default=DraftConfig.sharpness, gt=0)
    candidates: PositiveInt | None = DraftConfig.candidates

    @model_validator(mode="after")
    def _check_together(self) -> "DraftSettings":
        try:
            self.build()
        except InputError as error:
            raise PydanticCustomError("draft", "{reason}", {"reason": str(error)}) from None
        return self

    def build(self) -> DraftConfig:
        """The library's configuration."""
        return DraftConfig(**self.model_dump())


class SamplingSettings(Settings):
    """How tokens are chosen; the fields and defaults of `redrafter_jax.SamplingConfig`."""

    temperature: float = Field(default=SamplingConfig.temperature, ge=0)
    top_k: PositiveInt | None = SamplingConfig.top_k
    top_p: float | None = Field(default=SamplingConfig.top_p, gt=0, le=1)
    min_p: float | None = Field(default=SamplingConfig.min_p, ge=0, le=1)

    def build(self) -> SamplingConfig:
        """The library's configuration."""
        return SamplingConfig(**self.model_dump())


class PairSettings(Settings):
    """What every command on a pair is given.

    Attributes:
      target: folder or hub id of the target, `tokenizer.json` included.
      drafter: folder or hub id of a drafter trained for it.
      prompts: JSONL file, see `eval.prompts`.
      report_dir: folder for what the command writes, made if it is missing.
    """

    target: str
    drafter: str
    prompts: Path
    report_dir: Path


class DecodingSettings(Settings):
    """How prompts are decoded, by both methods.

    Attributes:
      prompt_count: how many prompts, from the top of the file; None takes all.
      max_new_tokens: limit per prompt.
      batch_size: prompts decoded together.
      draft: how trees are drafted.
      sampling: how tokens are chosen.
      first_seed: prompt i of the file samples with seed `first_seed + i`, in every repeat.
      stop: "eos" ends a row at the target's end token, "never" at `max_new_tokens` alone.
    """

    prompt_count: PositiveInt | None = None
    max_new_tokens: PositiveInt
    batch_size: PositiveInt = 1
    draft: DraftSettings = DraftSettings()
    sampling: SamplingSettings = SamplingSettings()
    first_seed: NonNegativeInt = 0
    stop: Literal["eos", "never"] = "eos"

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """What `redrafter_jax.generate` takes: None for the target's own, () for none."""
        return () if self.stop == "never" else None


class EvalSettings(DecodingSettings, PairSettings):
    """`python -m eval`: which pair decodes which prompts how, and where the report goes.

    Attributes:
      dtype: of both models' parameters.
      repeats: timed pairs (speculative, plain) per batch.
      warm_ups: untimed runs per method and array shape, the one that compiles included.
    """

    dtype: Dtype = "bfloat16"
    repeats: PositiveInt = 3
    warm_ups: PositiveInt = 3


class CaseSettings(DecodingSettings):
    """One way of decoding that `python -m eval parity` tries.

    Attributes:
      prompt_tokens: exact lengths that the rows' prompts take in turns, see
        `eval.prompts.tokenize_to_length`; None takes each prompt as it is.
    """

    prompt_tokens: list[PositiveInt] | None = Field(default=None, min_length=1)


class Tolerances(Settings):
    """The largest gap of a numerical tie, in logits (scores times the temperature), per dtype.

    Passes of different shapes over the same tokens differ by rounding: on the demo's target, whose
    logits reach 17, by up to 1.4e-5 logits in float32 and 0.1 in bfloat16. The defaults leave room
    for larger models. A bug must not hide in them: the two best tokens are closer than 0.25 at 4%
    of the demo's greedy choices and at 16% of those at temperature 1.
    """

    float32: float = Field(default=1e-3, gt=0)
    bfloat16: float = Field(default=0.25, gt=0)


class ParitySettings(PairSettings):
    """`python -m eval parity`: is the speculative text the target's own?

    Attributes:
      dtypes: of both models' parameters, one after the other.
      tolerance: what counts as a tie.
      cases: by name, the ways of decoding.
    """

    dtypes: list[Dtype] = Field(default=["float32", "bfloat16"], min_length=1)
    tolerance: Tolerances = Tolerances()
    cases: dict[str, CaseSettings] = Field(min_length=1)
