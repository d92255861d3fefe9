"""Command-line arguments of the form `--config FILE key.path=value ...`."""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter_jax.command_line import Parser, add_processes, program_name
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import join
from redrafter_jax.settings.files import SettingsT, dump_settings, load_settings
from redrafter_jax.settings.help import describe_settings


def parse_settings(
    model: type[SettingsT],
    description: str,
    arguments: Sequence[str] | None = None,
    *,
    command: str = "",
    processes: bool = False,
    flags: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> SettingsT:
    """Parse settings from arguments such as `--config FILE key.path=value ...`.

    With `--print-config`, the resolved settings are printed and the program exits.

    Args:
      model: the class of the settings.
      description: the command's description in its help.
      arguments: the command-line arguments; None takes those of the Python process.
      command: the command's name in the help, if its program has several commands.
      processes: whether several processes may run the command as one job; if so, they connect to
        each other in this call.
      flags: short options, such as --name, with the setting that each stands for.
      config: default of `--config`; None makes the option required.

    Raises:
      InputError: the file cannot be read, or values are not valid; the error lists all problems.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog=program_name(command),
        description=textwrap.fill(description, 80),
        epilog=describe_settings(model),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", required=config is None, default=config, type=Path, help="YAML file"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a setting")
    parser.set_defaults(flags=[])
    for flag, setting in (flags or {}).items():
        options: dict[str, Any] = {"metavar": setting.upper(), "help": f"short for {setting}="}
        options |= {"dest": "flags", "action": "append", "type": f"{setting}={{}}".format}
        parser.add_argument(flag, default=[], **options)
    if processes:
        add_processes(parser)
    if unknown := parser.unknown_option(words):
        if parser.meant_option(unknown):
            parser.refuse_mistyped([unknown])
        raise InputError(_as_override(unknown, words))
    parsed = parser.parse_intermixed_args(words)
    settings = load_settings(model, parsed.config, parsed.overrides + parsed.flags)
    if parsed.print_config:
        print(dump_settings(settings), end="")
        sys.exit(0)
    if processes:
        join(parsed.coordinator_address, parsed.num_processes, parsed.process_id)
    return settings


def _as_override(option: str, words: Sequence[str]) -> str:
    """The error for an unknown option, which shows how the option is written as a setting."""
    key, assigned, value = option.lstrip("-").partition("=")
    following = words[words.index(option) + 1 :]
    if not assigned:
        value = following[0] if following else "value"
    setting = f"{key.replace('-', '_')}={value}"
    return f"{option} is not an option; write settings without dashes: {setting}"
