"""The sizes of a fit, from the given time and the speed of the device."""

import math
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from redrafter_jax.checkpoints.config_files import write_atomically
from redrafter_jax.config import Dtype
from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import Settings

from .probe import Rates

# Passes over the target's own words. With fewer a head learns less from the same tokens.
EPOCHS = 4
# Shares of the time: to start and compile four commands, and to measure at the end.
_STARTING, _MEASURING = 0.10, 0.12
# With fewer tokens a head learns hardly more than its initial head knows.
_FEWEST_TOKENS = 4096
# Prompts that the finished head is measured with: at most so many, and one for each so many written
# tokens, so that few of them are held out.
_MOST_PROMPTS, _TOKENS_PER_PROMPT = 24, 2048
# Per prompt: the baseline, the head, and the head with lookup, each at two temperatures.
_RUNS = 6


class FitRequest(NamedTuple):
    """What a fit is asked for: a target, the dtype of its parameters, how many minutes."""

    target: str
    target_dtype: Dtype
    minutes: float


class FitPlan(Settings):
    """Sizes that are decided once, so that a killed run ends as it would have without the kill.

    Attributes:
      asked: the request that it is for.
      rows: written together by the target.
      tokens: to be written by the target, counting those that carry loss.
      prompts: held out of these texts, to measure the head with.
      new_tokens: of each prompt when the head is measured.
      seconds: expected for each stage.
    """

    asked: FitRequest
    rows: int
    tokens: int
    prompts: int
    new_tokens: int
    seconds: dict[str, float]


def make_plan(asked: FitRequest, spent: float, rows: int, rates: Rates, new_tokens: int) -> FitPlan:
    """Divide the time: every token is written once, read once and trained on `EPOCHS` times.

    `spent` of the minutes are over. The head is measured on `new_tokens` of each prompt.

    Raises:
      InputError: there is time for too few tokens.
    """
    seconds = 60 * max(asked.minutes - spent, 0.0)
    measuring = _MEASURING * seconds
    per_token = 1 / rates.written + 1 / rates.read + EPOCHS / rates.trained
    share = 1 - _STARTING - _MEASURING
    tokens = int(seconds * share / per_token)
    if tokens < _FEWEST_TOKENS:
        needed = spent + _FEWEST_TOKENS * per_token / share / 60
        raise InputError(
            f"In {asked.minutes:g} minutes this device writes and learns {tokens} tokens, and "
            f"{_FEWEST_TOKENS} are needed; give --minutes {math.ceil(needed)} or more."
        )
    prompts = int(measuring * rates.alone / (_RUNS * new_tokens))
    prompts = max(min(prompts, _MOST_PROMPTS, tokens // _TOKENS_PER_PROMPT), 2)
    return FitPlan(
        asked=asked,
        rows=rows,
        tokens=tokens,
        prompts=prompts,
        new_tokens=new_tokens,
        seconds={
            "write": tokens / rates.written,
            "read": tokens / rates.read,
            "train": tokens * EPOCHS / rates.trained,
            "measure": measuring,
        },
    )


def read_plan(folder: Path, asked: FitRequest) -> FitPlan | None:
    """The plan that a run in this folder began with; None where there is none.

    Raises:
      InputError: it cannot be read, or is of another run.
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
            f"{folder} holds a fit with {', '.join(changed)}; use another folder or remove that "
            "one."
        )
    return plan


def write_plan(plan: FitPlan, folder: Path) -> None:
    """Keep the plan, whole or not at all."""
    write_atomically(folder / "plan.json", plan.model_dump_json(indent=2) + "\n")
