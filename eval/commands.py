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
    """A command of `eval`.

    Attributes:
      measure: function that runs the command with its settings.
      settings: class of the settings.
      help: description in `--help`.
      flags: options such as `--target`, each with the setting that it sets; None for no options.
      config: settings file if `--config` is not given; None if `--config` is required.
    """

    measure: Callable[[Any], None]
    settings: type[Settings]
    help: str
    flags: Mapping[str, str] | None = None
    config: Path | None = None


COMMANDS = {
    "compare": Command(
        compare,
        CompareSettings,
        "Compare drafting methods with the autoregressive baseline: speed-up, acceptance length "
        "and equality of texts. This is the default command.",
    ),
    "mirror": Command(
        measure_mirror,
        MirrorSettings,
        "Measure drafting while the target verifies: how often a tree is ready, and step times.",
    ),
    "parity": Command(
        check_parity,
        ParitySettings,
        "Compare speculative decoding with the baseline, token for token.",
    ),
    "plan": Command(
        plan,
        PlanSettings,
        "Compute whether target and drafter fit a GPU, and lower bounds on step times. The target "
        "is a folder or hub id, of which only config.json is read. --config is optional.",
        {"--target": "target", "--gpu": "gpu", "--batch": "batch_size", "--cache": "slots"},
        Path(__file__).with_name("plan.yaml"),
    ),
    "serve-load": Command(
        measure_load,
        ServeLoadSettings,
        "Measure how long a running server takes to answer at different request rates.",
    ),
    "steps": Command(
        measure_steps,
        StepsSettings,
        "Measure the cost of a decode step and its parts, in steps of the baseline, autoregressive "
        "decoding.",
    ),
    "tune": Command(
        tune,
        TuneSettings,
        "Find the fastest tree for each batch size and temperature, and write it to the drafter's "
        "folder.",
    ),
}
DEFAULT = "compare"


def evaluate(words: Sequence[str]) -> None:
    """Run the command that the first argument names, or `compare` if it names none.

    `words` are the command-line arguments: the name and the settings.

    Raises:
      InputError: the command does not exist, or a setting, a file or a prompt cannot be used.
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
        # Commands that load a pair may run as several processes.
        processes=issubclass(command.settings, TargetSettings),
        flags=command.flags,
        config=command.config,
    )
    command.measure(settings)
