"""`generate`: the text that continues a prompt, while it is decided."""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tokenizers import Tokenizer

from redrafter_jax.checkpoints.huggingface import load_target_config
from redrafter_jax.commands.options import (
    add_choices,
    add_draft,
    add_models,
    add_template,
    draft_of,
    load_models,
    opening_of,
    refuse_idle_filters,
    sampling_of,
    template_of,
)
from redrafter_jax.commands.terminal import describe_speed
from redrafter_jax.errors import InputError
from redrafter_jax.generate import Generation
from redrafter_jax.streaming import Update, stream
from redrafter_jax.text.chat_template import ChatTemplate, Turn, encode_turns, end_tokens
from redrafter_jax.text.tokenizer import load_tokenizer, require_text


def add(commands: Any) -> None:
    """State the command's arguments, to the parser's `add_subparsers()`."""
    command = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt: the text on stdout as it is decided, the counts on stderr.",
    )
    command.set_defaults(run=generate)
    add_models(command)
    command.add_argument("--prompt", required=True, help="text to continue; - reads it from stdin")
    command.add_argument(
        "--max-new-tokens", type=int, default=256, help="limit on new tokens (%(default)s)"
    )
    command.add_argument(
        "--chat", action="store_true", help="the prompt is a message: write it as the template does"
    )
    add_template(command)
    add_choices(command)
    add_draft(command)


def generate(arguments: argparse.Namespace) -> None:
    """Print the text to stdout while it is decided, then the counts to stderr.

    Raises:
      InputError: a value, a file or the prompt cannot be used.
    """
    draft, sampling = draft_of(arguments), sampling_of(arguments)
    refuse_idle_filters(arguments)
    load_target_config(arguments.target)  # a folder of another kind is told as that
    tokenizer = load_tokenizer(arguments.target)
    text = _read_prompt(arguments.prompt)
    template, turns = _conversation_of(arguments, tokenizer, text)
    prompt = encode_turns(template, tokenizer, turns) if template else tokenizer.encode(text).ids
    target, drafter = load_models(arguments)
    stops = target.config.eos_token_ids
    if template:
        stops = end_tokens(template, tokenizer, stops, [turns])

    def start() -> Iterator[Update]:
        return stream(
            target,
            drafter,
            [prompt],
            max_new_tokens=arguments.max_new_tokens,
            draft=draft,
            sampling=sampling,
            seeds=[arguments.seed],
            eos_token_ids=stops,
            detokenize=tokenizer.decode,
            stop_strings=arguments.stop or (),
        )

    # Prefill and one step compile everything, so that the clock sees decoding alone.
    if sys.stderr.isatty():
        print("Compiling ...", file=sys.stderr)
    for _ in islice(start(), 2):
        pass
    started = time.perf_counter()
    result = _print_stream(start(), template.gap if template else "")
    seconds = time.perf_counter() - started
    print(describe_speed(result, seconds), file=sys.stderr)


def _print_stream(updates: Iterator[Update], gap: str) -> Generation:
    """Print every piece of row 0 at once; all of it but the gap that an answer begins with."""
    update, begun = None, False
    for update in updates:
        piece = update.texts[0]
        print(piece if begun else piece.removeprefix(gap), end="", flush=True)
        begun = begun or bool(piece)
    print(flush=True)
    assert update is not None, "a stream yields the tokens of prefill at least"
    return update.generation


def _conversation_of(
    arguments: argparse.Namespace, tokenizer: Tokenizer, text: str
) -> tuple[ChatTemplate | None, list[Turn]]:
    """With --chat the template and the turns of the prompt; nothing without."""
    if arguments.chat:
        turns = [*opening_of(arguments), {"role": "user", "content": text}]
        return template_of(arguments, tokenizer), turns
    for name in ("chat_template", "system"):
        if getattr(arguments, name) is not None:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} is for conversations; give --chat too, or leave it out.")
    return None, []


def _read_prompt(argument: str) -> str:
    try:
        prompt = argument
        if argument == "-":  # there is no stdin where whoever started the program closed it
            prompt = sys.stdin.read() if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt on stdin is not UTF-8 text at byte {error.start}.") from None
    if not prompt:
        raise InputError("The prompt is empty; it needs at least one character.")
    require_text(prompt, "The prompt")
    return prompt
