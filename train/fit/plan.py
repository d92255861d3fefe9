"""How the time of a fit is divided, and divided again when a stage took longer than expected.

The plan in force is a file. Whatever the clock decides (how many tokens are written, how many steps
train) is written down before it is followed, so that a killed run goes on to the same head.
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

# Passes over the target's own words: planned, and at most where time is left. With fewer a head
# learns less from the same tokens.
EPOCHS, _MOST_EPOCHS = 4, 8
# With fewer tokens a head learns hardly more than its initial head knows.
_FEWEST_TOKENS, _FEWEST_STEPS = 4096, 8
# Of the time for the two last stages: at least so much, and the tuner's part of it.
_ENDING, _TUNING = 0.25, 0.6
# Prompts that the finished head is measured with: as `verdict.FEWEST_TEXTS` at least, and one for
# each so many written tokens, so that few of them are held out. The tuner has half as many more.
_FEWEST_PROMPTS, _MOST_PROMPTS, _TOKENS_PER_PROMPT = 8, 24, 2048
# New tokens of a prompt that is measured, at least.
_FEWEST_NEW_TOKENS = 24
# Runs of each prompt: the baseline and a tree, at two temperatures; the first two compile.
_RUNS = 5
# Trees that the tuner should have time to compile.
_TREES = 4
# To load the target or to compile one program, of what all of the probe's took.
_PART = 1 / 6
# Answers are so short that rows decode one after the other so many times, not all of them once.
_WAVES, _SHORTEST_ANSWER = 8, 128
# Tokens of a question, which the target writes too and which carry no loss; and of what it reads
# before it writes question and answer.
_QUESTION, _READ = 48, 64
# A training run begins anew with fewer steps where it would be late by more than this share, and
# not within its first steps.
_LATE, _TIMED_STEPS = 0.1, 5


class FitRequest(NamedTuple):
    """The request for a fit: a target, the dtype of its parameters, and the minutes to take."""

    target: str
    target_dtype: Dtype
    minutes: float


class FitPlan(Settings):
    """The sizes in force.

    Attributes:
      asked: the request that it is for.
      rates: the device's rates, as the probe or the stages measured them.
      rows: number of rows that the target writes together.
      answer_tokens: limit of a written answer.
      tokens: number of tokens with loss for the target to write; afterwards, that it wrote.
      ending: seconds that are kept for the tuner and the report.
      prompts: number of texts held out to measure the head; the tuner has half as many more.
      new_tokens: new tokens for each prompt when the head is measured.
      steps: steps of training; None before the texts are read.
      spent: seconds that all runs of this fit have taken.
      done: the stages that have ended.
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
        """How many seconds of the given minutes are left; negative when they are over."""
        return 60 * self.asked.minutes - self.spent

    @property
    def measuring(self) -> float:
        """Seconds that the last stage takes."""
        return measuring_seconds(self.rates, self.prompts, self.new_tokens)

    def expected(self, step_tokens: int) -> dict[Stage, float]:
        """Seconds that each stage which is not done will take; `step_tokens` are read in a step."""
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
    """Seconds to measure with so many prompts: to load, to compile two methods, and to decode."""
    return 3 * _PART * rates.starting + _RUNS * prompts * new_tokens / rates.alone


def _tuning_seconds(rates: Rates, new_tokens: int) -> float:
    """Seconds in which the tuner measures a few trees: to compile each, and four turns of each."""
    per_tree = _PART * rates.starting + 2 * 4 * new_tokens / rates.alone
    return _PART * rates.starting + _TREES * per_tree


def _per_written(rates: Rates, answer: int) -> float:
    """Seconds to write a token that carries loss, in answers of so many tokens."""
    return (1 + _QUESTION / answer) / rates.written + _READ / answer / rates.read


def _per_learned(rates: Rates) -> float:
    """Seconds to learn a written token."""
    return 1 / rates.read + EPOCHS / rates.trained


def is_enough(plan: FitPlan, used: float, tokens: int) -> bool:
    """Whether so many written tokens take all the time that is left to learn them.

    `used` seconds of the fit are over.
    """
    left = 60 * plan.asked.minutes - used - plan.ending - 2 * _PART * plan.rates.starting
    return tokens * _per_learned(plan.rates) >= left


def _ending(rates: Rates, seconds: float) -> float:
    """How many of the seconds are kept for the tuner and the report."""
    least = _tuning_seconds(rates, _FEWEST_NEW_TOKENS) + measuring_seconds(
        rates, _FEWEST_PROMPTS, _FEWEST_NEW_TOKENS
    )
    return max(_ENDING * seconds, least)


