"""The commands of `python -m eval` and their settings."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_jax.command_line import refuse_unknown_command
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings

from .compare import compare
from .config import (
    CompareSettings,
    ParitySettings,
    ServeLoadSettings,
    TargetSettings,
    TuneSettings,
)
from .mirror import MirrorSettings, measure_mirror
from .parity import check_parity
from .plan import plan
from .serve_load import measure_load
from .shapes import PlanSettings, StepsSettings
from .steps import measure_steps
from .tune import tune


class Command(NamedTuple):
    """What a word after `eval` stands for; see `parse_settings` for `flags` and `config`."""

    measure: Callable[[Any], None]
    settings: type[Settings]
    help: str
    flags: Mapping[str, str] | None = None
    config: Path | None = None


COMMANDS = {
    "compare": Command(
        compare,
        CompareSettings,
        "Ways of drafting beside the autoregressive baseline: speed-up, acceptance length, equal "
        "texts. The name of this command may be left out.",
    ),
    "mirror": Command(
        measure_mirror,
        MirrorSettings,
        "Drafting while the target verifies: how often a tree is ready, and what a step takes.",
    ),
    "parity": Command(
        check_parity,
        ParitySettings,
        "Compare speculative decoding with the baseline, token for token.",
    ),
    "plan": Command(
        plan,
        PlanSettings,
        "Whether a pair fits a GPU, and bounds on the time of a step. The target is a folder or "
        "hub id, of whose files config.json alone is read. --config may be left out.",
        {"--target": "target", "--gpu": "gpu", "--batch": "batch_size", "--cache": "slots"},
        Path(__file__).with_name("plan.yaml"),
    ),
    "serve-load": Command(
        measure_load,
        ServeLoadSettings,
        "How long the answers of a running server take, by requests per second.",
    ),
    "steps": Command(
        measure_steps,
        StepsSettings,
        "What a decode step and its parts cost, in steps of the baseline.",
    ),
    "tune": Command(
        tune,
        TuneSettings,
        "The fastest tree for each batch size and temperature, written to the drafter's folder.",
    ),
}
DEFAULT = "compare"


def evaluate(words: Sequence[str]) -> None:
    """Run a command from the words of the command line: its name or none, then its settings.

    Raises:
      InputError: there is no such command, or a setting, a file or a prompt cannot be used.
    """
    name = words[0] if words else ""
    if name not in COMMANDS:
        refuse_unknown_command(name, COMMANDS)
        words, name = [DEFAULT, *words], DEFAULT
    command = COMMANDS[name]
    settings = parse_settings(
        command.settings,
        command.help,
        words[1:],
        command=name,
        # What loads a pair may be one job of several processes.
        processes=issubclass(command.settings, TargetSettings),
        flags=command.flags,
        config=command.config,
    )
    command.measure(settings)
