"""`chat`: holds a conversation with the target, and keeps the cache between turns."""

import argparse
import dataclasses
import json
from itertools import islice
from pathlib import Path

from redrafter_jax.commands.options import open_decoder
from redrafter_jax.commands.speed import (
    baseline_seconds,
    describe_cost,
    describe_speed,
    show_stream,
    update_seconds,
)
from redrafter_jax.commands.terminal import Screen, ctrl_c_event, log, read_messages
from redrafter_jax.config.limits import FieldError
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import write_atomically
from redrafter_jax.files.target_files import open_target
from redrafter_jax.streaming import KeptCache
from redrafter_jax.text.chat_template import Turn, user_turn
from redrafter_jax.text.tokenizer import require_text

# Default limit on the tokens of a conversation; the cache is allocated for all tokens at once.
_CONTEXT_LENGTH = 4096
# The commands, each with the name of its value, if it takes one.
_COMMANDS = {
    "/system": "TEXT",
    "/temperature": "X",
    "/retry": "",
    "/save": "FILE",
    "/reset": "",
    "/help": "",
    "/quit": "",
}
_HELP = """\
/system TEXT      set the system message; - removes it, and /system alone shows it
/temperature X    set the sampling temperature; 0 takes the most likely token
/retry            answer the last message again, with the next seed
/save FILE        write the conversation as a line of JSON
/reset            forget the conversation, but keep the system message
/help             show this help
/quit             end, as Ctrl-D does
Ctrl-C stops an answer and keeps its text in the conversation. Every line is a message, and pasted
text is one message; Alt-Enter starts a new line within a message. Type // if a message begins with
a slash."""
_SEEDS = 2**31
# Decode steps between two updates.
_STEPS_PER_UPDATE = 2


def run(arguments: argparse.Namespace) -> None:
    """Answer every message until the input ends or /quit.

    Raises:
      InputError: an argument or a file cannot be used.
    """
    conversation = _Conversation(arguments)
    for message in read_messages():
        if message.strip() == "/quit":
            return
        try:
            conversation.handle(message)
        except InputError as error:
            log(f"error: {error}")


