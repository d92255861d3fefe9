"""Settings of the commands of `python -m eval` that decode, validated by pydantic at the edge."""

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
    """What every command that decodes is given, in one process or in several.

    Attributes:
      target: folder or hub id of the target, `tokenizer.json` included, or a GGUF file.
      prompts: JSONL file, see `redrafter_jax.text.prompts`.
      chat_template: how a prompt is written as a user's turn. None takes the template of the
        target's tokenizer where it brings one; "none" continues prompts as they stand; a file of
        Jinja or a built-in format (docs/chat.md) is another.
      report_dir: folder for what the command writes, made if it is missing.
      mesh: devices that share the work.
    """

    target: str
    prompts: Path
    chat_template: str | None = None
    report_dir: Path
    mesh: MeshSettings = MeshSettings()


class PairSettings(TargetSettings):
    """A target, and its `drafter` as `redrafter_jax.load_drafter` takes it."""

    drafter: str


class RowSettings(Settings):
    """Which prompts are decoded, and how far.

    Attributes:
      prompt_count: how many prompts, from the top of the file; None takes all.
      turns: 1 asks the first turn of each prompt alone, "all" the later ones too, each behind the
        baseline's own answers, under the same sampling and seed, to the turns before it.
      max_new_tokens: limit per prompt and turn.
      first_seed: prompt i of the file samples with seed `first_seed + i`, in every turn and repeat.
      stop: "eos" ends a row at an end token of the target or of the chat template, "never" at
        `max_new_tokens` alone.
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


# "auto" is no member of a union here, whose every member pydantic would blame for a wrong key.
TreesSettings = Annotated[
    TreeGrid | Literal["auto"],
    GetPydanticSchema(lambda _, handler: handler(TreeGrid)),
    WrapValidator(_grid_or_auto),
    WrapSerializer(_unless_auto),
]


class DraftingSettings(Settings):
    """A way of drafting, or one for each tree of a grid.

    Attributes:
      drafter: as `redrafter_jax.load_drafter` takes it; None for prompt lookup alone, of
        `tree.lookup_tokens`.
      tree: how trees are drafted, every field a value or a list of them; "auto" takes the tree of
        the drafter's table, see `eval tune`.
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
    "and there is no drafter, so that there is prompt lookup alone; give a drafter, or tree: "
    "{lookup_tokens: 8} and nothing else"
)


class CompareSettings(RowSettings, TargetSettings):
    """`python -m eval`, `python -m eval compare`: the ways of drafting for a target.

    Attributes:
      drafters: by name, the ways of drafting, measured beside the baseline. Of several trees each
        is a way of its own, whose name says what sets it apart.
      dtype: of all models' parameters.
      batch_size: prompts decoded together; None is one, or without the clock all of them.
      samplings: how tokens are chosen, each in turn.
      clock: false counts tokens, target calls and equal texts alone, which do not depend on the
        machine: nothing is timed, warmed up or repeated, and `tree: auto` takes the tree for one
        prompt unless `batch_size` is given.
      repeats: timed runs of every method per batch, in turns.
      warm_ups: untimed runs per method and array shape, the one that compiles included.
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
                raise ValueError(f"{name!r} cannot name a way of drafting; choose another word")
        return drafters

    @model_validator(mode="after")
    def _nothing_to_repeat(self) -> "CompareSettings":
        for name, times in (("repeats", self.repeats), ("warm_ups", self.warm_ups)):
            if not self.clock and times > 1:
                raise ValueError(
                    f"{name} is {times} and clock is false, which counts what is the same every "
                    f"time; give {name}=1, or clock=true"
                )
        return self


# From a short chain to the default tree, without prompt lookup and with it.
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
    """`python -m eval tune`: among which trees the fastest is sought, and for what.

    Attributes:
      dtype: of both models' parameters.
      trees: the candidates, each grid in turn.
      batch_sizes: prompts decoded together, each in turn; None is 1, 2, 4 and 8, those of them that
        there are prompts for.
      samplings: how tokens are chosen, each in turn, of different temperatures.
      entrants: how many trees, of very different sizes, are measured first; half as many that are
        like the best of them join, then a quarter (`finalists` at least, both times).
      finalists: trees that have all pairs, among which the fastest is chosen.
      pairs: of runs that a finalist and the baseline have, one after the other; every pair decodes
        another batch until all were decoded. None is one for each batch, eight at least.
      minutes: for all batch sizes and samplings together; they share what is left evenly, and the
        last ones are left out where nothing is left. When they are over a tree that has begun is
        compiled, and one has four turns; nothing else is begun. None takes the time that it needs.
      output: file to write; None is `draft.yaml` in the drafter's folder.
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
                f"the temperatures are {', '.join(map(str, temperatures))}; a table holds one tree "
                "for each, so give each once"
            )
        return samplings


class CaseSettings(RowSettings):
    """One way of decoding that `python -m eval parity` tries.

    Attributes:
      batch_size: prompts decoded together.
      sampling: how tokens are chosen.
      tree: how trees are drafted.
      prompt_tokens: exact lengths that the rows' prompts take one after the other, as plain text
        of the prompts' first turns, see `redrafter_jax.text.prompts.tokenize_to_length`; None takes
        each prompt as it is.
    """

    batch_size: PositiveInt = 1
    sampling: SamplingSettings = SamplingConfig()
    tree: TreeConfig = TreeConfig()
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


class ServeLoadSettings(Settings):
    """`python -m eval serve-load`: which server is asked, what, and how often.

    Attributes:
      url: of a server that runs, see `redrafter serve`; its key, if it asks for one, is taken from
        the environment's REDRAFTER_API_KEY.
      prompts: JSONL file; the first turn of each prompt is asked, and after the last prompt the
        first follows again. A server may still hold what it read of a prompt: give it more prompts
        than it has slots.
      prompt_count: how many, from the top of the file; None takes all.
      rates: requests per second, each in turn.
      seconds: in which they arrive, for each rate.
      max_requests: for each rate.
      max_new_tokens: limit of an answer.
      sampling: how tokens are chosen.
      first_seed: of the arrival times, and of the first request; request i has `first_seed + i`.
      timeout: seconds without a word of the server, after which a request has failed.
      report_dir: folder for what the command writes, made if it is missing.
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
