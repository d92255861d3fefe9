"""The time plan of a fit, which is adjusted after each stage to the time that is left.

The current plan is the file `plan.json`. The numbers of written tokens and of training steps depend
on the clock, so they are saved before they are used. A killed run thus resumes to the same head.
"""

import math
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from redrafter_jax.config import Dtype
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import write_atomically
from redrafter_jax.settings.files import Settings

from .probe import Rates

Stage = Literal["write", "read", "train", "tune", "measure"]
STAGES: tuple[Stage, ...] = ("write", "read", "train", "tune", "measure")

# Number of epochs over the written tokens, as planned, and the maximum if time is left. With fewer
# epochs, a head learns less from the same tokens.
EPOCHS, _MOST_EPOCHS = 4, 8
# With fewer tokens a head hardly improves on its initialization.
_FEWEST_TOKENS, _FEWEST_STEPS = 4096, 8
# Minimum share of the time for the last two stages, and the share of this time that the tuner gets.
_ENDING, _TUNING = 0.25, 0.6
# Number of prompts for measuring the head: at least `verdict.FEWEST_TEXTS`, and one per
# `_TOKENS_PER_PROMPT` written tokens, so that few tokens are held out. The tuner gets half as many
# additional prompts.
_FEWEST_PROMPTS, _MOST_PROMPTS, _TOKENS_PER_PROMPT = 8, 24, 2048
# Minimum number of new tokens per measured prompt.
_FEWEST_NEW_TOKENS = 24
# Runs per prompt: the baseline and a tree, at two temperatures; the first two compile.
_RUNS = 5
# Number of trees that the tuner should have time to compile.
_TREES = 4
# Share of the probe's starting time that loading the target or compiling one program takes.
_PART = 1 / 6
# Answers are limited so that each slot decodes about `_WAVES` of them in sequence, not just one.
_WAVES, _SHORTEST_ANSWER = 8, 128
# Number of tokens of a question, which the target also writes, without loss; and number of tokens
# that it reads to write question and answer.
_QUESTION, _READ = 48, 64
# A training run restarts with fewer steps if it would be late by more than this share, but not
# within its first steps.
_LATE, _TIMED_STEPS = 0.1, 5


class FitRequest(NamedTuple):
    """A request for a fit.

    Attributes:
      target: folder, hub id or GGUF file of the target.
      target_dtype: dtype of the target's parameters.
      minutes: approximate time limit in minutes.
      chat_template: name of a built-in chat template, or path of a Jinja file; None for the
        tokenizer's own template, or for plain texts if it has none.
    """

    target: str
    target_dtype: Dtype
    minutes: float
    chat_template: str | None = None

    @property
    def template_option(self) -> list[str]:
        """The command-line option for the chat template; empty for the tokenizer's own."""
        return [] if self.chat_template is None else ["--chat-template", self.chat_template]


class FitPlan(Settings):
    """The current time plan of a fit.

    Attributes:
      asked: the request.
      rates: throughput of the device, from `measure_rates`.
      rows: number of rows that the target writes together.
      answer_tokens: maximum number of tokens of a written answer.
      tokens: number of tokens that the target writes, or has written, without those that carry no
        loss.
      ending: seconds reserved for the tuner and the report.
      prompts: number of held-out texts for measuring the head; the tuner gets half this number of
        further texts.
      new_tokens: number of new tokens per prompt when the head is measured.
      steps: number of training steps; None before the texts are read.
      spent: seconds that all runs of this fit have taken.
      done: the finished stages.
    """

    asked: FitRequest
    rates: Rates
    rows: int
    answer_tokens: int
    tokens: int
    ending: float
    prompts: int
    new_tokens: int
    steps: int | None = None
    spent: float
    done: tuple[Stage, ...] = ()

    @property
    def left(self) -> float:
        """Seconds that are left of the given minutes; negative if the fit is late."""
        return 60 * self.asked.minutes - self.spent

    @property
    def measuring(self) -> float:
        """Expected seconds of the last stage, "measure"."""
        return measuring_seconds(self.rates, self.prompts, self.new_tokens)

    def expected(self, step_tokens: int) -> dict[Stage, float]:
        """Expected seconds of each unfinished stage; a training step reads `step_tokens` tokens."""
        positions = EPOCHS * self.tokens if self.steps is None else self.steps * step_tokens
        seconds: dict[Stage, float] = {
            "write": self.tokens * _per_written(self.rates, self.answer_tokens),
            "read": self.tokens / self.rates.read,
            "train": positions / self.rates.trained,
            "tune": _tuning_seconds(self.rates, self.new_tokens),
            "measure": self.measuring,
        }
        return {stage: seconds[stage] for stage in STAGES if stage not in self.done}


