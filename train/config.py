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
    """AdamW or Muon, with a linear warm-up and a cosine decay of the learning rate to zero.

    Attributes:
      rule: "muon" updates hidden matrices with Muon and other parameters with AdamW; it needs fewer
        tokens than "adamw".
      learning_rate: the learning rate at the end of the warm-up, which is its maximum.
      warmup_fraction: fraction of the steps in which the learning rate rises from 0.
      weight_decay: coefficient of the weight decay; with "muon", it applies only to the matrices
        that Muon updates.
      beta1: AdamW's decay rate of the first moment.
      beta2: AdamW's decay rate of the second moment.
      clip_norm: maximum global norm of the gradients; larger gradients are scaled down.
      batch_size: number of rows of data in each forward and backward pass.
      accumulation_steps: number of these passes whose gradients each optimizer step accumulates.
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
    """The data of a training run; in contrast to other commands, `pack` is true by default."""

    pack: bool = True


class RegenerateData(DataSettings):
    """The data from which prompts are taken; with `prompts: self`, leave `sources` empty."""

    sources: list[SourceSettings] = []


class WorkerSettings(Settings):
    """The processes that share the work of a command that runs the target over data.

    Attributes:
      workers: number of Ray processes that share the work; each of them loads the models. The
        output is the same as that of a single process. null: this process does the work alone.
      worker_cpus: number of CPUs that Ray reserves for each worker.
      worker_gpus: number of GPUs that Ray reserves for each worker; null: one per device of the
        mesh, or 0 if the cluster has no GPU when the command starts.
    """

    workers: PositiveInt | None = None
    worker_cpus: PositiveFloat = 1.0
    worker_gpus: NonNegativeFloat | None = None


class RegenerateSettings(WorkerSettings):
    """The settings of `python -m train regenerate`: the target generates training data.

    There are three kinds of prompts. With `prompt_tokens`, the target continues the beginnings of
    texts. With neither `prompt_tokens` nor `prompts: self`, the target rewrites the assistant turns
    of conversations. With `prompts: self` there are no sources: the target also writes the user
    turns. A target without a chat template then writes texts, each of which continues one token.

    The output is a file of rows of tokens. A row has at most `data.sequence_length` tokens. Text or
    conversation i is sampled with seed i.

    Attributes:
      target: folder or hub id of the target, or a GGUF file.
      target_dtype: dtype of the target's parameters.
      drafter: drafter that makes decoding faster and does not change the output; null for none.
      tree: draft tree; only with a drafter.
      prompts: "self" if the target writes the prompts too; "data" takes them from the sources.
      prompt_tokens: length of each beginning of a text. The texts are drawn uniformly from all
        sources, whatever their weights, among the texts that fill a row.
      max_new_tokens: maximum number of tokens of an answer; null: as many as the row has room for.
      count: number of texts or conversations; null: all recorded conversations.
      tokens: number of tokens that carry loss at which writing ends; only for `prompts: self`, and
        instead of `count`.
      first_seed: seed of the first conversation; only for `prompts: self`. Several machines can
        share the work if each has its own output and its own range of seeds.
      turns: number of user turns in each conversation; only for `prompts: self`.
      max_user_tokens: maximum number of tokens of a user turn; only for `prompts: self`.
      user_sampling: sampling settings of user turns; only for `prompts: self`.
      user_openings: first words of the first questions, used in turn, which make the questions more
        varied; only for `prompts: self`. With an empty string or an empty list, the target writes
        the whole question. "varied": the openings of `train.openings`.
      user_loss: whether the user turns that the target writes carry loss too; only for `prompts:
        self`.
      batch_size: number of texts or conversations that are decoded together.
      temperatures: sampling temperatures of answers and texts; seed i uses entry i modulo the
        length of this list.
      output: JSONL file to write; an existing output of the same settings is continued.
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
        """First words of the conversation with this seed; empty if the target chooses them."""
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
                raise ValueError(
                    "prompts: self needs either count or tokens as its limit; set one of the two"
                )
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
            raise ValueError("prompt_tokens needs count, the number of texts to continue; set both")
        if self.max_new_tokens is not None:
            raise ValueError(
                "max_new_tokens is only for conversations, but prompt_tokens continues texts to "
                "data.sequence_length tokens; leave one of the two out"
            )
        if self.prompt_tokens >= self.data.sequence_length:
            raise ValueError(
                f"prompt_tokens is {self.prompt_tokens}, but must be less than "
                f"data.sequence_length={self.data.sequence_length}; change one of the two"
            )
        return self


