"""`generate`: the text that continues a prompt, while it is decided."""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from redrafter_jax.command_line import load_tokenizer, require_text
from redrafter_jax.commands.options import (
    add_choices,
    add_draft,
    add_models,
    draft_of,
    load_models,
    sampling_of,
)
from redrafter_jax.decode import Generation
from redrafter_jax.errors import InputError
from redrafter_jax.streaming import Update, stream


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
    add_choices(command)
    add_draft(command)


def generate(arguments: argparse.Namespace) -> None:
    """Print the text to stdout while it is decided, then the counts to stderr.

    Raises:
      InputError: a value, a file or the prompt cannot be used.
    """
    draft, sampling = draft_of(arguments), sampling_of(arguments)
    tokenizer = load_tokenizer(arguments.target)
    prompt = tokenizer.encode(_read_prompt(arguments.prompt)).ids
    target, drafter = load_models(arguments)

    def start() -> Iterator[Update]:
        return stream(
            target,
            drafter,
            [prompt],
            max_new_tokens=arguments.max_new_tokens,
            draft=draft,
            sampling=sampling,
            seeds=[arguments.seed],
            detokenize=tokenizer.decode,
            stop_strings=arguments.stop or (),
        )

    # Prefill and one step compile everything, so that the clock sees decoding alone.
    for _ in islice(start(), 2):
        pass
    started = time.perf_counter()
    result = _print_stream(start())
    seconds = time.perf_counter() - started
    count = len(result.tokens[0])
    print(
        f"acceptance length {result.acceptance_length:.2f}, {result.steps[0]} target calls after "
        f"prefill, {count} tokens, {count / seconds:.1f} tokens/s",
        file=sys.stderr,
    )


def _print_stream(updates: Iterator[Update]) -> Generation:
    """Print every piece of row 0 at once; all of it."""
    update = None
    for update in updates:
        print(update.texts[0], end="", flush=True)
    print(flush=True)
    assert update is not None, "a stream yields the tokens of prefill at least"
    return update.generation


def _read_prompt(argument: str) -> str:
    try:
        prompt = sys.stdin.read() if argument == "-" else argument
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt on stdin is not UTF-8 text at byte {error.start}.") from None
    if not prompt:
        raise InputError("The prompt is empty; it needs at least one character.")
    require_text(prompt, "The prompt")
    return prompt