def measuring_seconds(rates: Rates, prompts: int, new_tokens: int) -> float:
    """Seconds of the report: loading, compiling two methods, and decoding the prompts."""
    return 3 * _PART * rates.starting + _RUNS * prompts * new_tokens / rates.alone


def _tuning_seconds(rates: Rates, new_tokens: int) -> float:
    """Seconds of tuning a few trees: compiling each tree, and four turns with it."""
    per_tree = _PART * rates.starting + 2 * 4 * new_tokens / rates.alone
    return _PART * rates.starting + _TREES * per_tree


def _per_written(rates: Rates, answer: int) -> float:
    """Seconds to write a token that carries loss, in answers of `answer` tokens."""
    return (1 + _QUESTION / answer) / rates.written + _READ / answer / rates.read


def _per_learned(rates: Rates) -> float:
    """Seconds to read a written token and train on it."""
    return 1 / rates.read + EPOCHS / rates.trained


def is_enough(plan: FitPlan, used: float, tokens: int) -> bool:
    """Whether the stages "read" and "train" on `tokens` written tokens would take the time left.

    `used` is the number of seconds that the fit has taken so far.
    """
    left = 60 * plan.asked.minutes - used - plan.ending - 2 * _PART * plan.rates.starting
    return tokens * _per_learned(plan.rates) >= left


def _ending(rates: Rates, seconds: float) -> float:
    """Seconds reserved for the tuner and the report, out of `seconds`."""
    least = _tuning_seconds(rates, _FEWEST_NEW_TOKENS) + measuring_seconds(
        rates, _FEWEST_PROMPTS, _FEWEST_NEW_TOKENS
    )
    return max(_ENDING * seconds, least)


