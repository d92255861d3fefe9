"""Settings of the training commands, validated by pydantic at the edge."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from redrafter_jax.config import Dtype, SamplingConfig, TreeConfig
from redrafter_jax.settings.files import Settings
from redrafter_jax.settings.sections import DrafterShape, MeshSettings, SamplingSettings
from redrafter_jax.text.prompts import Turns

from .data.settings import DataSettings, SourceSettings
from .openings import VARIED

# Settings of `prompts: self` for targets with a chat template alone.
USER_SETTINGS = ("turns", "max_user_tokens", "user_sampling", "user_openings")

# The losses that `loss:` gives weights.
LOSSES = ("hard", "soft", "lk", "tv")


class OptimizerSettings(Settings):
    """A linear warm-up and a cosine decay to zero of AdamW or Muon.

    `rule: muon` updates hidden matrices by Muon and the rest by AdamW; it needs fewer tokens.
    `weight_decay` then reaches Muon's matrices alone, `beta1` and `beta2` the rest alone.
    """

    rule: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    clip_norm: PositiveFloat = 1.0
    batch_size: PositiveInt
    accumulation_steps: PositiveInt = 1

    @property
    def rows_per_step(self) -> int:
        """How many rows of the data a step reads."""
        return self.batch_size * self.accumulation_steps


class TrainData(DataSettings):
    """The data of a training run, whose short documents share rows: `pack`."""

    pack: bool = True


class RegenerateData(DataSettings):
    """The data whose words are taken up; `prompts: self` reads no sources."""

    sources: list[SourceSettings] = []


class RegenerateSettings(Settings):
    """`python -m train regenerate`: training data in the target's own words.

    With `prompt_tokens` texts are continued: `count` pieces of so many tokens, each the beginning
    of a row all of which carries loss, drawn from all sources alike, whatever their weights. Each
    becomes a row of `data.sequence_length` tokens, unless the target ends it before.

    Without it the assistant's turns of conversations are rewritten, of `count` conversations or of
    all, each answer in at most `max_new_tokens` and no row longer than `data.sequence_length`.

    With `prompts: self` there is no data: the target writes the user's turns too, `turns` of them,
    each drawn by `user_sampling` in at most `max_user_tokens`, until there are `count`
    conversations or `tokens` tokens that carry loss. It is given the words of `user_openings` in
    turns, as the beginning of the first question, so that questions are of many kinds; where they
    are empty, and by default, a question begins freely. `varied` are those of
    `train.openings`. A target without a chat template continues single tokens.

    Text or conversation i is drawn with seed i at `temperatures[i % len(temperatures)]`,
    `batch_size` together. With `prompts: self` i counts from `first_seed`, so that several machines
    share the work: each writes an output of its own, with other seeds. A `drafter`, whose trees
    `tree` states, makes it faster and changes nothing. `mesh` states the devices that share the
    work.
    """

    target: Path
    target_dtype: Dtype = "bfloat16"
    drafter: Path | None = None
    tree: TreeConfig = TreeConfig()
    mesh: MeshSettings = MeshSettings()
    data: RegenerateData
    prompts: Literal["data", "self"] = "data"
    prompt_tokens: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    count: PositiveInt | None = None
    tokens: PositiveInt | None = None
    first_seed: NonNegativeInt = 0
    turns: PositiveInt = 1
    max_user_tokens: PositiveInt = 256
    user_sampling: SamplingSettings = SamplingConfig(temperature=1.0, top_p=0.95)
    user_openings: (
        Literal["varied"] | list[Annotated[str, StringConstraints(strip_whitespace=True)]]
    ) = []
    batch_size: PositiveInt
    temperatures: list[NonNegativeFloat] = Field(default=[0.0], min_length=1)
    output: Path

    def temperature_of(self, seed: int) -> float:
        """The temperature of the text or conversation with that seed."""
        return self.temperatures[seed % len(self.temperatures)]

    def opening_of(self, seed: int) -> str:
        """How the first question of the conversation with that seed begins; empty if freely."""
        openings = VARIED if self.user_openings == "varied" else self.user_openings or [""]
        # Each opening is used at every temperature.
        return openings[seed // len(self.temperatures) % len(openings)]

    @model_validator(mode="after")
    def _rows_of_one_document(self) -> "RegenerateSettings":
        for name, value in (("pack", False), ("long_records", "cut"), ("train_turns", "all")):
            if getattr(self.data, name) != value:
                raise ValueError(f"regeneration does not read data.{name}; leave it out")
        if self.drafter is None and self.tree != TreeConfig():
            raise ValueError("tree is how a drafter drafts; give drafter, or leave it out")
        return self

    @model_validator(mode="after")
    def _one_kind_of_prompts(self) -> "RegenerateSettings":
        if self.prompts == "self":
            if (self.count is None) == (self.tokens is None):
                raise ValueError("prompts: self needs either count or tokens, to know when to end")
            if self.data.sources or self.prompt_tokens is not None:
                raise ValueError(
                    "prompts: self reads neither data.sources nor prompt_tokens; leave them out"
                )
            if self.user_sampling.temperature == 0:
                raise ValueError(
                    "user_sampling.temperature is 0, at which every conversation would begin with "
                    "the same question; raise it"
                )
            return self
        if not self.data.sources:
            raise ValueError("data.sources is empty; name sources, or set prompts: self")
        for name in ("tokens", "first_seed", *USER_SETTINGS):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for prompts: self; leave it out")
        if self.prompt_tokens is None:
            if any(source.weight != 1 for source in self.data.sources):
                raise ValueError(
                    "rewriting conversations does not read data.sources.weight; leave it out"
                )
            return self
        if self.count is None:
            raise ValueError("count is missing: say how many texts prompt_tokens are taken from")
        if self.max_new_tokens is not None:
            raise ValueError(
                "max_new_tokens is for conversations; texts are continued to data.sequence_length "
                "tokens, so leave it or prompt_tokens out"
            )
        if self.prompt_tokens >= self.data.sequence_length:
            raise ValueError(
                f"prompt_tokens is {self.prompt_tokens}, which leaves nothing to write of "
                f"data.sequence_length={self.data.sequence_length}"
            )
        return self


class DrafterSettings(DrafterShape):
    """Shape of the drafter, and where it starts.

    `initial_drafter` is a trained drafter, of this shape, whose parameters it starts with; it may
    lack the layer of `attention`, which then starts as one that adds nothing. Without a trained one
    `initial_head: target` starts the head, or each of several, from the target's own, or from its
    strongest directions where `exit_dim` or `head_rank` is less than the target's width.

    Of `draft_vocab_size` tokens the head knows those that the training data asks for most often, or
    those of `initial_drafter`, whose number must be stated or left at "auto". One with `head:
    target` has no parameters of its tokens, so that another number is chosen from the data.
    """

    draft_vocab_size: PositiveInt | Literal["auto"] | None = "auto"

    initial_head: Literal["random", "target"] = "random"
    initial_drafter: str | None = None

    @model_validator(mode="after")
    def _one_start(self) -> "DrafterSettings":
        if self.initial_drafter and self.initial_head == "target":
            raise ValueError(
                "initial_drafter gives the head too; leave initial_head out, or initial_drafter"
            )
        return self


class LossSettings(Settings):
    """Weights of the losses, which are added up, over rounds too.

    `hard` is cross-entropy with the data's next token. `soft` is the KL divergence from the
    target's own distribution, both at `soft_temperature`, the target's cut to its `soft_top_k` most
    likely tokens if that is given; what the drafter gives to other tokens is lost. It is multiplied
    by the temperature's square, so that gradients keep their size (arXiv 1503.02531). `lk` is the
    negative logarithm of the probability that the two share, `-log sum min(p, q)`, and `tv` their
    total variation, `1 - sum min(p, q)`. Round i (from 0) counts `round_decay**i` times.

    With `drafted_only` a prediction carries no loss where the target's most likely token is none of
    those that the head drafts.

    Positions are scored `chunk_length` (C) at a time, so that the logits are [B, C + R, V] of the
    target and [R, B, C, V] of the drafter at most, R being `draft_rounds`.
    """

    hard: float = Field(default=0.0, ge=0)
    soft: float = Field(default=1.0, ge=0)
    lk: float = Field(default=0.0, ge=0)
    tv: float = Field(default=0.0, ge=0)
    drafted_only: bool = False
    soft_temperature: PositiveFloat = 1.0
    soft_top_k: PositiveInt | None = None
    round_decay: float = Field(default=1.0, gt=0, le=1)
    chunk_length: PositiveInt = 64

    @model_validator(mode="after")
    def _some_loss(self) -> "LossSettings":
        if not any(getattr(self, name) for name in LOSSES):
            names = f"{', '.join(LOSSES[:-1])} and {LOSSES[-1]}"
            raise ValueError(f"{names} are all 0; give one of them a weight above 0")
        return self


class TrainMeshSettings(MeshSettings):
    """Devices that train together: `data` splits the batch, `model` the target and the drafter.

    `fully_sharded` splits the drafter's parameters and the optimizer's state over `data` as well.
    """

    fully_sharded: bool = False


class AcceptanceSettings(Settings):
    """Trying the drafter while it trains: held-out prompts, decoded greedily as in use.

    Every `every` steps, and after the last one, the first `prompt_count` rows of `prompts` (all, if
    it is not given; see `redrafter_jax.text.prompts`) get `max_new_tokens` tokens each,
    `batch_size` of them together. With `turns` "all" a row's later turns are asked too, behind the
    target's own answers, which are decoded once; with 1 they are left out. With `chat` a prompt is
    a user's turn in the chat template of `data`, and the answer may end before; by default that is
    so where `data` holds conversations or the target's tokenizer brings a template.
    """

    every: PositiveInt
    prompts: Path
    prompt_count: PositiveInt | None = None
    turns: Turns = "all"
    max_new_tokens: PositiveInt = 64
    batch_size: PositiveInt = 8
    chat: bool | None = None
    tree: TreeConfig = TreeConfig()


class TrainSettings(Settings):
    """`python -m train`: a drafter for a frozen target.

    With `features` the target's hidden states and most likely tokens are read from that folder,
    which `python -m train features` writes, and its layers do not run.

    A finished run goes on where `steps` is raised: parameters, the optimizer's averages and the
    place in the data are kept, and the schedule is that of a run of the new length, so that the
    learning rate rises once.

    Attributes:
      target: folder or hub id of the target, or a GGUF file.
      target_dtype: dtype of the loaded target.
      draft_rounds: R, the tokens that the drafter learns to draft.
      features: folder of kept hidden states.
      acceptance: held-out prompts that the drafter is tried on; null tries none.
      steps: updates of the parameters.
      seed: seed of the parameters that training starts from.
      log_every: steps between two rows of `metrics.jsonl`; the terminal may show fewer.
      checkpoint_every: steps between two checkpoints.
      checkpoints_kept: number of the latest checkpoints that stay.
      resume: whether to go on from a checkpoint in `output_dir`.
      output_dir: folder for all that the run writes.
    """

    target: Path
    target_dtype: Dtype = "bfloat16"
    drafter: DrafterSettings
    draft_rounds: PositiveInt
    data: TrainData
    features: Path | None = None
    loss: LossSettings = LossSettings()
    acceptance: AcceptanceSettings | None = None
    optimizer: OptimizerSettings
    mesh: TrainMeshSettings = TrainMeshSettings()
    steps: PositiveInt
    seed: int = Field(default=0, ge=0, lt=2**32)
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 500
    checkpoints_kept: PositiveInt = 2
    resume: Literal["auto", "never"] = "auto"
    output_dir: Path
