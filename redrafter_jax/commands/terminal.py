"""Input and output of a conversation on a terminal or in a pipe: messages, colours, Ctrl-C."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from threading import Event
from typing import Any, Literal

from redrafter_jax.errors import InputError

# A copy of `redrafter_jax.types.LOOKUP`, because that module imports JAX.
LOOKUP = "lookup"

# Colours for the number of tokens that a call gained: 1 plain, 2 cyan, 3 green, 4 yellow, 5 or more
# magenta.
_COLOURS = ("", "\x1b[36m", "\x1b[32m", "\x1b[33m", "\x1b[35m")
# Colours for the source of a token: the target itself, a drafter, prompt lookup.
_OWN, _DRAFTED, _LOOKED_UP = "", "\x1b[36m", "\x1b[33m"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# On lines with fewer cells than this, words may break anywhere.
_NARROWEST = 8

_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}

When = Literal["auto", "always", "never"]


def visible(text: str) -> str:
    """Return the text with symbols for control characters, which a terminal would obey."""
    return text.translate(_PICTURES)


def log(sentence: str) -> None:
    """Write a line to stderr."""
    print(sentence, file=sys.stderr)


def _is_capable() -> bool:
    """Whether stdout is a terminal that understands escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """Writes answers to stdout while they are decoded.

    On a terminal, control characters are shown as symbols, and a word that reaches the edge moves
    to the next line.

    Args:
      colour: whether text is coloured; `auto` colours it if stdout is a terminal that supports
        colours, unless NO_COLOR is set.
      by_origin: whether colours show who proposed a token, rather than how many tokens its call
        gained.

    Raises:
      InputError: `by_origin` is set, but text is not coloured.
    """

    def __init__(self, colour: When, *, by_origin: bool = False) -> None:
        self._out = sys.stdout
        self._is_terminal, self._wraps = self._out.isatty(), _is_capable()
        auto = self._wraps and not os.environ.get("NO_COLOR")
        self._coloured = auto if colour == "auto" else colour == "always"
        self.by_origin = by_origin
        if by_origin and not self._coloured:
            raise InputError(
                "--show needs colours, which this output does not have; give --color always, or "
                "leave --show out."
            )
        self._column = 0
        # The coloured text of the word at the cursor, and its width in cells.
        self._word, self._word_cells = "", 0

    def write(self, text: str, gained: int = 1, origin: str | None = None) -> None:
        """Write a piece of an answer.

        Args:
          text: text of the piece.
          gained: number of tokens that the target call of this piece gained.
          origin: source that proposed the piece; None for the target.
        """
        if self._is_terminal:
            text = visible(text)
        if not self._coloured:
            colour = ""
        elif self.by_origin:
            colour = {None: _OWN, LOOKUP: _LOOKED_UP}.get(origin, _DRAFTED)
        else:
            colour = _COLOURS[min(gained, len(_COLOURS)) - 1]
        width = self._width()
        self._out.write(self._wrapped(text, colour, width) if width else _painted(text, colour))
        self._out.flush()

    def legend(self) -> str:
        """Return a sentence with the meaning of the colours; "" if text is not coloured."""
        if not self._coloured:
            return ""
        if self.by_origin:
            names = {"the target": _OWN, "the drafter": _DRAFTED, "prompt lookup": _LOOKED_UP}
            shown = ", ".join(_painted(name, colour) for name, colour in names.items())
            return f"Colours show who proposed a token: {shown}."
        numbers = [str(count) for count in range(1, len(_COLOURS))] + [f"{len(_COLOURS)} or more"]
        shown = (_painted(n, colour) for colour, n in zip(_COLOURS, numbers, strict=True))
        return "Colours show how many tokens a target call gained: " + " ".join(shown)

    def rule(self) -> None:
        """Draw a line between two turns on a terminal."""
        if width := self._width():
            self._out.write(_painted("─" * width, _DIM if self._coloured else "") + "\n")
            self._out.flush()

    def _width(self) -> int | None:
        """Number of cells of a line, without the last cell, at which terminals differ.

        None if lines are not wrapped.
        """
        if not self._wraps:
            return None
        try:
            width = os.get_terminal_size(self._out.fileno()).columns - 1
        except (OSError, ValueError):  # not a terminal, although isatty() says so
            return None
        return width if width >= _NARROWEST else None

    def _wrapped(self, text: str, colour: str, width: int) -> str:
        """The coloured text, with escape sequences that move an overflowing word to a new line."""
        from wcwidth import wcwidth  # imported here because only terminals need it

        shown = run = ""
        for character in text:
            cells = 8 - self._column % 8 if character == "\t" else max(0, wcwidth(character))
            overflows = self._column + cells > width
            parts = character in " \t\n" or cells > 1  # lines may break at any Chinese character
            if overflows and not parts and 0 < self._word_cells < self._column:
                back = f"\x1b[{self._word_cells}D\x1b[K\n"
                shown, run = shown + _painted(run, colour) + back + self._word, ""
                self._column = self._word_cells
            elif character in " \t" and overflows:
                character = "\n"
            elif overflows:
                run, self._column, self._word, self._word_cells = run + "\n", 0, "", 0
            run += character
            self._column = 0 if character == "\n" else self._column + cells
            if parts:
                self._word, self._word_cells = "", 0
            else:
                self._word += _painted(character, colour)
                self._word_cells += cells
        return shown + _painted(run, colour)


def _painted(text: str, colour: str) -> str:
    return f"{colour}{text}{_PLAIN}" if colour and text else text


def read_messages() -> Iterator[str]:
    """Read messages from stdin, one per line; on a terminal, pasted text is one message.

    Ctrl-C at the prompt discards the typed text.
    """
    if sys.stdin is None:  # the parent process closed it
        return
    typed = sys.stdin.isatty()
    ask = _editor() if typed and _is_capable() else None
    # Bytes that are not UTF-8 become lone surrogates, which `require_text` refuses.
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            if ask is not None:
                yield ask.prompt().removesuffix("\n")
                continue
            if typed:
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            yield line.removesuffix("\n")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            log("\nCtrl-D or /quit ends the conversation.")


def _editor() -> Any:
    """Make a prompt with line editing and a history that is kept between sessions."""
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # some terminals answer CPR requests late
    # Imported here because it is slow, and only terminals need it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    history = InMemoryHistory()
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state) / "redrafter-jax" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)):
            history = FileHistory(path)
    except (OSError, RuntimeError) as error:  # an unwritable folder, or no home folder
        log(f"The input history is not kept for the next session: {error}.")
    return PromptSession("> ", history=history, key_bindings=keys)


@contextmanager
def ctrl_c_event() -> Generator[Event]:
    """Yield an event that the first Ctrl-C sets; a second Ctrl-C raises KeyboardInterrupt."""
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