def make_plan(
    asked: FitRequest, spent: float, rows: int, rates: Rates, new_tokens: int, row_tokens: int
) -> FitPlan:
    """Plan a fit: the target writes and reads every token once; training takes `EPOCHS` epochs.

    Args:
      asked: the request.
      spent: seconds that the fit has taken so far.
      rows: number of rows that the target writes together.
      rates: throughput of the device.
      new_tokens: maximum number of new tokens per prompt when the head is measured.
      row_tokens: number of tokens in a row of training data.

    Raises:
      InputError: the time is too short for enough tokens.
    """
    per_token = _per_written(rates, _SHORTEST_ANSWER) + _per_learned(rates)

    def tokens_in(minutes: float) -> int:
        """The number of tokens that fit into this time."""
        seconds = 60 * minutes - spent
        return int((seconds - 3 * _PART * rates.starting - _ending(rates, seconds)) / per_token)

    tokens = tokens_in(asked.minutes)
    if tokens < _FEWEST_TOKENS:
        enough = float(math.ceil(asked.minutes))
        while tokens_in(enough) < _FEWEST_TOKENS:
            enough += 1
        raise InputError(
            f"In {asked.minutes:g} minutes this device writes and learns {max(tokens, 0)} tokens, "
            f"but a head needs at least {_FEWEST_TOKENS}; give --minutes {enough:g} or more."
        )
    prompts = min(max(tokens // _TOKENS_PER_PROMPT, _FEWEST_PROMPTS), _MOST_PROMPTS)
    plan = FitPlan(
        asked=asked,
        rates=rates,
        rows=rows,
        answer_tokens=min(max(tokens // (_WAVES * rows), _SHORTEST_ANSWER), row_tokens),
        tokens=tokens,
        ending=_ending(rates, 60 * asked.minutes - spent),
        prompts=prompts,
        new_tokens=new_tokens,
        spent=spent,
    )
    return _shorten_measuring(plan, (1 - _TUNING) * plan.ending)


def _shorten_measuring(plan: FitPlan, seconds: float) -> FitPlan:
    """Reduce new tokens and prompts until measuring fits into `seconds`, or both are minimal."""
    for name, fewest in (("new_tokens", _FEWEST_NEW_TOKENS), ("prompts", _FEWEST_PROMPTS)):
        while plan.measuring > seconds and getattr(plan, name) > fewest:
            fewer = max(fewest, int(0.9 * getattr(plan, name)))
            plan = plan.model_copy(update={name: fewer})
    return plan


def plan_training(plan: FitPlan, tokens: int, step_tokens: int) -> FitPlan:
    """Return the plan with the number of training steps that the remaining time allows.

    Args:
      plan: the plan of a fit whose texts the target has already written and read.
      tokens: number of tokens of the training data.
      step_tokens: number of tokens per training step.
    """
    seconds = plan.left - plan.ending - _PART * plan.rates.starting
    by_time = int(seconds * plan.rates.trained / step_tokens)
    most = max(1, _MOST_EPOCHS * tokens // step_tokens)
    return plan.model_copy(update={"steps": max(min(by_time, most), _FEWEST_STEPS)})


def plan_measuring(plan: FitPlan) -> tuple[FitPlan, float]:
    """Divide the time left after training between the tuner and the report.

    Returns:
      The plan with the size of the report, and the seconds of the tuner.
    """
    plan = _shorten_measuring(plan, (1 - _TUNING) * plan.left)
    return plan, max(plan.left - plan.measuring, _tuning_seconds(plan.rates, _FEWEST_NEW_TOKENS))


class Pace:
    """Time control of a training run: how many steps fit into the time.

    `used` is the number of seconds that the fit had taken when the run began.
    """

    def __init__(self, plan: FitPlan, used: float) -> None:
        self._plan, self._begun = plan, used
        self._ends = 60 * plan.asked.minutes - plan.ending
        self._first: tuple[int, float] | None = None
        self._starting = 0.0

    def steps(self, step: int, used: float) -> int | None:
        """Return a smaller number of steps if the run would be late, otherwise None.

        To be called after every step, with the number of finished steps and the number of seconds
        that the fit has taken.
        """
        if self._first is None:  # the first step has compiled
            self._first, self._starting = (step, used), used - self._begun
            return None
        assert self._plan.steps is not None
        first, since = self._first
        if step - first < _TIMED_STEPS:
            return None
        per_step = (used - since) / (step - first)
        late = used + (self._plan.steps - step) * per_step - self._ends
        if late < max(_LATE * (self._ends - since), self._starting):
            return None
        left = int((self._ends - used - self._starting) / per_step)
        # Without time left, a few steps still let the learning rate fall to zero.
        steps = step + max(left, _TIMED_STEPS)
        return steps if steps < self._plan.steps else None


def read_plan(folder: Path, asked: FitRequest) -> FitPlan | None:
    """Read the plan in the folder of a fit; None if the folder has no plan.

    Args:
      folder: the folder of the fit.
      asked: the current request.

    Raises:
      InputError: `plan.json` is not a plan, or belongs to a fit with other arguments.
    """
    path = folder / "plan.json"
    if not path.exists():
        return None
    try:
        plan = FitPlan.model_validate_json(path.read_bytes())
    except ValidationError:
        raise InputError(f"{path} is not the plan of a fit; use another folder.") from None
    pairs = zip(FitRequest._fields, plan.asked, asked, strict=True)
    changed = [
        f"{name} {_shown(old)} (now {_shown(new)})" for name, old, new in pairs if old != new
    ]
    if changed:
        raise InputError(
            f"{folder} holds a fit with {', '.join(changed)}; use another folder, or delete "
            "this one."
        )
    return plan


def _shown(value: object) -> object:
    return "not given" if value is None else value


def write_plan(plan: FitPlan, folder: Path) -> None:
    """Write `plan.json` atomically."""
    write_atomically(folder / "plan.json", plan.model_dump_json(indent=2) + "\n")
