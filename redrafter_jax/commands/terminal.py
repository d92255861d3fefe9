"""A conversation on a terminal or in a pipe: lines in, text out, colours, Ctrl-C."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from threading import Event
from typing import Literal

# How many tokens a call gained, from one to five and more: plain, cyan, green, yellow, magenta.
_COLOURS = ("", "\x1b[36m", "\x1b[32m", "\x1b[33m", "\x1b[35m")
_PLAIN = "\x1b[0m"

_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}

When = Literal["auto", "always", "never"]


def visible(text: str) -> str:
    """The text with control characters replaced, for a terminal would obey them.

    Newlines and tabs stay. Of the others those of ASCII become their pictures, such as ␛, and those
    of C1, U+0080 to U+009F, a replacement character.
    """
    return text.translate(_PICTURES)


def log(sentence: str) -> None:
    """Write a line to stderr."""
    print(sentence, file=sys.stderr)


class Screen:
    """stdout: answers as they come; on a terminal their control characters are made visible.

    Args:
      colour: pieces by what they gained; `auto` where stdout is a terminal that can, unless
        NO_COLOR is set.
    """

    def __init__(self, colour: When) -> None:
        self._out = sys.stdout
        self._is_terminal = self._out.isatty()
        capable = self._is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        auto = capable and not os.environ.get("NO_COLOR")
        self._coloured = auto if colour == "auto" else colour == "always"

    def write(self, text: str, gained: int = 1) -> None:
        """A piece of an answer, from a call that gained so many tokens."""
        if self._is_terminal:
            text = visible(text)
        colour = _COLOURS[min(gained, len(_COLOURS)) - 1] if self._coloured else ""
        self._out.write(f"{colour}{text}{_PLAIN}" if colour and text else text)
        self._out.flush()

    def legend(self) -> str:
        """What the colours say; "" where there are none."""
        if not self._coloured:
            return ""
        numbers = [str(count) for count in range(1, len(_COLOURS))] + [f"{len(_COLOURS)} or more"]
        shown = (f"{colour}{n}{_PLAIN}" for colour, n in zip(_COLOURS, numbers, strict=True))
        return "Colours tell how many tokens a call of the target gained: " + " ".join(shown)


def read_lines() -> Iterator[str]:
    """Lines of stdin, typed at a prompt if somebody types; Ctrl-C there drops the line."""
    if sys.stdin is None:  # closed by whoever started the program
        return
    typed = sys.stdin.isatty()
    edited = typed and sys.stdout.isatty()
    if edited:
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` then edits its line and knows the ones before
    # Bytes that are no UTF-8 become lone surrogates, which the reader refuses by name.
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            if edited:
                yield input("> ")
                continue
            if typed:
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            yield line.removesuffix("\n")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            log("\nCtrl-D or /quit ends.")


@contextmanager
def ctrl_c_event() -> Generator[Event]:
    """An event that Ctrl-C sets; pressed once more, Ctrl-C raises KeyboardInterrupt as ever."""
    pressed = Event()
    before = signal.getsignal(signal.SIGINT)

    def press(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
