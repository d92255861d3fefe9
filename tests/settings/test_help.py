"""What the help of a command says of its settings."""

import subprocess
import sys
from typing import Literal

import pytest
from places import ROOT

from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.settings.files import Settings
from redrafter_jax.settings.help import describe_settings


class Inner(Settings):
    """What goes on inside, at a `rate`.

    A second paragraph.
    """

    rate: float = 0.5
    names: tuple[str, ...] = ("a", "b")


class Base(Settings):
    """Not shown, for it lists its fields.

    Attributes:
      size: of all; it is so long a text that it does not fit into a single line of the help and is
        continued.
    """

    size: int


class Outer(Base):
    """Shown, as of every command.

    Attributes:
      inner: the only one.
    """

    fast: bool = False
    inner: Inner = Inner(rate=2.0)
    spare: Inner | None = None
    parts: tuple[Inner, ...] = ()
    named: dict[str, ServeConfig]
    mode: Literal["a", "b"] = "b"


def test_every_setting_has_its_path_its_default_and_its_text() -> None:
    lines = describe_settings(Outer).splitlines()
    assert lines == [
        "settings:",
        "  Shown, as of every command.",
        "  size (required): of all; it is so long a text that it does not fit into a",
        "      single line of the help and is continued",
        "  fast=false",
        "  inner.*: the only one",
        "  spare=null",
        "  parts=[]",
        "  named (required)",
        "  mode=b (a, b)",
        "",
        "inner:",
        "  What goes on inside, at a `rate`.",
        "  A second paragraph.",
        "  rate=2.0",
        "  names=[a, b]",
        "",
        "spare:",
        "  What goes on inside, at a `rate`.",
        "  A second paragraph.",
        "  rate=0.5",
        "  names=[a, b]",
        "",
        "parts.0: as spare",
        "",
        "named.NAME:",
        "  slots=8: number of requests that decode together",
        *lines[lines.index("  slots=8: number of requests that decode together") + 1 :],
    ]
    assert "  deadline=null: seconds that a request may take; by default there is no limit" in lines


@pytest.mark.parametrize(
    "words", [pytest.param(["train"], marks=pytest.mark.long), ["eval", "tune"]]
)
def test_the_help_of_a_command_lists_its_settings(words: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", *words, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "settings:\n" in shown.stdout
    assert "\nmesh:\n  Numbers of devices that share the work" in shown.stdout
