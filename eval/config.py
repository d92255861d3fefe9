"""Settings of the `python -m eval` commands that decode prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    GetPydanticSchema,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WrapSerializer,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from redrafter_jax.config import Dtype, SamplingConfig, TreeConfig
from redrafter_jax.settings.files import Settings
from redrafter_jax.settings.sections import MeshSettings, SamplingSettings
from redrafter_jax.text.prompts import Turns

from .trees import TreeGrid, with_budget


class TargetSettings(Settings):
    """Common settings of the commands that decode prompts.

    Attributes:
      target: folder or hub id of the target with its `tokenizer.json`, or a GGUF file.
      prompts: JSONL file; see `redrafter_jax.text.prompts`.
      chat_template: template that renders a prompt as a user turn: None for the tokenizer's
        template, or if it has none to continue prompts verbatim; "none" to continue prompts
        verbatim; the path of a Jinja file; or a built-in format (docs/chat.md).
      report_dir: output folder, created if missing.
      mesh: devices that share the work.
    """

    target: str
    prompts: Path
    chat_template: str | None = None
    report_dir: Path
    mesh: MeshSettings = MeshSettings()


class PairSettings(TargetSettings):
    """A target and a drafter.

    Attributes:
      drafter: drafter that `redrafter_jax.load_drafter` can load.
    """

    drafter: str


class RowSettings(Settings):
    """The prompts to decode, and the limits of their answers.

    Attributes:
      prompt_count: number of prompts, from the beginning of the file; None takes all.
      turns: 1 asks only the first turn of each prompt; "all" also asks the later turns, each after
        the baseline's answers to the earlier turns, which have the same sampling and seed.
      max_new_tokens: maximum number of new tokens per prompt and turn.
      first_seed: seed of the first prompt; prompt i of the file uses seed `first_seed + i` in every
        turn and repeat.
      stop: "eos" ends an answer at an end token of the target or the chat template, "never" only at
        `max_new_tokens`.
    """

    prompt_count: PositiveInt | None = None
    turns: Turns = "all"
    max_new_tokens: PositiveInt
    first_seed: NonNegativeInt = 0
    stop: Literal["eos", "never"] = "eos"


def _unless_auto(value: Any, handle: Callable[[Any], Any]) -> Any:
    return value if value == "auto" else handle(value)


def _grid_or_auto(value: Any, handle: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict | TreeGrid) and value != "auto":
        raise PydanticCustomError("tree", "Input should be auto or fields such as {beam_width: 4}")
    return _unless_auto(value, handle)


# Not a union with "auto": for a wrong key, pydantic would report an error for every member.
TreesSettings = Annotated[
    TreeGrid | Literal["auto"],
    GetPydanticSchema(lambda _, handler: handler(TreeGrid)),
    WrapValidator(_grid_or_auto),
    WrapSerializer(_unless_auto),
]


class DraftingSettings(Settings):
    """A drafting method, or one method for each tree of a grid.

    Attributes:
      drafter: drafter that `redrafter_jax.load_drafter` can load; None for prompt lookup alone,
        with `tree.lookup_tokens`.
      tree: draft tree, in which every field is a value or a list of values; "auto" takes the tree
        from the table that `eval tune` wrote to the drafter's folder.
    """

    drafter: str | None = None
    tree: TreesSettings = TreeGrid()

    @model_validator(mode="after")
    def _something_drafts(self) -> "DraftingSettings":
        if self.drafter is None and self.tree == "auto":
            raise ValueError(f"tree is auto {_LOOKUP_ALONE}")
        if self.drafter is None and self.tree != "auto":
            for tree in self.tree.build():
                tokens = tree.lookup_tokens
                if not tokens or tree != with_budget(TreeConfig(lookup_tokens=tokens)):
                    raise ValueError(f"tree is {tree} {_LOOKUP_ALONE}")
        return self


_LOOKUP_ALONE = (
    "but drafter is not set, which selects prompt lookup alone; set drafter, or set only "
    "lookup_tokens in tree"
)


class CompareSettings(RowSettings, TargetSettings):
    """The settings of `python -m eval compare`: compare drafting methods for a target.

    Attributes:
      drafters: drafting methods by name, compared with the baseline. A grid of several trees makes
        a method for each tree, whose name states the fields that differ.
      dtype: dtype of all models' parameters.
      batch_size: number of prompts decoded together; None: 1, or all prompts if `clock` is false.
      samplings: sampling settings; each is measured in turn.
      clock: whether to measure times. If false, only tokens, target calls and equal texts are
        counted. These counts do not depend on the machine, so nothing is warmed up or repeated.
        `tree: auto` then takes the tree for one prompt unless `batch_size` is set.
      repeats: number of timed runs of every method per batch.
      warm_ups: number of untimed runs per method and array shape, including the run that compiles.
    """

    drafters: dict[str, DraftingSettings] = Field(min_length=1)
    dtype: Dtype = "bfloat16"
    batch_size: PositiveInt | None = None
    samplings: list[SamplingSettings] = Field(default=[SamplingConfig()], min_length=1)
    clock: bool = True
    repeats: PositiveInt = 1
    warm_ups: PositiveInt = 1

    @field_validator("drafters")
    @classmethod
    def _names_in_a_table(cls, drafters: dict[str, DraftingSettings]) -> Any:
        for name in drafters:
            if name == "baseline" or "|" in name:
                raise ValueError(
                    f"{name!r} cannot name a drafting method; choose a name other than 'baseline' "
                    "and without '|'"
                )
        return drafters

    @model_validator(mode="after")
    def _nothing_to_repeat(self) -> "CompareSettings":
        for name, times in (("repeats", self.repeats), ("warm_ups", self.warm_ups)):
            if not self.clock and times > 1:
                raise ValueError(
                    f"{name} is {times}, but with clock=false all runs have equal counts; "
                    f"set {name}=1 or clock=true"
                )
        return self


# From a short chain to the default tree, without and with prompt lookup.
_CANDIDATES = [
    TreeGrid(beam_width=[1], draft_rounds=[1, 2, 3, 4]),
    TreeGrid(beam_width=[2, 4], draft_rounds=[2, 4], num_nodes=[5, None]),
    TreeGrid(num_nodes=[9, 17, None]),
    TreeGrid(beam_width=[1], draft_rounds=[1, 2, 4], lookup_tokens=[4, 8]),
    TreeGrid(beam_width=[4], lookup_tokens=[8], num_nodes=[13, 17, None]),
    TreeGrid(beam_width=[1], draft_rounds=[1, 2], num_nodes=[4], rerank=[True], mean_nodes=[2]),
    TreeGrid(beam_width=[4], num_nodes=[17], mean_nodes=[4, 8]),
]


class TuneSettings(RowSettings, PairSettings):
    """The settings of `python -m eval tune`: find the fastest tree per batch size and sampling.

    Attributes:
      dtype: dtype of both models' parameters.
      trees: grids of candidate trees.
      batch_sizes: numbers of prompts decoded together, each measured in turn. None takes those of
        1, 2, 4 and 8 for which there are enough prompts.
      samplings: sampling settings with different temperatures, each measured in turn.
      entrants: number of trees in the first of three rounds; their sizes are very different. In the
        second round, half as many new trees are added, and in the third round a quarter. The added
        trees are similar to the fastest ones so far. At least `finalists` trees are added each
        time.
      finalists: number of trees that are measured in all pairs; the fastest of these is chosen.
      pairs: number of paired runs of each finalist and the baseline. The pairs go through all
        batches, and start over at the end. None: one pair per batch, but at least eight pairs.
      minutes: time limit for all batch sizes and samplings together; they share the remaining time
        evenly, and the last ones are left out if no time remains. After the limit, a compilation
        that has begun is finished, and one tree gets at least four paired runs. None: no limit.
      output: file to write; None: `draft.yaml` in the drafter's folder.
    """

    dtype: Dtype = "bfloat16"
    trees: list[TreeGrid] = Field(default=_CANDIDATES, min_length=1)
    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    samplings: list[SamplingSettings] = Field(default=[SamplingConfig()], min_length=1)
    entrants: PositiveInt = 8
    finalists: PositiveInt = 3
    pairs: PositiveInt | None = None
    minutes: PositiveFloat | None = None
    output: Path | None = None

    @field_validator("samplings")
    @classmethod
    def _one_for_each_temperature(cls, samplings: list[SamplingConfig]) -> list[SamplingConfig]:
        temperatures = [sampling.temperature for sampling in samplings]
        if len(set(temperatures)) < len(temperatures):
            raise ValueError(
                f"the temperatures are {', '.join(map(str, temperatures))}, but a table has one "
                "tree per temperature; list each once"
            )
        return samplings


class CaseSettings(RowSettings):
    """A case of `python -m eval parity`.

    Attributes:
      batch_size: number of prompts decoded together.
      sampling: sampling settings.
      tree: draft tree.
      prompt_tokens: exact prompt lengths; the rows use the lengths of this list in turn. The
        prompts are then the first turns as plain text, cut or joined (see
        `redrafter_jax.text.prompts.tokenize_to_length`). None leaves prompts as they are.
    """

    batch_size: PositiveInt = 1
    sampling: SamplingSettings = SamplingConfig()
    tree: TreeConfig = TreeConfig()
    prompt_tokens: list[PositiveInt] | None = Field(default=None, min_length=1)


class Tolerances(Settings):
    """The largest gap between two logits that counts as a numerical tie, for each dtype.

    At a numerical tie, rounding decides which of two tokens is chosen. Forward passes of different
    shapes over the same tokens differ by rounding. For the demo's target, whose logits reach 17, a
    logit differs by up to 1.4e-5 in float32 and 0.1 in bfloat16. So a gap between two logits
    differs by at most 2.8e-5 and 0.2. Rounding grows in proportion to the logits. The defaults are
    sufficient for logits up to 60 in float32 and up to 21 in bfloat16. Wider tolerances hide bugs:
    in the demo's texts, the two best tokens are closer than 0.25 in 4% of the choices when decoding
    is greedy, and in 16% at temperature 1.

    Attributes:
      float32: largest gap in float32, in logits.
      bfloat16: largest gap in bfloat16, in logits.
    """

    float32: float = Field(default=1e-4, gt=0)
    bfloat16: float = Field(default=0.25, gt=0)


class ParitySettings(PairSettings):
    """The settings of `python -m eval parity`: check that speculative texts equal the target's own.

    Attributes:
      dtypes: dtypes of both models' parameters, each checked in turn.
      tolerance: largest gap between two logits that counts as a numerical tie.
      cases: decoding settings by name.
    """

    dtypes: list[Dtype] = Field(default=["float32", "bfloat16"], min_length=1)
    tolerance: Tolerances = Tolerances()
    cases: dict[str, CaseSettings] = Field(min_length=1)


class ServeLoadSettings(Settings):
    """The settings of `python -m eval serve-load`: the latency of a running server under load.

    Attributes:
      url: address of a running server (see `redrafter serve`); its API key, if any, is read from
        the environment variable REDRAFTER_API_KEY.
      prompts: JSONL file; the first turns of the prompts are sent, over and over in the order of
        the file. The server may cache prompts, so use more prompts than the server has slots.
      prompt_count: number of prompts, from the beginning of the file; None takes all.
      rates: numbers of requests per second, each measured in turn.
      seconds: seconds in which requests arrive, per rate.
      max_requests: maximum number of requests per rate.
      max_new_tokens: maximum number of new tokens per answer.
      sampling: sampling settings.
      first_seed: seed of the arrival times, and of the first request; request i samples with seed
        `first_seed + i`.
      timeout: seconds without data from the server after which a request counts as failed.
      report_dir: output folder, created if missing.
    """

    url: str = "http://127.0.0.1:8000"
    prompts: Path
    prompt_count: PositiveInt | None = None
    rates: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)
    seconds: Annotated[float, Field(gt=0)] = 30.0
    max_requests: PositiveInt = 500
    max_new_tokens: PositiveInt
    sampling: SamplingSettings = SamplingConfig()
    first_seed: NonNegativeInt = 0
    timeout: Annotated[float, Field(gt=0)] = 120.0
    report_dir: Path