class DrafterSettings(DrafterShape):
    """Shape of the drafter and its initial parameters.

    Attributes:
      draft_vocab_size: number of tokens that the head can draft: those that carry loss most often
        in the training data. null: all tokens of the target. "auto": the number of the
        `initial_drafter`, or without one 16,384 if the target has more. With `initial_drafter`, the
        head keeps the tokens of that drafter, so another number is refused. Only a drafter with
        `head: target`, which has no parameters per token, accepts another number.
      initial_head: "target" initializes the output heads from the target's output head; "random"
        draws random values. If `exit_dim` or `head_rank` is less than the target's width, "target"
        takes the leading singular directions of the target's output head.
      initial_drafter: folder or hub id of a trained drafter of this shape; training starts from its
        parameters. If this drafter lacks the `attention` layer that the settings ask for, the new
        layer has no effect at first.
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
    """Weights of the losses; the training loss is their weighted sum over all draft rounds.

    For each prediction, p is the target's distribution of the next token, and q the drafter's.

    Attributes:
      hard: weight of the cross-entropy with the next token of the data.
      soft: weight of the KL divergence from p to q, both at `soft_temperature`. The divergence is
        multiplied by the squared temperature, so that gradients keep their size (arXiv 1503.02531).
      lk: weight of `-log sum min(p, q)`, the negative logarithm of the probability mass that p and
        q share.
      tv: weight of the total variation distance, `1 - sum min(p, q)`.
      drafted_only: whether a prediction carries no loss if the target's most likely token is
        outside the draft vocabulary.
      soft_temperature: temperature of both distributions in the soft loss.
      soft_top_k: number of most likely tokens to which p is restricted in the soft loss; null: all.
      round_decay: round i, counted from 0, has weight `round_decay**i`.
      chunk_length: C, number of positions that are scored at a time. For B rows, R draft rounds and
        V tokens, the logits are at most [B, C + R, V] for the target and [R, B, C, V] for the
        drafter.
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
    """Device mesh of training.

    Attributes:
      data: size of the mesh axis that splits the batch.
      model: size of the mesh axis that splits the target and the drafter.
      fully_sharded: whether the axis `data` also splits the drafter's parameters and the optimizer
        state.
    """

    fully_sharded: bool = False


class AcceptanceSettings(Settings):
    """Evaluation of the drafter during training: greedy decoding of held-out prompts.

    Attributes:
      every: steps between two evaluations; the drafter is also evaluated after the last step.
      prompts: JSONL file; see `redrafter_jax.text.prompts`.
      prompt_count: number of prompts, from the beginning of the file; null: all.
      turns: 1 asks only the first turn of each prompt; "all" also asks the later turns, each after
        the target's answers to the earlier turns.
      max_new_tokens: maximum number of new tokens per prompt and turn.
      batch_size: number of prompts that are decoded together.
      chat: whether prompts are user turns in the chat template of `data`; answers then end early at
        an end token. null: true if `data` has conversations or the tokenizer has a chat template.
      tree: draft tree.
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

    A finished run continues if `steps` is raised. The parameters, the optimizer state and the
    position in the data are kept. The learning rate follows the schedule of the new length, so it
    rises once.

    Attributes:
      target: folder or hub id of the target, or a GGUF file.
      target_dtype: dtype of the target's parameters.
      draft_rounds: R, number of tokens in succession that the drafter learns to draft.
      features: folder that `python -m train features` writes. Training reads the target's hidden
        states and most likely tokens from this folder and does not run the target's layers. null:
        the target runs in every step.
      acceptance: evaluation on held-out prompts during training; null disables it.
      steps: number of optimizer steps.
      seed: seed of the initial parameters.
      log_every: steps between two rows of `metrics.jsonl`; the terminal may show fewer.
      checkpoint_every: steps between two checkpoints.
      checkpoints_kept: number of newest checkpoints to keep.
      resume: "auto" resumes from the newest checkpoint in `output_dir`; "never" refuses a folder
        with a checkpoint.
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
