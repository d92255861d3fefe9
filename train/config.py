"""Settings of the training commands, which pydantic validates when they are read."""

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

# Settings that apply only to `prompts: self` with a target that has a chat template.
USER_SETTINGS = ("turns", "max_user_tokens", "user_sampling", "user_openings", "user_loss")

# The losses that `loss:` weights.
LOSSES = ("hard", "soft", "lk", "tv")


class OptimizerSettings(Settings):
    """AdamW or Muon, with a linear warm-up and a cosine decay to zero.

    `rule: muon` updates hidden matrices with Muon and other parameters with AdamW; it needs fewer
    tokens. `weight_decay` then applies only to the Muon matrices, `beta1` and `beta2` only to the
    AdamW parameters.
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
        """Number of rows of data that each optimizer step reads."""
        return self.batch_size * self.accumulation_steps


class TrainData(DataSettings):
    """The data of a training run; `pack` puts several short documents into one row."""

    pack: bool = True


class RegenerateData(DataSettings):
    """The data that prompts are taken from; `prompts: self` reads no sources."""

    sources: list[SourceSettings] = []


class WorkerSettings(Settings):
    """Who shares the work of a command that runs the target over data.

    Attributes:
      workers: number of workers that share the work, each a process of Ray with the models loaded;
        the output is that of one process. null: this process does the work alone.
      worker_cpus: CPUs that Ray reserves for each worker.
      worker_gpus: GPUs that Ray reserves for each worker; null: one for each device of the mesh, if
        the cluster has GPUs now.
    """

    workers: PositiveInt | None = None
    worker_cpus: PositiveFloat = 1.0
    worker_gpus: NonNegativeFloat | None = None


class RegenerateSettings(WorkerSettings):
    """`python -m train regenerate`: training data in the target's own words.

    With `prompt_tokens`, the target continues texts. `count` prompts of `prompt_tokens` tokens are
    drawn uniformly from the full rows of all sources, ignoring source weights; all tokens of such a
    row carry loss. Each prompt becomes a row of `data.sequence_length` tokens, unless the target
    ends the text earlier.

    Without `prompt_tokens`, the target rewrites the assistant turns of `count` conversations, or of
    all. An answer has at most `max_new_tokens` tokens, and a row at most `data.sequence_length`.

    With `prompts: self` there is no data: the target also writes the user turns. A conversation has
    `turns` of them, each sampled with `user_sampling` in at most `max_user_tokens` tokens; writing
    ends at `count` conversations or at `tokens` tokens that carry loss. The first question of each
    conversation begins with the next of `user_openings`, in turn, so that questions are of many
    kinds; without openings, or with an empty one, the question begins freely. `varied` selects the
    openings of `train.openings`. With `user_loss`, the user turns that the target
    wrote carry loss too. A target without a chat template continues single tokens instead.

    Text or conversation i is sampled with seed i at `temperatures[i % len(temperatures)]`;
    `batch_size` of them are decoded together. With `prompts: self`, i counts
    from `first_seed`, so that several machines can share the work: give each its own output and
    other seeds. A `drafter`, with the tree given by `tree`, makes decoding faster and does not
    change the output. `mesh` sets the devices that share the work.
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
    user_loss: bool = False
    batch_size: PositiveInt
    temperatures: list[NonNegativeFloat] = Field(default=[0.0], min_length=1)
    output: Path

    def temperature_of(self, seed: int) -> float:
        """The sampling temperature of the text or conversation with this seed."""
        return self.temperatures[seed % len(self.temperatures)]

    def opening_of(self, seed: int) -> str:
        """First words of the conversation with this seed; empty if it begins freely."""
        openings = VARIED if self.user_openings == "varied" else self.user_openings or [""]
        # Each opening is used at every temperature.
        return openings[seed // len(self.temperatures) % len(openings)]

    @model_validator(mode="after")
    def _rows_of_one_document(self) -> "RegenerateSettings":
        for name, value in (("pack", False), ("long_records", "cut"), ("train_turns", "all")):
            if getattr(self.data, name) != value:
                raise ValueError(f"regeneration does not use data.{name}; leave it out")
        if self.drafter is None and self.tree != TreeConfig():
            raise ValueError("tree needs a drafter; set drafter, or leave tree out")
        return self

    @model_validator(mode="after")
    def _one_kind_of_prompts(self) -> "RegenerateSettings":
        if self.prompts == "self":
            if (self.count is None) == (self.tokens is None):
                raise ValueError("prompts: self needs either count or tokens as its limit")
            if self.data.sources or self.prompt_tokens is not None:
                raise ValueError(
                    "prompts: self uses neither data.sources nor prompt_tokens; leave both out"
                )
            if self.user_sampling.temperature == 0:
                raise ValueError(
                    "user_sampling.temperature is 0, so every conversation would begin with the "
                    "same question; give a temperature above 0"
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
                    "rewriting conversations does not use data.sources.weight; leave it out"
                )
            return self
        if self.count is None:
            raise ValueError("prompt_tokens needs count, the number of texts to continue")
        if self.max_new_tokens is not None:
            raise ValueError(
                "max_new_tokens is only for conversations, but prompt_tokens continues texts to "
                "data.sequence_length tokens; leave one of the two out"
            )
        if self.prompt_tokens >= self.data.sequence_length:
            raise ValueError(
                f"prompt_tokens is {self.prompt_tokens}, but must be less than "
                f"data.sequence_length={self.data.sequence_length}"
            )
        return self


class DrafterSettings(DrafterShape):
    """Shape of the drafter and its initial parameters.

    `initial_drafter` names a trained drafter of this shape, from whose parameters training starts.
    If it lacks the `attention` layer, this layer starts so that it changes nothing. Without
    `initial_drafter`, `initial_head: target` initializes the output head (or all output heads) from
    the target's output head. If `exit_dim` or `head_rank` is less than the target's width, the
    leading singular directions of the target's output head are used.

    With `draft_vocab_size`, the head drafts the tokens that carry loss most often in the training
    data. With `initial_drafter`, it keeps the tokens of that drafter: state the same number, or
    leave "auto". A drafter with `head: target` has no parameters per token, so another number is
    accepted, and the tokens are chosen from the data.
    """

    draft_vocab_size: PositiveInt | Literal["auto"] | None = "auto"

    initial_head: Literal["random", "target"] = "random"
    initial_drafter: str | None = None

    @model_validator(mode="after")
    def _one_start(self) -> "DrafterSettings":
        if self.initial_drafter and self.initial_head == "target":
            raise ValueError(
                "initial_drafter already initializes the head; leave out initial_head or "
                "initial_drafter"
            )
        return self


class LossSettings(Settings):
    """Weights of the losses; the training loss is their weighted sum over all rounds.

    `hard` is the cross-entropy with the next token of the data.

    `soft` is the KL divergence from the target's distribution to the drafter's, both at
    `soft_temperature`. With `soft_top_k`, the target's distribution is restricted to its most
    likely tokens. The loss is multiplied by the squared temperature, so that gradients keep their
    size (arXiv 1503.02531).

    `lk` is the negative logarithm of the probability mass that the two distributions share,
    `-log sum min(p, q)`. `tv` is their total variation distance, `1 - sum min(p, q)`. Round i (from
    0) has weight `round_decay**i`.

    With `drafted_only`, predictions whose most likely target token is outside the draft vocabulary
    carry no loss.

    Positions are scored in chunks of `chunk_length` (C), so that the logits are at most [B, C + R,
    V] for the target and [R, B, C, V] for the drafter, where R is `draft_rounds`.
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
            raise ValueError(f"{names} are all 0; set at least one of them above 0")
        return self


class TrainMeshSettings(MeshSettings):
    """Device mesh of training: `data` splits the batch, and `model` the target and the drafter.

    `fully_sharded` also splits the drafter's parameters and the optimizer state over `data`.
    """

    fully_sharded: bool = False


class AcceptanceSettings(Settings):
    """Evaluation of the drafter during training: greedy decoding of held-out prompts.

    Every `every` steps and after the last step, `max_new_tokens` tokens are decoded for each of the
    first `prompt_count` rows of `prompts` (all rows by default; see `redrafter_jax.text.prompts`),
    `batch_size` rows together. With `turns` "all", later turns of a row are asked too, after the
    target's own answers, which are decoded once; with 1 only the first turn is asked. With `chat`,
    prompts are user turns in the chat template of `data`, and an answer may end early; this is the
    default if `data` holds conversations or the target's tokenizer has a template.
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
    """The settings of `python -m train`: train a drafter for a frozen target.

    With `features`, training reads the target's hidden states and most likely tokens from that
    folder, which `python -m train features` writes, and does not run the target's layers.

    A finished run continues if `steps` is raised. The parameters, the optimizer state and the
    position in the data are kept. The learning rate follows the schedule of the new length, so it
    rises once.

    Attributes:
      target: folder or hub id of the target, or a GGUF file.
      target_dtype: dtype of the loaded target.
      draft_rounds: R, number of tokens that the drafter learns to draft after the root.
      features: folder of stored hidden states.
      acceptance: evaluation on held-out prompts during training; null disables it.
      steps: number of optimizer steps.
      seed: seed of the initial parameters.
      log_every: steps between two rows of `metrics.jsonl`; the terminal may show fewer.
      checkpoint_every: steps between two checkpoints.
      checkpoints_kept: number of newest checkpoints to keep.
      resume: whether to resume from a checkpoint in `output_dir`.
      output_dir: folder of all output of the run.
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
