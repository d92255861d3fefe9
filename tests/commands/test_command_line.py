"""What a command reads from its line, and how it ends: errors as sentences."""

import importlib
import os
import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from redrafter_jax import InputError
from redrafter_jax.command_line import run
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings


class Inner(Settings):
    rate: float = 0.5


class Outer(Settings):
    size: int
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("module", "word", "sentence"),
    [
        ("eval", "acceptence", "error: 'acceptence' is no command; did you mean 'acceptance'?"),
        (
            "train",
            "preview",
            "error: 'preview' is no command; known commands: inspect, regenerate.",
        ),
    ],
)
def test_a_mistyped_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    word: str,
    sentence: str,
) -> None:
    monkeypatch.setattr("sys.argv", [module, word, "--config", "x.yaml"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{module}.__main__").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_overrides_may_stand_before_and_after_options(tmp_path: Path) -> None:
    config = tmp_path / "outer.yaml"
    config.write_text("size: 3\n")
    arguments = ["size=4", "--config", str(config), "inner.rate=0"]
    assert parse_settings(Outer, "A test.", arguments) == Outer(size=4, inner=Inner(rate=0.0))


@pytest.mark.parametrize(
    ("spec", "command", "name"),
    [
        (ModuleSpec("eval.__main__", None), "", "python -m eval"),
        (ModuleSpec("eval.__main__", None), "plan", "python -m eval plan"),
        (None, "plan", "redrafter-eval plan"),
    ],
)
def test_the_help_names_the_program_and_its_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spec: ModuleSpec | None,
    command: str,
    name: str,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/redrafter-eval"])
    with pytest.raises(SystemExit):
        parse_settings(Outer, "A test.", ["--help"], command=command)
    assert capsys.readouterr().out.startswith(f"usage: {name} [-h]")


# How a command ends.


def ending(main: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Exit code and stderr of a command."""
    with pytest.raises(SystemExit) as exit:
        run(main)
    return exit.value.code, capsys.readouterr().err


def test_an_input_error_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        raise InputError("The value is 3; it must be 2.")

    assert ending(main, capsys) == (2, "error: The value is 3; it must be 2.\n")


UNFINISHED = """
import jax
import jax.numpy as jnp
from redrafter_jax.command_line import run

def main():
    again = jax.jit(lambda x: jax.lax.fori_loop(0, 500, lambda i, x: jnp.sin(x @ x), x))
    running = again(jnp.ones((500, 500)))
    running.copy_to_host_async()
    print("so far")
    raise KeyboardInterrupt

run(main)
"""


def test_ctrl_c_ends_with_exit_code_130_even_while_a_program_runs() -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        [sys.executable, "-c", UNFINISHED],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=buffered,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "so far\n", "\ninterrupted\n")


INTERRUPTED = """
from redrafter_jax.command_line import run

def main():
    raise KeyboardInterrupt

run(main)
"""


@pytest.mark.parametrize("closed", [">&- 2>&-", "2>/dev/full"])
def test_ctrl_c_ends_so_where_nothing_can_be_written(closed: str) -> None:
    command = shlex.join([sys.executable, "-c", INTERRUPTED])
    assert subprocess.run(["sh", "-c", f"{command} {closed}"], timeout=300).returncode == 130


# The garbage collector's callbacks are JAX's own; Python ignores what is raised in them.
IGNORED = """
import gc, signal
from redrafter_jax.command_line import run

def main():
    gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGINT))
    gc.collect()
    print("went on")

run(main)
"""


def test_ctrl_c_is_heard_in_callbacks_that_python_ignores() -> None:
    ended = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\ninterrupted\n")


def test_debug_shows_the_traceback_of_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["redrafter", "--debug"])
    code, told = ending(lambda: Path("no such folder").iterdir().__next__(), capsys)
    assert code == 2
    assert told.startswith("Traceback (most recent call last):")
    assert told.endswith("\nerror: no such folder: No such file or directory.\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--steps", "3"], "--steps is no option; settings are given without dashes: steps=3"),
        (["--inner.rate=0.1"], "settings are given without dashes: inner.rate=0.1"),
        (["--log-every"], "settings are given without dashes: log_every=value"),
    ],
)
def test_an_option_in_a_settings_place_is_told_how_to_be_one(words: list[str], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        parse_settings(Outer, "A test.", words)


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)
