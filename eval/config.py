"""Settings of the commands of `python -m eval`, validated by pydantic at the edge."""

from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.settings.files import Settings
from redrafter_jax.settings.sections import (
    BuildableSettings,
    MeshSettings,
    SamplingSettings,
)

from .rankings import Ranking

Dtype = Literal["float32", "bfloat16"]


class PairSettings(Settings):
    """What every command on a pair is given, in one process or in several.

    Attributes:
      target: folder or hub id of the target, `tokenizer.json` included.
      drafter: folder or hub id of a drafter trained for it.
      prompts: JSONL file, see `redrafter_jax.text.prompts`.
      report_dir: folder for what the command writes, made if it is missing.
      mesh: devices that share the work.
    """

    target: str
    drafter: str
    prompts: Path
    report_dir: Path
    mesh: MeshSettings = MeshSettings()


class RowSettings(Settings):
    """Which prompts are decoded, and how far.

    Attributes:
      prompt_count: how many prompts, from the top of the file; None takes all.
      max_new_tokens: limit per prompt.
      first_seed: prompt i of the file samples with seed `first_seed + i`, in every repeat.
      stop: "eos" ends a row at the target's end token, "never" at `max_new_tokens` alone.
    """

    prompt_count: PositiveInt | None = None
    max_new_tokens: PositiveInt
    first_seed: NonNegativeInt = 0
    stop: Literal["eos", "never"] = "eos"

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """What `redrafter_jax.generate` takes: None for the target's own, () for none."""
        return () if self.stop == "never" else None


class DecodingSettings(RowSettings):
    """How prompts are decoded, by both methods.

    Attributes:
      batch_size: prompts decoded together.
      draft: how trees are drafted.
      sampling: how tokens are chosen.
    """

    batch_size: PositiveInt = 1
    draft: DraftConfig = DraftConfig()
    sampling: SamplingSettings = SamplingConfig()


class EvalSettings(DecodingSettings, PairSettings):
    """`python -m eval`: which pair decodes which prompts how, and where the report goes.

    Attributes:
      dtype: of both models' parameters.
      repeats: timed pairs (speculative, baseline) per batch.
      warm_ups: untimed runs per method and array shape, the one that compiles included.
    """

    dtype: Dtype = "bfloat16"
    repeats: PositiveInt = 3
    warm_ups: PositiveInt = 3


class CaseSettings(DecodingSettings):
    """One way of decoding that `python -m eval parity` tries.

    Attributes:
      prompt_tokens: exact lengths that the rows' prompts take in turns, see
        `redrafter_jax.text.prompts.tokenize_to_length`; None takes each prompt as it is.
    """

    prompt_tokens: list[PositiveInt] | None = Field(default=None, min_length=1)


class Tolerances(Settings):
    """The largest gap of a numerical tie, in logits (scores times the temperature), per dtype.

    Passes of different shapes over the same tokens differ by rounding. On the demo's target, whose
    logits reach 17, a logit differs by up to 1.4e-5 in float32 and 0.1 in bfloat16; a gap between
    two logits differs by twice that at most, 2.8e-5 and 0.2. The defaults leave the rest for
    models with larger logits, whose rounding grows in proportion: 60 in float32, 21 in bfloat16.
    A wider tolerance hides bugs: in the demo's text the two best tokens are closer than 0.25 at 4%
    of the greedy choices and at 16% of those at temperature 1.
    """

    float32: float = Field(default=1e-4, gt=0)
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


class DraftGrid(BuildableSettings):
    """Trees of every combination of the fields that are lists; the first one changes last."""

    def build(self) -> list[DraftConfig]:
        """The library's configuration of every tree."""
        fields = {name: value if isinstance(value, list) else [value] for name, value in self}
        return [
            DraftConfig(**dict(zip(fields, values, strict=True)))
            for values in product(*fields.values())
        ]


class TreeGrid(DraftGrid):
    """Trees of one beam search under several node budgets, sharpnesses and lookup lengths."""

    beam_width: PositiveInt = DraftConfig.beam_width
    draft_rounds: PositiveInt = DraftConfig.draft_rounds
    final_beams_only: bool = DraftConfig.final_beams_only
    lookup_tokens: list[NonNegativeInt] = Field(default=[DraftConfig.lookup_tokens], min_length=1)
    num_nodes: list[PositiveInt | None] = Field(default=[None], min_length=1)
    sharpness: list[Annotated[float, Field(gt=0)]] = Field(default=[1.0], min_length=1)


class AcceptanceSettings(RowSettings, PairSettings):
    """`python -m eval acceptance`: the grid.

    Attributes:
      dtype: of both models' parameters.
      batch_size: prompts decoded together; None takes all of them.
      samplings: how tokens are chosen, each in turn.
      trees: how trees are drafted, each in turn.
      rankings: what drafts are ranked by, each in turn; see `eval.rankings`.
    """

    dtype: Dtype = "bfloat16"
    batch_size: PositiveInt | None = None
    samplings: list[SamplingSettings] = Field(min_length=1)
    trees: TreeGrid = TreeGrid()
    rankings: list[Ranking] = Field(default=["shared"], min_length=1)
