"""`python -m redrafter_jax generate --target T --drafter D --prompt "..."`: decode a prompt."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import NoReturn

import jax

from redrafter_jax.command_line import load_tokenizer, require_text, run
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decode import Generation
from redrafter_jax.errors import InputError
from redrafter_jax.hub import load_drafter, load_target
from redrafter_jax.streaming import Update, stream


class _Parser(argparse.ArgumentParser):
    """Errors as one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help.")


def main() -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    run(_main)


def _main() -> None:
    arguments = _parse_arguments()
    try:
        generate(arguments)
    except BrokenPipeError:
        # The reader has left (`| head`); keep Python from flushing into the pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def generate(arguments: argparse.Namespace) -> None:
    """Print the text to stdout while it is decided, then the counts to stderr.

    Raises:
      InputError: a value, a file or the prompt cannot be used.
    """
    draft = DraftConfig(
        beam_width=arguments.beam_width,
        draft_rounds=arguments.draft_rounds,
        num_nodes=arguments.num_nodes,
        sharpness=arguments.sharpness,
    )
    sampling = SamplingConfig(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
    )
    tokenizer = load_tokenizer(arguments.target)
    prompt = tokenizer.encode(_read_prompt(arguments.prompt)).ids
    dtype = arguments.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    target = load_target(arguments.target, dtype)
    drafter = None if arguments.no_drafter else load_drafter(arguments.drafter, dtype)

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


def _parse_arguments() -> argparse.Namespace:
    parser = _Parser(prog="python -m redrafter_jax", description="Speculative decoding.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt: the text on stdout as it is decided, the counts on stderr.",
    )
    _add_models(command)
    _add_choices(command)
    _add_draft(command)
    return parser.parse_args()


def _add_models(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", required=True, help="folder or hub id of the target")
    drafters = command.add_mutually_exclusive_group(required=True)
    drafters.add_argument("--drafter", help="folder or hub id of a drafter trained for it")
    drafters.add_argument("--no-drafter", action="store_true", help="plain decoding")
    command.add_argument("--prompt", required=True, help="text to continue; - reads it from stdin")
    command.add_argument(
        "--max-new-tokens", type=int, default=256, help="limit on new tokens (%(default)s)"
    )
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the parameters (bfloat16 on a GPU, else float32)",
    )


def _add_choices(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("how tokens are chosen").add_argument
    add("--temperature", type=float, default=0.0, help="0 takes the most likely token (0)")
    add("--top-k", type=int, help="keep the k most likely tokens")
    add("--top-p", type=float, help="keep the most likely tokens that reach this probability")
    add("--min-p", type=float, help="drop tokens below this share of the best one's probability")
    add("--stop", action="append", metavar="STRING", help="end before this text; may be repeated")
    add("--seed", type=int, default=0, help="the same seed gives the same text (%(default)s)")


def _add_draft(command: argparse.ArgumentParser) -> None:
    width, rounds = DraftConfig.beam_width, DraftConfig.draft_rounds
    title = "how drafts are made, which changes the speed but never the text"
    add = command.add_argument_group(title).add_argument
    add("--beam-width", type=int, default=width, help="beams kept per round (%(default)s)")
    add("--draft-rounds", type=int, default=rounds, help="tokens per beam (%(default)s)")
    add("--num-nodes", type=int, help="tree nodes to verify (all of them)")
    sharpness = DraftConfig.sharpness
    add("--sharpness", type=float, default=sharpness, help="factor on draft scores (%(default)s)")


if __name__ == "__main__":
    main()
