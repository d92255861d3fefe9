"""What `python -m eval` can be told to measure, and with which settings."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redrafter_jax.command_line import refuse_unknown_command
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings

from .acceptance import measure_acceptance
from .config import AcceptanceSettings, EvalSettings, PairSettings, ParitySettings
from .drafters import compare_drafters
from .parity import check_parity
from .plan import in_settings, plan
from .shape_config import DraftersSettings, PlanSettings, StepsSettings
from .speed import measure_speed
from .steps import measure_steps


class Command(NamedTuple):
    """What a word after `eval` stands for: what it does, with which settings, and what for."""

    measure: Callable[[Any], None]
    settings: type[Settings]
    help: str


COMMANDS = {
    "acceptance": Command(
        measure_acceptance,
        AcceptanceSettings,
        "Acceptance length over samplings and trees.",
    ),
    "drafters": Command(compare_drafters, DraftersSettings, "What drafters of other kinds cost."),
    "parity": Command(
        check_parity,
        ParitySettings,
        "Compare speculative decoding with the baseline, token for token.",
    ),
    "plan": Command(
        plan,
        PlanSettings,
        "Whether a pair fits a GPU, and bounds on the time of a step. --target (a folder or hub "
        "id; of its files config.json alone is read), --gpu, --batch and --cache are short for "
        "target=, gpu=, batch_size= and slots=. --config may be left out.",
    ),
    "steps": Command(
        measure_steps,
        StepsSettings,
        "What a decode step and its parts cost, in steps of the baseline.",
    ),
}
SPEED = Command(
    measure_speed,
    EvalSettings,
    "Measure speculative decoding against the autoregressive baseline. Other measurements are "
    f"named first: {', '.join(COMMANDS)}.",
)


def evaluate(words: Sequence[str]) -> None:
    """Do what the words of the command line say: a command's name or none, then its settings.

    Raises:
      InputError: there is no such command, or a setting, a file or a prompt cannot be used.
    """
    name = words[0] if words and words[0] in COMMANDS else ""
    if not name:
        refuse_unknown_command(words[0] if words else "", COMMANDS)
    measure, settings, purpose = COMMANDS[name] if name else SPEED
    rest = words[1:] if name else words
    measure(
        parse_settings(
            settings,
            purpose,
            in_settings(rest) if name == "plan" else rest,
            command=name,
            # What loads a pair may be one job of several processes.
            processes=issubclass(settings, PairSettings),
        )
    )