class _Conversation:
    """The turns so far, and the models and the cache that will answer the next message."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._screen = Screen(arguments.color, by_origin=arguments.show)
        self._seed, self._longest_answer = arguments.seed, arguments.max_new_tokens
        self._verbose = arguments.verbose
        self._saved: set[Path] = set()
        files = open_target(arguments.target)
        most = files.config.position_limit
        self._context_length = arguments.context_length or min(most, _CONTEXT_LENGTH)
        if not 3 <= self._context_length <= most:
            raise InputError(
                f"--context-length is {self._context_length}; it must be from 3 to the target's "
                f"{most} positions."
            )
        self._decoder = open_decoder(arguments, files, ["Hello"])
        self._turns = list(self._opening)
        self._kept_cache = KeptCache(self._context_length)
        self._baseline = self._compile()

    def handle(self, message: str) -> None:
        """Run a command, or answer a message.

        Raises:
          InputError: the command is unknown, its value cannot be used, or the message does not fit.
            The conversation is then unchanged.
        """
        typed = message.strip()
        command, _, value = typed.partition(" ")
        one_line = "\n" not in typed  # pasted text of several lines is never a command
        if not (one_line and command.startswith("/")) or command.startswith("//"):
            if typed:
                require_text(message, "The message")
                escaped = one_line and command.startswith("//")
                self._answer(self._turns, message.replace("//", "/", 1) if escaped else message)
            return
        if command not in _COMMANDS:
            raise InputError(
                f"{command} is not a command; see /help, or begin the message with // if it starts "
                "with /."
            )
        if value and not _COMMANDS[command]:
            raise InputError(f"{command} takes no value, but {value!r} was given; see /help.")
        match command:
            case "/system":
                self._set_system(value.strip())
            case "/temperature":
                self._set_temperature(value)
            case "/retry":
                self._retry()
            case "/save":
                self._save(value.strip())
            case "/reset":
                self._turns = list(self._opening)
                log("The conversation is forgotten.")
            case _:
                log("\n".join(filter(None, (_HELP, self._screen.legend()))))

    @property
    def _opening(self) -> list[Turn]:
        return self._decoder.format.opening

    def _set_system(self, text: str) -> None:
        if not text:
            log(f"The system turn: {self._opening[0]['content'] if self._opening else 'none'}")
            return
        require_text(text, "The system turn")
        opening = [] if text == "-" else [{"role": "system", "content": text}]
        turns = [*opening, *self._turns[len(self._opening) :]]
        self._decoder.format.encode([*turns, user_turn("Hello")])  # a template may refuse it
        self._turns = turns
        self._decoder = self._decoder._replace(
            format=self._decoder.format._replace(opening=opening)
        )
        log("The system turn is set." if opening else "There is no system turn.")

    def _retry(self) -> None:
        if len(self._turns) == len(self._opening):
            raise InputError("There is no answer to retry yet; send a message first.")
        *earlier, message, _ = self._turns
        self._seed = (self._seed + 1) % _SEEDS
        same = "" if self._decoder.sampling.temperature else "; greedy answers do not change"
        log(f"The seed is {self._seed}{same}.")
        self._answer(earlier, message["content"])

    def _save(self, name: str) -> None:
        if not name:
            raise InputError("/save needs the name of a file to write; see /help.")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise InputError(f"{path} exists already; give /save another name.")
        try:
            write_atomically(path, json.dumps({"messages": self._turns}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"Cannot write {path}: {error.strerror}.") from None
        self._saved.add(path.resolve())
        log(f"Wrote {path}.")

    def _set_temperature(self, value: str) -> None:
        sampling = self._decoder.sampling
        stays = f"the temperature stays {sampling.temperature:g}."
        try:
            sampling = dataclasses.replace(sampling, temperature=float(value))
        except FieldError as error:
            problem = error.problem.removesuffix(".")
            raise InputError(f"/temperature {problem}; {stays}") from None
        except ValueError:
            raise InputError(
                f"/temperature takes a number such as 0.7, but {value!r} was given; {stays}"
            ) from None
        self._decoder = self._decoder._replace(sampling=sampling)
        log(f"The temperature is {sampling.temperature:g}.")

    def _answer(self, earlier: list[Turn], message: str) -> None:
        turns = [*earlier, user_turn(message)]
        prompt = self._decoder.format.encode(turns)
        room = self._context_length - len(prompt)
        if room < 1:
            raise InputError(
                f"With this message the conversation has {len(prompt)} tokens and leaves no room "
                f"for an answer within --context-length {self._context_length}; the message was "
                "not sent. Shorten it, or start over with /reset."
            )
        limit = min(room, self._longest_answer or room)
        steps = self._decoder.steps_per_update(_STEPS_PER_UPDATE)
        sampling = self._decoder.sampling
        sampling = dataclasses.replace(sampling, min_tokens=min(sampling.min_tokens, limit))
        updates = self._decoder._replace(sampling=sampling).stream(
            [prompt], limit, [self._seed], steps_per_yield=steps, kept_cache=self._kept_cache
        )
        with ctrl_c_event() as stop:
            text, update, stamps, counts = show_stream(
                updates, self._decoder.format.template.gap, self._screen, stop
            )
        if update is None:
            log("Stopped before the answer began; the message is not kept.")
            return
        self._turns = [*turns, {"role": "assistant", "content": text}]
        result, stopped = update.generation, stop.is_set()
        (tokens,) = result.tokens
        # The first update is prefill.
        decoding = stamps[-1] - stamps[0]
        rate = (counts[-1] - counts[0]) / decoding if len(stamps) > 1 else None
        summary = ("stopped; " if stopped else "") + describe_speed(result, rate)
        own, slower = update_seconds(stamps), False
        if own and self._baseline:
            cost = own / self._baseline
            summary += "; " + describe_cost(result, cost)
            slower = result.acceptance_length < cost
        if self._verbose or slower:  # a fast answer calls for no action
            log(summary)
        ended = update.stopped[0] or tokens[-1] in self._decoder.format.stop_tokens
        if not stopped and len(tokens) == limit and not ended:
            log(
                f"The context of {self._context_length} tokens is full; /reset starts over."
                if limit == room
                else f"The answer was cut off at --max-new-tokens {limit}."
            )
        self._screen.rule()

    def _compile(self) -> float | None:
        """Compile prefill and one step before the first answer.

        Returns the seconds per update without drafting, or None if such updates cannot be timed.
        """
        log(f"Compiling for {self._context_length} tokens of conversation ...")
        endless = self._decoder.format._replace(stop_tokens=())
        sampling = dataclasses.replace(self._decoder.sampling, min_tokens=0)
        decoder = self._decoder._replace(format=endless, sampling=sampling, grammar=None)
        cache = self._kept_cache
        steps = decoder.steps_per_update(_STEPS_PER_UPDATE)
        first = decoder.stream([[0]], 2, [self._seed], steps_per_yield=steps, kept_cache=cache)
        for _ in islice(first, 2):
            pass
        baseline = baseline_seconds(decoder, [0], self._context_length, steps)
        log("Ready; /help lists the commands.")
        if self._screen.by_origin:
            log(self._screen.legend())
        return baseline
