"""Options that several commands share, and the types of their values.

Types, defaults and help of the decoding options come from the library's configurations.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from redrafter_jax.config import Dtype, MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.config.limits import (
    BYTES,
    Checked,
    FieldError,
    field_docs,
    main_type,
    parse_annotation,
    unmet,
)
from redrafter_jax.errors import InputError

# Prefix of the options of `MirrorConfig`.
MIRROR = "mirror_"


def add_models(command: argparse.ArgumentParser) -> None:
    """Add the options that name the target and its drafter, and how they are loaded."""
    command.add_argument(
        "--target",
        help="folder, GGUF file or hub id of the target; by default SmolLM2-135M-Instruct, which "
        "`redrafter fetch` downloads, with --no-drafter unless --drafter is given",
    )
    drafters = command.add_mutually_exclusive_group()
    drafters.add_argument(
        "--drafter",
        help="folder or hub id of a drafter trained for the target; folder, GGUF file or hub id of "
        "a smaller model with the same vocabulary; or self:int4 (also int8 and fp8) for a "
        "quantized copy of the target, or self:layers=N for the target's first N layers",
    )
    drafters.add_argument(
        "--no-drafter",
        action="store_true",
        help="decode without a drafter: autoregressively, or with --lookup-tokens by prompt lookup "
        "alone",
    )
    command.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="dtype of the parameters (bfloat16 on a GPU, otherwise float32)",
    )
    command.add_argument(
        "--mesh-model",
        type=int,
        default=1,
        metavar="N",
        help="number of devices over which the weights are split (%(default)s)",
    )


def add_template_name(command: argparse.ArgumentParser, *, or_none: bool = False) -> None:
    """Add the option that names the chat template; with `or_none`, "none" is allowed too."""
    command.add_argument(
        "--chat-template",
        metavar="NAME",
        help="template that turns a conversation into text: the tokenizer's own (the default), a "
        "Jinja file, or a built-in one: chatml, gemma, llama2, llama3, mistral, mistral_v0.1, "
        "vicuna_v1.1, zephyr" + "; none continues prompts as they are" * or_none,
    )


def add_template(command: argparse.ArgumentParser, *, or_none: bool = False) -> None:
    """Add the options that choose the chat template.

    With `or_none`, "none" is a choice too: prompts are then plain text.
    """
    add_template_name(command, or_none=or_none)
    command.add_argument(
        "--template-arguments",
        type=mapping("{enable_thinking: false}"),
        metavar="MAPPING",
        help="further variables of the template, in YAML, such as '{enable_thinking: false}'",
    )
    command.add_argument("--system", metavar="TEXT", help="system message before the first turn")


def _biases(text: str) -> dict[int, float]:
    """Parse the value of an option that maps token ids to numbers."""
    given = mapping("{42: -100}")(text)
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is given; it must map token ids to numbers, such as {{42: -100}}"
        ) from None


def mapping(example: str) -> Callable[[str], dict[Any, Any]]:
    """Return the parser of an option whose value is a mapping in YAML; errors show `example`."""

    def read(text: str) -> dict[Any, Any]:
        # Importing YAML takes 20 ms, and few commands need it.
        from redrafter_jax.files.yaml_text import NotYamlError, parse_yaml

        value, why = None, ""
        try:
            value = parse_yaml(text)
        except NotYamlError as error:
            why = f" ({error})"
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} is given; it must be a mapping such as {example}{why}"
            )
        return value

    return read


def add_decoding(command: argparse.ArgumentParser) -> None:
    """Add the options that choose tokens, and those of `add_tree`."""
    group = command.add_argument_group("how tokens are chosen")
    add_fields(group, SamplingConfig)
    group.add_argument(
        "--stop",
        action="append",
        type=not_empty("the text is empty; leave it out"),
        metavar="STRING",
        help="end the text before this string; may be repeated",
    )
    held = group.add_mutually_exclusive_group()
    held.add_argument(
        "--json-schema",
        type=Path,
        metavar="FILE",
        help="constrain the text to JSON that matches this JSON Schema",
    )
    held.add_argument(
        "--regex", metavar="PATTERN", help="constrain the text to this regular expression"
    )
    held.add_argument(
        "--ignore-eos",
        action="store_true",
        help="continue past end-of-text tokens up to the limit of new tokens, or to --stop",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text (%(default)s)"
    )
    add_tree(command)


def add_tree(command: argparse.ArgumentParser) -> None:
    """Add the options for the shape of the trees, and for decoding without drafts."""
    title = "how drafts are made, which changes the speed but never the text"
    text = "Without these options the tree comes from the drafter's draft.yaml, if it has one."
    group = command.add_argument_group(title, text)
    add_fields(group, TreeConfig)
    group.add_argument(
        "--adaptive",
        choices=("on", "off"),
        help="decode without drafts while a tree gains less than it costs (on, unless an option "
        "above sets the tree, or --mirror-layer is given)",
    )
    title = "drafting while the target verifies, which --mirror-layer turns on"
    add_fields(command.add_argument_group(title), MirrorConfig, MIRROR)


def add_fields(group: Any, config: type, prefix: str = "") -> None:
    """Add an option for each field of a configuration; the default of every option is None.

    The names of the options begin with `prefix`.
    """
    texts = field_docs(config)
    for field in fields(config):
        text = texts.get(field.name, "").replace("%", "%%")
        kind, option = main_type(field.type), option_of(prefix + field.name)
        if get_origin(kind) is dict:
            group.add_argument(option, type=_biases, metavar="MAPPING", help=text)
            continue
        if kind is bool:
            group.add_argument(option, action="store_true", default=None, help=text)
            continue
        shown = "" if field.default in (None, MISSING) else f" ({field.default})"
        read = size if BYTES in parse_annotation(field.type)[1] else kind
        group.add_argument(option, type=read, help=text + shown)


def limited(annotation: Any) -> Callable[[str], Any]:
    """Return the parser of an option whose value is a number with limits, such as `Count`."""
    (kind,), limits = parse_annotation(annotation)

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = text
        if needed := unmet(value, [kind], limits):
            raise argparse.ArgumentTypeError(f"{text} is given; it must be {needed}")
        return value

    return read


_UNITS = ["", "K", "M", "G", "T"]


def size(text: str) -> int:
    """Parse a size and return its bytes: 40GB is 40 * 1000^3, and 40GiB is 40 * 1024^3."""
    stated = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(I?)B?", text.strip().upper())
    if stated is None:
        raise argparse.ArgumentTypeError(f"{text} is given; it must be a size such as 40GB")
    number, unit, binary = stated.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS.index(unit))


def not_empty(problem: str) -> Callable[[str], str]:
    """Return the parser of an option whose value is a text; an empty text raises `problem`."""

    def read(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError(problem)
        return text

    return read


def option_of(field: str) -> str:
    """Return the option that sets a field, such as "--beam-width" for "beam_width"."""
    return "--" + field.replace("_", "-")


def given_options(config: type, arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """Return the fields whose options are given on the command line, with the given values."""
    values = {field.name: getattr(arguments, prefix + field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def config_of[Config: Checked](
    config: type[Config],
    arguments: argparse.Namespace,
    default: Config | None = None,
    prefix: str = "",
) -> Config:
    """Build a configuration from its options; other fields come from `default` or from the class.

    Raises:
      InputError: a value is outside its limits; the error names the option.
    """
    given = given_options(config, arguments, prefix)
    try:
        return config(**given) if default is None else replace(default, **given)
    except FieldError as error:
        raise InputError(f"{option_of(prefix + error.field)} {error.problem}") from None
