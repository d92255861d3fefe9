"""`generate`: continues a prompt and streams the text."""

import argparse
import sys

from redrafter_jax.commands.option_groups import config_of, option_of
from redrafter_jax.commands.options import open_decoder
from redrafter_jax.commands.speed import (
    baseline_seconds,
    describe_cost,
    describe_shortly,
    describe_speed,
    show_stream,
    update_seconds,
)
from redrafter_jax.commands.terminal import Screen, log
from redrafter_jax.config import SamplingConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.text.tokenizer import require_text

# Decode steps per update of the screen; each update waits for the device once.
_STEPS_PER_UPDATE = 4


def run(arguments: argparse.Namespace) -> None:
    """Stream the text to stdout, then print statistics to stderr.

    On a terminal the statistics are one short line, unless `--verbose` is given.

    Raises:
      InputError: a value, a file or the prompt cannot be used.
    """
    config_of(SamplingConfig, arguments).refuse_idle_filters(option_of)
    if arguments.prompts is not None:
        from redrafter_jax.commands.batch import continue_file

        continue_file(arguments)
        return
    for name in ("output", "batch_size"):
        if getattr(arguments, name) is not None:
            option = option_of(name)
            raise InputError(f"{option} is for --prompts; give both, or leave {option} out.")
    text = _read_prompt(arguments.prompt)
    decoder = open_decoder(arguments, open_target(arguments.target), [text])
    prompt = decoder.format.encode_text(text)
    if sys.stderr.isatty():
        log("Compiling ...")
    steps = decoder.steps_per_update(_STEPS_PER_UPDATE)
    updates = decoder.stream(
        [prompt], arguments.max_new_tokens, [arguments.seed], steps_per_yield=steps
    )
    _, update, stamps, counts = show_stream(updates, decoder.format.template.gap, Screen("never"))
    assert update is not None, "a stream yields the tokens of prefill at least"
    result = update.generation
    # The first two updates, prefill and the first decode steps, compile; leave both out.
    rate = (counts[-1] - counts[1]) / (stamps[-1] - stamps[1]) if len(stamps) > 2 else None
    own = update_seconds(stamps[1:])
    room = len(prompt) + arguments.max_new_tokens
    baseline = baseline_seconds(decoder, prompt, room, steps) if own else None
    cost = own / baseline if own and baseline else None
    if not arguments.verbose and sys.stderr.isatty():
        log(describe_shortly(result, rate, cost))
        return
    log(describe_speed(result, rate))
    if cost is not None:
        log(describe_cost(result, cost))


def _read_prompt(argument: str) -> str:
    try:
        prompt = argument
        if argument == "-":  # sys.stdin is None if the parent process closed it
            prompt = sys.stdin.read() if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise InputError(
            f"The prompt on stdin is not UTF-8 text at byte {error.start}; convert it to UTF-8."
        ) from None
    if not prompt:
        raise InputError("The prompt is empty; it needs at least one character.")
    require_text(prompt, "The prompt")
    return prompt
