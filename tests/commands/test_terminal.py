"""What a terminal shows of a conversation: the text untouched, its colours, the status below it."""

import io
import os
import re
import signal
from contextlib import redirect_stdout

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redrafter_jax.commands import terminal
from redrafter_jax.commands.terminal import Screen, When, ctrl_c_sets

WIDTH, HEIGHT = 12, 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Emulator(Terminal):
    """The few things of a VT100 that are needed: every row ever scrolled off is kept too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [[" "] * WIDTH for _ in range(HEIGHT)]
        self.row = self.column = self.top = 0
        self.waits = False
        self.saved = (0, 0)

    def write(self, text: str, /) -> int:
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\x1b.|[\s\S]", text):
            self._do(part)
        return len(text)

    def _do(self, part: str) -> None:
        match part:
            case "\n" | "\x1bD":
                self._down()
                if part == "\n":
                    self.column = 0
            case "\r":
                self.column = 0
            case "\x1b[A":
                self.row = max(self.top, self.row - 1)
            case "\x1b[B":
                self.row = min(self.top + HEIGHT - 1, self.row + 1)
            case "\x1b7":
                self.saved = (self.row - self.top, self.column)
            case "\x1b8":
                self.row, self.column = self.saved[0] + self.top, self.saved[1]
            case "\x1b[K" | "\x1b[J":
                self.rows[self.row][self.column :] = [" "] * (WIDTH - self.column)
                if part == "\x1b[J":
                    below = len(self.rows) - self.row - 1
                    self.rows[self.row + 1 :] = [[" "] * WIDTH for _ in range(below)]
            case _ if part.startswith("\x1b"):
                assert part.endswith("m")
                return
            case _:
                if self.waits:
                    self._down()
                    self.column = 0
                self.rows[self.row][self.column] = part
                # In the last column it waits there for what comes next.
                self.waits = self.column == WIDTH - 1
                self.column = min(self.column + 1, WIDTH - 1)
                return
        self.waits = False

    def _down(self) -> None:
        self.row += 1
        if self.row == self.top + HEIGHT:
            self.top += 1
            self.rows.append([" "] * WIDTH)

    @property
    def shown(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


def wrapped(text: str) -> list[str]:
    """Rows of a text as a terminal of this width breaks them."""
    return [
        line[start : start + WIDTH].rstrip()
        for line in text.split("\n")
        for start in range(0, max(len(line), 1), WIDTH)
    ]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_width", lambda: WIDTH)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def screen_on(out: io.StringIO, colour: When = "never") -> Screen:
    with redirect_stdout(out):
        return Screen(colour)


@example([("a" * 9, True), ("bcd", True), ("e", True)], False)
@given(st.lists(st.tuples(st.text("ab \n", max_size=9), st.booleans()), max_size=12), st.booleans())
def test_the_status_is_below_and_the_text_as_if_there_were_none(
    pieces: list[tuple[str, bool]], coloured: bool
) -> None:
    out = Emulator()
    screen = screen_on(out, "always" if coloured else "never")
    text = ""
    for piece, told in pieces:
        screen.write(piece, len(piece))
        text += piece
        rows = wrapped(text)
        assert out.shown[: len(rows)] == rows
        assert not any(out.shown[len(rows) :])
        if told:
            screen.show_status("7 tokens/s, fast")
            assert out.shown[: len(rows)] == rows
            # Where the cursor waits in the last column there is none.
            full = len(text.rpartition("\n")[2]) % WIDTH == 0 and not text.endswith("\n") and text
            assert full or out.shown[len(rows)] == "7 tokens/s,"
    screen.end()
    assert out.shown[: len(wrapped(text))] == wrapped(text)
    assert not any(out.shown[len(wrapped(text)) :])


def test_pieces_are_coloured_by_what_their_call_gained_and_a_pipe_gets_the_text_alone() -> None:
    coloured, pipe = io.StringIO(), io.StringIO()
    for out, screen in ((coloured, screen_on(coloured, "always")), (pipe, screen_on(pipe, "auto"))):
        for gained in (1, 2, 5, 9):
            screen.write(str(gained), gained)
        screen.show_status("7 tokens/s")
        screen.end()
        assert ("\x1b[35m5 or more\x1b[0m" in screen.legend()) == (out is coloured)
    assert coloured.getvalue() == "1\x1b[36m2\x1b[0m\x1b[35m5\x1b[0m\x1b[35m9\x1b[0m\n"
    assert pipe.getvalue() == "1259\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "␛[2J␛]0;title␇"),
        ("a\r\x08\x7fb", "a␍␈␡b"),
        ("\x9b31m", "\N{REPLACEMENT CHARACTER}31m"),
        ("kept:\n\t日本 é", "kept:\n\t日本 é"),
    ],
)
def test_a_terminal_shows_control_characters_that_it_would_obey(text: str, shown: str) -> None:
    for out, expected in ((Terminal(), f"\x1b[J{shown}"), (io.StringIO(), text)):
        screen_on(out).write(text)
        assert out.getvalue() == expected


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        (0, "ab\nc", 1),
        (0, "a" * 12, 12),
        (0, "a" * 13, 1),
        (0, "a\t", 8),
        (0, "日本", 4),
        (0, "e\u0301", 1),
        # Where a wide character does not fit it begins the next row.
        (11, "日", 2),
    ],
)
def test_columns_are_cells(before: int, text: str, after: int) -> None:
    assert terminal.next_column(before, text, WIDTH) == after


@pytest.mark.parametrize(
    ("out", "colour", "environment", "coloured"),
    [
        (Terminal, "auto", {}, True),
        (io.StringIO, "auto", {}, False),
        (Terminal, "auto", {"NO_COLOR": "1"}, False),
        # As no-color.org has it, an empty one is none.
        (Terminal, "auto", {"NO_COLOR": ""}, True),
        (Terminal, "auto", {"TERM": "dumb"}, False),
        (io.StringIO, "always", {"NO_COLOR": "1"}, True),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch,
    out: type[io.StringIO],
    colour: When,
    environment: dict[str, str],
    coloured: bool,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bool(screen_on(out(), colour).legend()) == coloured


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_heard_once_and_then_raises() -> None:
    with ctrl_c_sets() as pressed:
        assert not pressed.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
