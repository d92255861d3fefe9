"""`generate`: the text that continues a prompt, while it is decided."""

import argparse
import sys
import time
from collections.abc import Iterator

from redrafter_jax.commands.batch import continue_file
from redrafter_jax.commands.option_groups import config_of, option_of
from redrafter_jax.commands.options import open_session
from redrafter_jax.commands.speed import (
    baseline_seconds,
    describe_cost,
    describe_speed,
    step_seconds,
)
from redrafter_jax.commands.terminal import tell, visible
from redrafter_jax.config import SamplingConfig
from redrafter_jax.errors import InputError
from redrafter_jax.generation import Generation
from redrafter_jax.streaming import Update
from redrafter_jax.text.tokenizer import require_text


def run(arguments: argparse.Namespace) -> None:
    """Print the text to stdout while it is decided, then the counts to stderr.

    Raises:
      InputError: a value, a file or the prompt cannot be used.
    """
    sampling = config_of(SamplingConfig, arguments).refuse_idle_filters(option_of)
    if arguments.prompts is not None:
        continue_file(arguments)
        return
    for name in ("output", "batch_size"):
        if getattr(arguments, name) is not None:
            raise InputError(f"{option_of(name)} is for --prompts; give that, or leave it out.")
    text = _read_prompt(arguments.prompt)
    session = open_session(arguments, [text])
    prompt = session.encode(text)
    updates = session.stream([prompt], arguments.max_new_tokens, [arguments.seed])
    if sys.stderr.isatty():
        tell("Compiling ...")
    result, stamps, first = _print_stream(updates, session.template.gap)
    # The first step compiles; what follows is decoding alone.
    seconds = stamps[-1] - stamps[0] if len(stamps) > 1 else 0
    tell(describe_speed(result, (len(result.tokens[0]) - first) / seconds if seconds else None))
    if own := step_seconds(stamps):
        room = len(prompt) + arguments.max_new_tokens
        baseline = baseline_seconds(session.target, session.drafter, prompt, sampling, room)
        if baseline:
            tell(describe_cost(result.acceptance_length, own / baseline, session.drafter))


def _print_stream(updates: Iterator[Update], gap: str) -> tuple[Generation, list[float], int]:
    """Print every piece of row 0 at once; all of it but the gap that an answer begins with.

    Returns:
      The whole; the time after each step that compiles nothing and before the first of them; and
      the tokens that were decided until then.
    """
    show = visible if sys.stdout.isatty() else str
    update, begun, stamps, first = None, False, [], 0
    for count, update in enumerate(updates):
        piece = update.texts[0]
        print(show(piece if begun else piece.removeprefix(gap)), end="", flush=True)
        begun = begun or bool(piece)
        if count == 1:
            first = len(update.generation.tokens[0])
        if count:
            stamps.append(time.perf_counter())
    print(flush=True)
    assert update is not None, "a stream yields the tokens of prefill at least"
    return update.generation, stamps, first


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
