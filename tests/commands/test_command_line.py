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


class Outer(Settings):
    size: int
    rate: float = 0.5


@pytest.mark.parametrize(
    ("module", "word", "hint"),
    [
        ("eval", "comparison", "did you mean 'compare'?"),
        ("train", "preview", "known commands: inspect, features, regenerate."),
    ],
)
def test_a_mistyped_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    word: str,
    hint: str,
) -> None:
    monkeypatch.setattr("sys.argv", [module, word, "--config", "x.yaml"])
    main = importlib.import_module(f"{module}.__main__").main
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"error: {word!r} is not a command; {hint}\n"


def test_overrides_may_stand_before_and_after_options(tmp_path: Path) -> None:
    config = tmp_path / "outer.yaml"
    config.write_text("size: 3\n")
    arguments = ["size=4", "--config", str(config), "rate=0"]
    assert parse_settings(Outer, "A test.", arguments) == Outer(size=4, rate=0.0)


def test_the_help_names_the_program_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/redrafter-eval"])
    for spec, name in (
        (ModuleSpec("eval.__main__", None), "python -m eval plan"),
        (None, "redrafter-eval plan"),
    ):
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
        with pytest.raises(SystemExit):
            parse_settings(Outer, "A test.", ["--help"], command="plan")
        assert capsys.readouterr().out.startswith(f"usage: {name} [-h]")


def ending(main: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Exit code and stderr of a command."""
    with pytest.raises(SystemExit) as exit:
        run(main)
    return exit.value.code, capsys.readouterr().err


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
INTERRUPTED = """
from redrafter_jax.command_line import run

def main():
    raise KeyboardInterrupt

run(main)
"""
# The garbage collector's callbacks are JAX's own; Python ignores what is raised in them.
IGNORED = """
import gc, signal
from redrafter_jax.command_line import run

# A shell's background job inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def main():
    gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGINT))
    gc.collect()
    print("went on")

run(main)
"""


@pytest.mark.parametrize(
    ("program", "streams", "told"),
    [
        pytest.param(UNFINISHED, "", ("so far\n", "\ninterrupted\n"), marks=pytest.mark.long),
        (IGNORED, "", ("", "\ninterrupted\n")),
        # Where nothing can be written.
        (INTERRUPTED, ">&- 2>&-", ("", "")),
        (INTERRUPTED, "2>/dev/full", ("", "")),
    ],
)
def test_ctrl_c_ends_with_exit_code_130(program: str, streams: str, told: tuple[str, str]) -> None:
    command = f"{shlex.join([sys.executable, '-c', program])} {streams}"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=buffered)
    assert (ended.returncode, (ended.stdout, ended.stderr)) == (130, told)


def test_an_error_of_the_user_is_one_sentence_with_its_traceback_only_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        next(Path("no such folder").iterdir())

    sentence = "error: no such folder: No such file or directory.\n"
    assert ending(main, capsys) == (2, sentence)
    monkeypatch.setattr(sys, "argv", ["redrafter", "--debug"])
    code, told = ending(main, capsys)
    assert (code, told[:9], told.endswith(f"\n{sentence}")) == (2, "Traceback", True)


@pytest.mark.long
def test_a_process_that_failed_waits_for_no_thread_of_others() -> None:
    program = """
import threading
from redrafter_jax.command_line import run
from redrafter_jax.errors import InputError

def main():
    threading.Thread(target=threading.Event().wait).start()
    raise InputError("no room")

run(main)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (2, "error: no room\n")


def test_an_option_in_a_settings_place_is_told_how_to_be_one() -> None:
    for words, setting in ((["--steps", "3"], "steps=3"), (["--log-every"], "log_every=value")):
        hint = f"{words[0]} is not an option; write settings without dashes: {setting}"
        with pytest.raises(InputError, match=hint):
            parse_settings(Outer, "A test.", words)
    with pytest.raises(
        InputError, match=r"^unrecognized argument: --confg; did you .* --config\?$"
    ):
        parse_settings(Outer, "A test.", ["--confg", "x.yaml"])


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)
