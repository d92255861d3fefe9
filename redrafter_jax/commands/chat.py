"""`chat`: a conversation, turn by turn, with the cache kept between its turns."""

import argparse
import dataclasses
import time
from itertools import islice

from redrafter_jax.checkpoints.huggingface import load_target_config
from redrafter_jax.commands.options import context_length, open_session
from redrafter_jax.commands.speed import (
    baseline_seconds,
    describe_cost,
    describe_speed,
    show_stream,
    update_seconds,
)
from redrafter_jax.commands.terminal import Screen, ctrl_c_event, log, read_lines
from redrafter_jax.config.limits import FieldError
from redrafter_jax.errors import InputError
from redrafter_jax.streaming import KeptCache
from redrafter_jax.text.chat_template import user_turn
from redrafter_jax.text.tokenizer import require_text

_COMMANDS = ("/reset", "/temperature", "/help", "/quit")
_HELP = """\
/reset            forget the conversation, not the system turn
/temperature X    choose at temperature X from now on; 0 takes the most likely token
/help             this
/quit             end, as Ctrl-D does
Ctrl-C stops an answer; what it said stays in the conversation. Every line is a message; one that
begins with / is typed with two."""


def run(arguments: argparse.Namespace) -> None:
    """Answer every message until the input ends or /quit.

    Raises:
      InputError: an argument or a file cannot be used.
    """
    conversation = _Conversation(arguments)
    for line in read_lines():
        if line.strip() == "/quit":
            return
        try:
            conversation.handle(line)
        except InputError as error:
            log(f"error: {error}")


class _Conversation:
    """The turns so far, and all that answers the next one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._screen = Screen(arguments.color)
        self._seed, self._longest_answer = arguments.seed, arguments.max_new_tokens
        most = load_target_config(arguments.target).position_limit
        self._context_length = context_length(arguments, most)
        if not 3 <= self._context_length <= most:
            raise InputError(
                f"--context-length is {self._context_length}; it must be from 3 to the target's "
                f"{most} positions."
            )
        self._session = open_session(arguments, ["Hello"])
        self._turns = list(self._session.format.opening)
        self._kept_cache = KeptCache(self._context_length)
        self._baseline = self._compile()

    def handle(self, line: str) -> None:
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
            self._turns = list(self._session.format.opening)
            log("The conversation is forgotten.")
        else:
            log("\n".join(filter(None, (_HELP, self._screen.legend()))))

    def _set_temperature(self, value: str) -> None:
        sampling = self._session.sampling
        stays = f"it stays {sampling.temperature:g}."
        try:
            sampling = dataclasses.replace(sampling, temperature=float(value))
        except FieldError as error:
            problem = error.problem.removesuffix(".")
            raise InputError(f"/temperature {problem}; {stays}") from None
        except ValueError:
            raise InputError(
                f"/temperature takes a number such as 0.7, but {value!r} was given; {stays}"
            ) from None
        self._session = self._session._replace(sampling=sampling)
        log(f"The temperature is {sampling.temperature:g}.")

    def _answer(self, message: str) -> None:
        turns = [*self._turns, user_turn(message)]
        prompt = self._session.format.encode(turns)
        room = self._context_length - len(prompt)
        if room < 1:
            raise InputError(
                f"With this message the conversation has {len(prompt)} tokens, but only "
                f"{self._context_length} fit, an answer included; it was not sent. Shorten it, or "
                "begin anew with /reset."
            )
        limit = min(room, self._longest_answer or room)
        started = time.perf_counter()
        updates = self._session.stream([prompt], limit, [self._seed], kept_cache=self._kept_cache)
        with ctrl_c_event() as stop:
            text, update, stamps, _ = show_stream(
                updates, self._session.format.template.gap, self._screen, stop
            )
        seconds = time.perf_counter() - started
        if update is None:
            log("Stopped before the answer began; the message is not kept.")
            return
        self._turns = [*turns, {"role": "assistant", "content": text}]
        result, stopped = update.generation, stop.is_set()
        (tokens,) = result.tokens
        summary = ("stopped; " if stopped else "") + describe_speed(result, len(tokens) / seconds)
        own = update_seconds(stamps)
        if own and self._baseline:
            cost = own / self._baseline
            summary += "; " + describe_cost(result.acceptance_length, cost, self._session.drafter)
        log(summary)
        ended = update.stopped[0] or tokens[-1] in self._session.format.stop_tokens
        if not stopped and len(tokens) == limit and not ended:
            log(
                f"The context of {self._context_length} tokens is full; /reset begins anew."
                if limit == room
                else f"The answer ends at --max-new-tokens {limit}."
            )

    def _compile(self) -> float | None:
        """Prefill and one step, before the first answer; the seconds of a baseline step."""
        log(f"Compiling for {self._context_length} tokens of conversation ...")
        endless = self._session.format._replace(stop_tokens=())
        session, cache = self._session._replace(format=endless), self._kept_cache
        for _ in islice(session.stream([[0]], 2, [self._seed], kept_cache=cache), 2):
            pass
        baseline = baseline_seconds(session, [0], self._context_length, 1, cache)
        log("Ready; /help tells what else may be typed.")
        return baseline
