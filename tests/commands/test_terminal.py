"""A conversation on a terminal: text made visible, colours, whole words, pastes, Ctrl-C."""

import io
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT

from redrafter_jax.commands import terminal
from redrafter_jax.commands.terminal import Screen, When, ctrl_c_event
from redrafter_jax.errors import InputError
from redrafter_jax.types import LOOKUP


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_on(out: io.StringIO, colour: When = "never", *, by_origin: bool = False) -> Screen:
    with redirect_stdout(out):
        return Screen(colour, by_origin=by_origin)


def test_pieces_are_coloured_by_what_their_call_gained() -> None:
    out = io.StringIO()
    screen = screen_on(out, "always")
    for gained in (1, 2, 5, 9):
        screen.write(str(gained), gained)
    assert out.getvalue() == "1\x1b[36m2\x1b[0m\x1b[35m5\x1b[0m\x1b[35m9\x1b[0m"
    assert "\x1b[35m5 or more\x1b[0m" in screen.legend()


def test_or_by_who_proposed_them() -> None:
    out = io.StringIO()
    screen = screen_on(out, "always", by_origin=True)
    for origin in (None, "recurrent", "lookup", "self:int4"):
        screen.write(str(origin), 9, origin)
    drafted = "\x1b[36mrecurrent\x1b[0m\x1b[33mlookup\x1b[0m\x1b[36mself:int4\x1b[0m"
    assert out.getvalue() == f"None{drafted}"
    assert screen.legend() == (
        "Colours show who proposed a token: the target, \x1b[36mthe drafter\x1b[0m, "
        "\x1b[33mprompt lookup\x1b[0m."
    )
    with pytest.raises(InputError, match=r"--show needs colours, .* give --color always"):
        screen_on(io.StringIO(), "auto", by_origin=True)


def test_the_name_of_prompt_lookup_is_that_of_its_tokens() -> None:
    assert terminal.LOOKUP == LOOKUP


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


@pytest.fixture
def twenty_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: os.terminal_size((20, 5)))
    monkeypatch.setattr(Terminal, "fileno", lambda self: 1)


def lines_shown(written: str) -> list[str]:
    """What a terminal without an edge shows, which obeys a cursor to the left and what clears."""
    lines, column = [""], 0
    for step in re.findall(r"\x1b\[\d*[A-Za-z]|[\s\S]", written):
        if step == "\n":
            lines.append("")
            column = 0
        elif step.endswith("D") and step != "D":
            column -= int(step[2:-1])
        elif step == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif not step.endswith("m") or step == "m":
            lines[-1] = lines[-1][:column] + step + lines[-1][column + 1 :]
            column += 1
    return lines


WORDS = st.lists(st.text("abcdefg,.-", min_size=1, max_size=9), min_size=1, max_size=20)


@pytest.mark.usefixtures("twenty_cells")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=WORDS,
    sizes=st.lists(st.integers(1, 7), min_size=1),
    colour=st.sampled_from(["always", "never"]),
)
def test_words_that_come_in_pieces_are_not_broken_at_the_edge(
    words: list[str], sizes: list[int], colour: When
) -> None:
    out, text = Terminal(), " ".join(words)
    screen, rest, size = screen_on(out, colour), text, cycle(sizes)
    while rest:
        count = next(size)
        screen.write(rest[:count], count)
        rest = rest[count:]
    expected = textwrap.wrap(text, 19, break_on_hyphens=False)
    assert [line.rstrip() for line in lines_shown(out.getvalue())] == expected


@pytest.mark.usefixtures("twenty_cells")
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a" * 45, ["a" * 19, "a" * 19, "a" * 7]),
        ("日本" * 6, ["日本" * 4 + "日", "本日本"]),  # of two cells each
        ("  code = 1\n  other", ["  code = 1", "  other"]),
        ("\tone two three", ["\tone two", "three"]),
    ],
)
def test_what_has_no_words_breaks_at_the_edge(text: str, lines: list[str]) -> None:
    out = Terminal()
    screen_on(out).write(text)
    assert [line.rstrip() for line in lines_shown(out.getvalue())] == lines


@pytest.mark.usefixtures("twenty_cells")
def test_a_line_parts_two_turns_on_a_terminal_and_nothing_in_a_pipe() -> None:
    for out, line in ((Terminal(), "─" * 19 + "\n"), (io.StringIO(), "")):
        screen_on(out).rule()
        assert out.getvalue() == line


# What a terminal is asked for before a paste: to mark it.
READY = "\x1b[?2004h"
READ = """
from redrafter_jax.commands.terminal import read_messages
for message in read_messages():
    print("got", ascii(message), flush=True)
print("ended", flush=True)
"""


class Typist:
    """Somebody at a terminal, and what they see."""

    def __init__(self, state: Path) -> None:
        self._own, other = os.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", READ],
            cwd=ROOT,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def type(self, keys: str, until: str, ready: bool = True) -> None:
        """Press keys, and wait for what is shown then, and for the next prompt."""
        self.seen = ""
        os.write(self._own, keys.encode())
        while until not in self.seen or (ready and READY not in self.seen.partition(until)[2]):
            assert select.select([self._own], [], [], 60)[0], f"no {until!r} in {self.seen!r}"
            self.seen += os.read(self._own, 4096).decode(errors="replace")

    def end(self) -> None:
        os.close(self._own)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Callable[[], Typist]]:
    started: list[Typist] = []

    def start() -> Typist:
        started.append(Typist(tmp_path / "state"))
        started[-1].type("", until=READY, ready=False)
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_what_is_pasted_on_a_terminal_is_one_message(typist: Callable[[], Typist]) -> None:
    person = typist()
    # Terminals send a paste between these marks, and its newlines as Enter.
    person.type("\x1b[200~one\rtwo\n\nthree\x1b[201~", until="three", ready=False)
    assert "got" not in person.seen
    person.type(" four\r", until="got 'one\\ntwo\\n\\nthree four'")
    person.type("five\x1b\rsix\r", until="got 'five\\nsix'")
    person.type("dropped\x03", until="Ctrl-D or /quit ends the conversation.")
    person.type("kept\r", until="got 'kept'")
    person.type("\x04", until="ended", ready=False)


def test_the_history_outlives_a_session_and_is_its_owners_alone(
    typist: Callable[[], Typist], tmp_path: Path
) -> None:
    before = typist()
    before.type("\x1b[200~one\rtwo\x1b[201~\r", until="got 'one\\ntwo'")
    before.type("\x04", until="ended", ready=False)
    after = typist()
    after.type("\x1b[A", until="two", ready=False)
    after.type("\r", until="got 'one\\ntwo'")
    folder = tmp_path / "state" / "redrafter-jax"
    assert oct(folder.stat().st_mode) == "0o40700"
    assert oct((folder / "chat_history").stat().st_mode) == "0o100600"


def test_a_history_that_cannot_be_kept_is_told(
    typist: Callable[[], Typist], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("no folder")
    person = typist()
    assert "not kept for the next session" in person.seen
    person.type("one\r", until="got 'one'")
