"""`chat`: a conversation, turn by turn, with the cache kept between its turns."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Generator
from itertools import islice

from redrafter_jax.checkpoints.huggingface import load_target_config
from redrafter_jax.commands.arguments import config_of
from redrafter_jax.commands.options import draft_of, load_models, opening_of, template_of
from redrafter_jax.commands.speed import (
    Clock,
    baseline_seconds,
    describe_cost,
    describe_speed,
    step_seconds,
)
from redrafter_jax.commands.terminal import Screen, ctrl_c_sets, open_screen, read_lines
from redrafter_jax.config import SamplingConfig, TargetConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.errors import InputError
from redrafter_jax.generation import Generation
from redrafter_jax.streaming import KeptCache, Update, stream
from redrafter_jax.text.chat_template import Turn, encode_turns, end_tokens
from redrafter_jax.text.tokenizer import load_tokenizer, require_text, split_stops

# Where the target has more: a cache for its limit may take more memory than its weights.
_CONTEXT_LENGTH = 4096
_SECONDS_PER_STATUS = 0.1

_COMMANDS = ("/reset", "/temperature", "/help", "/quit")
_HELP = """\
/reset            forget the conversation, not the system turn
/temperature X    choose at temperature X from now on; 0 takes the most likely token
/help             this
/quit             end, as Ctrl-D does
Ctrl-C stops an answer; what it said stays in the conversation. Every line is a message; one that
begins with / is typed with two."""


def run(arguments: argparse.Namespace, clock: Clock = time.perf_counter) -> None:
    """Answer every message until the input ends or /quit.

    Raises:
      InputError: an argument or a file cannot be used.
    """
    screen = open_screen(arguments.color)
    conversation = _Conversation(arguments, screen, clock)
    for line in read_lines():
        if line.strip() == "/quit":
            return
        try:
            conversation.take(line)
        except InputError as error:
            _tell(f"error: {error}")


class _Conversation:
    """The turns so far, and all that answers the next one."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen, clock: Clock) -> None:
        self._screen, self._clock = screen, clock
        draft, self._sampling = draft_of(arguments), config_of(SamplingConfig, arguments)
        self._seed = arguments.seed
        self._longest_answer = _check_limit(arguments.max_new_tokens)
        self._opening = opening_of(arguments)
        self._turns: list[Turn] = list(self._opening)
        self._context_length = _context_length(
            arguments.context_length, load_target_config(arguments.target)
        )
        self._tokenizer = load_tokenizer(arguments.target)
        ends, self._stop_strings = split_stops(self._tokenizer, arguments.stop or ())
        self._template = template_of(arguments, self._tokenizer)
        self._target, self._drafter = load_models(arguments, draft)
        self._ends = end_tokens(
            self._template,
            self._tokenizer,
            (*self._target.config.eos_token_ids, *ends),
            [[*self._opening, {"role": "user", "content": "Hello"}]],
        )
        self._kept_cache = KeptCache(self._context_length)
        self._baseline = self._compile()

    def take(self, line: str) -> None:
        """Obey a command, or answer a message.

        Raises:
          InputError: there is no such command, its value cannot be used, or the message does not
            fit; the conversation is as before.
        """
        command, _, value = line.strip().partition(" ")
        if not command.startswith("/") or command.startswith("//"):
            if command:
                require_text(line, "The message")
                self._answer(line.replace("//", "/", 1) if command.startswith("//") else line)
        elif command not in _COMMANDS:
            raise InputError(
                f"{command} is no command; /help lists them, and // begins a message with /."
            )
        elif command == "/temperature":
            self._set_temperature(value)
        elif value:
            raise InputError(f"{command} takes no value, but {value!r} was given; see /help.")
        elif command == "/reset":
            self._turns = list(self._opening)
            _tell("The conversation is forgotten.")
        else:
            _tell("\n".join(filter(None, (_HELP, self._screen.legend()))))

    def _set_temperature(self, value: str) -> None:
        try:
            temperature = float(value)
        except ValueError:
            raise InputError(
                f"/temperature takes a number such as 0.7, but {value!r} was given; it stays "
                f"{self._sampling.temperature:g}."
            ) from None
        try:
            self._sampling = dataclasses.replace(self._sampling, temperature=temperature)
        except FieldError as error:
            raise InputError(
                f"/temperature {error.problem.removesuffix('.')}; it stays "
                f"{self._sampling.temperature:g}."
            ) from None
        _tell(f"The temperature is {temperature:g}.")

    def _answer(self, message: str) -> None:
        asked = [*self._turns, {"role": "user", "content": message}]
        prompt = encode_turns(self._template, self._tokenizer, asked)
        room = self._context_length - len(prompt)
        if room < 1:
            raise InputError(
                f"With this message the conversation has {len(prompt)} tokens, but only "
                f"{self._context_length} fit, an answer included; it is not sent. Shorten it, or "
                "begin anew with /reset."
            )
        limit = min(room, self._longest_answer or room)
        started, stamps = self._clock(), []
        try:
            text, result, stopped = self._say(prompt, limit, started, stamps)
        finally:
            self._screen.end()
        seconds = self._clock() - started
        if result is None:
            _tell("Stopped before the answer began; the message is not kept.")
            return
        self._turns = [*asked, {"role": "assistant", "content": text}]
        (tokens,) = result.tokens
        _tell(
            ("stopped; " if stopped else "")
            + describe_speed(result, len(tokens) / seconds)
            + self._cost(result, stamps)
        )
        if not stopped and len(tokens) == limit and tokens[-1] not in self._ends:
            _tell(
                f"The context of {self._context_length} tokens is full; /reset begins anew."
                if limit == room
                else f"The answer ends at --max-new-tokens {limit}."
            )

    def _say(
        self, prompt: list[int], limit: int, started: float, stamps: list[float]
    ) -> tuple[str, Generation | None, bool]:
        """Write the answer as it comes: its text, its counts, and whether Ctrl-C stopped it.

        The time of every update is added to `stamps`.
        """
        said, text, result, shown = "", "", None, started
        updates = self._stream(prompt, limit)
        with ctrl_c_sets() as stop:
            try:
                for update in updates:
                    result, before = update.generation, len(text)
                    said += update.texts[0]
                    # The gap is the template's to write when it renders the answer.
                    text = said.removeprefix(self._template.gap)
                    self._screen.write(text[before:], max(1, len(update.tokens[0])))
                    now = self._clock()
                    stamps.append(now)
                    if now - shown > _SECONDS_PER_STATUS:
                        self._screen.show_status(_status(result, now - started))
                        shown = now
                    if stop.is_set():
                        break
            except KeyboardInterrupt:
                stop.set()
            finally:
                updates.close()
        return text, result, stop.is_set()

    def _stream(self, prompt: list[int], limit: int, *, ends: bool = True) -> Generator[Update]:
        return stream(
            self._target,
            self._drafter,
            [prompt],
            max_new_tokens=limit,
            sampling=self._sampling,
            seeds=[self._seed],
            eos_token_ids=self._ends if ends else (),
            detokenize=self._tokenizer.decode,
            stop_strings=self._stop_strings,
            kept_cache=self._kept_cache,
        )

    def _cost(self, result: Generation, stamps: list[float]) -> str:
        own = step_seconds(stamps)
        if own is None or self._baseline is None:
            return ""
        cost = own / self._baseline
        return "; " + describe_cost(result.acceptance_length, cost, self._drafter)

    def _compile(self) -> float | None:
        """Prefill and one step, before the first answer; the seconds of a baseline step."""
        _tell(f"Compiling for {self._context_length} tokens of conversation ...")
        for _ in islice(self._stream([0], 2, ends=False), 2):
            pass
        baseline = baseline_seconds(
            self._target,
            self._drafter,
            self._sampling,
            self._context_length,
            kept_cache=self._kept_cache,
            clock=self._clock,
        )
        _tell("Ready; /help tells what else may be typed.")
        return baseline


def _status(result: Generation, seconds: float) -> str:
    return describe_speed(result, len(result.tokens[0]) / seconds if seconds else None)


def _check_limit(limit: int | None) -> int | None:
    if limit is not None and limit < 1:
        raise InputError(f"--max-new-tokens is {limit}; it must be 1 or more.")
    return limit


def _context_length(asked: int | None, config: TargetConfig) -> int:
    most = config.position_limit
    if asked is None:
        return min(most, _CONTEXT_LENGTH)
    if not 3 <= asked <= most:
        raise InputError(
            f"--context-length is {asked}; it must be from 3 to the target's {most} positions."
        )
    return asked


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
