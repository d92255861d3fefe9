"""What a terminal shows of a conversation: the text made visible, its colours, Ctrl-C."""

import io
import os
import signal
from contextlib import redirect_stdout

import pytest

from redrafter_jax.commands.terminal import Screen, When, ctrl_c_event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_on(out: io.StringIO, colour: When = "never") -> Screen:
    with redirect_stdout(out):
        return Screen(colour)


def test_pieces_are_coloured_by_what_their_call_gained() -> None:
    out = io.StringIO()
    screen = screen_on(out, "always")
    for gained in (1, 2, 5, 9):
        screen.write(str(gained), gained)
    assert out.getvalue() == "1\x1b[36m2\x1b[0m\x1b[35m5\x1b[0m\x1b[35m9\x1b[0m"
    assert "\x1b[35m5 or more\x1b[0m" in screen.legend()


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
    for out, expected in ((Terminal(), shown), (io.StringIO(), text)):
        screen_on(out).write(text, 9)
        assert out.getvalue() == expected


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
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bool(screen_on(out(), colour).legend()) == coloured


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_heard_once_and_then_raises() -> None:
    with ctrl_c_event() as pressed:
        assert not pressed.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