def make_plan(
    asked: FitRequest, spent: float, rows: int, rates: Rates, new_tokens: int, row_tokens: int
) -> FitPlan:
    """Divide the time: every token is written once, read once and trained on `EPOCHS` times.

    `spent` seconds are over. The head is measured on `new_tokens` of each prompt or fewer, and a
    row of training data has `row_tokens`.

    Raises:
      InputError: there is time for too few tokens.
    """
    per_token = _per_written(rates, _SHORTEST_ANSWER) + _per_learned(rates)

    def tokens_in(minutes: float) -> int:
        """The tokens for which there is time."""
        seconds = 60 * minutes - spent
        return int((seconds - 3 * _PART * rates.starting - _ending(rates, seconds)) / per_token)

    tokens = tokens_in(asked.minutes)
    if tokens < _FEWEST_TOKENS:
        enough = float(math.ceil(asked.minutes))
        while tokens_in(enough) < _FEWEST_TOKENS:
            enough += 1
        raise InputError(
            f"In {asked.minutes:g} minutes this device writes and learns {max(tokens, 0)} tokens, "
            f"and a head needs {_FEWEST_TOKENS} at the least; give --minutes {enough:g} or more."
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
    """The plan with as many prompts and new tokens as so many seconds allow, or the fewest."""
    for name, fewest in (("new_tokens", _FEWEST_NEW_TOKENS), ("prompts", _FEWEST_PROMPTS)):
        while plan.measuring > seconds and getattr(plan, name) > fewest:
            fewer = max(fewest, int(0.9 * getattr(plan, name)))
            plan = plan.model_copy(update={name: fewer})
    return plan


def plan_training(plan: FitPlan, tokens: int, step_tokens: int) -> FitPlan:
    """The plan with the steps for which time is left, when so many tokens are read.

    A step reads `step_tokens`.
    """
    seconds = plan.left - plan.ending - _PART * plan.rates.starting
    by_time = int(seconds * plan.rates.trained / step_tokens)
    most = max(1, _MOST_EPOCHS * tokens // step_tokens)
    return plan.model_copy(update={"steps": max(min(by_time, most), _FEWEST_STEPS)})


def plan_measuring(plan: FitPlan) -> tuple[FitPlan, float]:
    """The plan when the head is trained, and the seconds of the tuner: both share what is left."""
    plan = _shorten_measuring(plan, (1 - _TUNING) * plan.left)
    return plan, max(plan.left - plan.measuring, _tuning_seconds(plan.rates, _FEWEST_NEW_TOKENS))


class Pace:
    """How a training run keeps its time; `used` is the fit's clock, in seconds."""

    def __init__(self, plan: FitPlan, used: float) -> None:
        self._plan, self._begun = plan, used
        self._ends = 60 * plan.asked.minutes - plan.ending
        self._first: tuple[int, float] | None = None
        self._starting = 0.0

    def steps(self, step: int, used: float) -> int | None:
        """A smaller number of steps for the run, if it would be late; asked after every step."""
        if self._first is None:  # with this step it has compiled
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
        # Where nothing is left the learning rate still falls to zero, in a few steps.
        steps = step + max(left, _TIMED_STEPS)
        return steps if steps < self._plan.steps else None


def read_plan(folder: Path, asked: FitRequest) -> FitPlan | None:
    """The plan in force in this folder; None where there is none.

    Args:
      folder: the folder of the fit.
      asked: what the command asks for now.

    Raises:
      InputError: `plan.json` holds no plan, or that of a fit with other arguments.
    """
    path = folder / "plan.json"
    if not path.exists():
        return None
    try:
        plan = FitPlan.model_validate_json(path.read_bytes())
    except ValidationError:
        raise InputError(f"{path} is no plan of a fit; use another folder.") from None
    pairs = zip(FitRequest._fields, plan.asked, asked, strict=True)
    changed = [f"{name} {old} (now {new})" for name, old, new in pairs if old != new]
    if changed:
        raise InputError(
            f"{folder} holds a fit with {', '.join(changed)}; use another folder, or delete "
            "this one."
        )
    return plan


def write_plan(plan: FitPlan, folder: Path) -> None:
    """Keep the plan, whole or not at all."""
    write_atomically(folder / "plan.json", plan.model_dump_json(indent=2) + "\n")
