"""A conversation on a terminal or in a pipe: lines in, text out, colours, status, Ctrl-C."""

import os
import shutil
import signal
import sys
import unicodedata
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from threading import Event
from typing import Literal

# How many tokens a call gained, from one to five and more: plain, cyan, green, yellow, magenta.
_COLOURS = ("", "\x1b[36m", "\x1b[32m", "\x1b[33m", "\x1b[35m")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

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


def tell(sentence: str) -> None:
    """Write a line to stderr."""
    print(sentence, file=sys.stderr)


class Screen:
    """stdout: answers as they come, with a line of status below where that can be seen.

    The status is erased before every piece and written again below it, the cursor put back. On a
    terminal control characters of the text are made visible.

    Args:
      colour: pieces by what they gained; `auto` where stdout is a terminal that can, unless
        NO_COLOR is set.
    """

    def __init__(self, colour: When) -> None:
        self._out = sys.stdout
        self._obeyed = self._out.isatty()
        # Whether the cursor can be moved.
        self._live = self._obeyed and os.environ.get("TERM", "dumb") != "dumb"
        asked = self._live and not os.environ.get("NO_COLOR")
        self._coloured = asked if colour == "auto" else colour == "always"
        self._column = 0

    def write(self, text: str, gained: int = 1) -> None:
        """A piece of an answer, from a call that gained so many tokens."""
        if self._obeyed:
            text = visible(text)
        # What is below the cursor, and right of it, is status. Past the last column there is none,
        # and erasing would take the last character.
        erase = "\x1b[J" if self._live and self._column < _width() else ""
        colour = _COLOURS[min(gained, len(_COLOURS)) - 1] if self._coloured else ""
        self._out.write(erase + (f"{colour}{text}{_PLAIN}" if colour and text else text))
        self._out.flush()
        self._column = next_column(self._column, text, _width())

    def show_status(self, status: str) -> None:
        """One line below the text, where that can be seen."""
        width = _width()
        # Past the last column a terminal waits with the new line, and forgets that it does when
        # its cursor moves.
        if not self._live or self._column >= width:
            return
        line = status[: width - 1]
        if self._coloured:
            line = f"{_DIM}{line}{_PLAIN}"
        # Down and up makes room below; then save, down, the line, restore.
        self._out.write(f"\x1bD\x1b[A\x1b7\x1b[B\r{line}\x1b[K\x1b8")
        self._out.flush()

    def end(self) -> None:
        """The answer is over; what is written next begins a line."""
        self.write("\n")

    def legend(self) -> str:
        """What the colours say; "" where there are none."""
        if not self._coloured:
            return ""
        numbers = [str(count) for count in range(1, len(_COLOURS))] + [f"{len(_COLOURS)} or more"]
        shown = (f"{colour}{n}{_PLAIN}" for colour, n in zip(_COLOURS, numbers, strict=True))
        return "Colours tell how many tokens a call of the target gained: " + " ".join(shown)


def next_column(column: int, text: str, width: int) -> int:
    """The cursor's column after a text, 0 to `width`: there it waits for what comes next."""
    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min((column // 8 + 1) * 8, width - 1)
        else:
            cells = _cells(character)
            column = cells if column + cells > width else column + cells
    return column


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cc", "Cf", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


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
            tell("\nCtrl-D or /quit ends.")


@contextmanager
def ctrl_c_sets() -> Generator[Event]:
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


def _width() -> int:
    return shutil.get_terminal_size().columns
