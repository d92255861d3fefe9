"""Option parsing, error reports and exit codes of every command, without importing JAX."""

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NoReturn

from redrafter_jax.errors import InputError

# The exit code with which shells report a command that Ctrl-C has ended.
_INTERRUPTED = 130
# Seconds to wait before a failed process exits: for other processes of the job to report the same
# failure, and for other threads to end.
_GRACE = 3
_DEBUG = "--debug"


class Parser(argparse.ArgumentParser):
    """An argument parser with the option `--debug`; it raises `InputError` instead of exiting."""

    def __init__(self, **options: Any) -> None:  # argparse calls this for subcommands
        super().__init__(**options)
        self.add_argument(_DEBUG, action="store_true", help="show the traceback of any error")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help.")

    def unknown_option(self, words: Sequence[str]) -> str | None:
        """Return the first word that looks like an option but is not one; None if there is none.

        argparse itself would report missing required options before such a word.
        """
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            # argparse accepts prefixes of options, and treats text with a space as a value.
            known = any(option.startswith(name) for option in self._option_string_actions)
            if re.match("--|-[a-zA-Z]", word) and " " not in word and not known:
                return word
        return None

    def meant_option(self, word: str) -> str | None:
        """Return the option that a mistyped word resembles; None if there is none.

        A word with a single dash, such as `-target`, also resembles the option `--target`.
        """
        name, options = word.partition("=")[0], list(self._option_string_actions)
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
        near += [option for option in options if option.startswith(f"-{name}")]
        return near[0] if near else None

    def refuse_mistyped(self, words: Sequence[str]) -> None:
        """Raise `InputError` if a word looks like an option but is not one."""
        if word := self.unknown_option(words):
            meant = self.meant_option(word)
            hint = f"did you mean {meant}?" if meant else f"see {self.prog} --help."
            raise InputError(f"unrecognized argument: {word}; {hint}")


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that several processes may run as one job."""
    title = "this process as one of several that form one job (SLURM and Open MPI set these values)"
    add = parser.add_argument_group(title).add_argument
    add("--coordinator-address", metavar="HOST:PORT", help="address where process 0 listens")
    add("--num-processes", type=int, metavar="N", help="number of processes")
    add("--process-id", type=int, metavar="I", help="index of this process, from 0")


def program_name(command: str = "") -> str:
    """Return the name of a program for messages: `name command`, or `python -m name command`.

    The second form is for a program that was started with `python -m`.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    return f"{module or Path(sys.argv[0]).name} {command}".rstrip()


def run(main: Callable[[], None]) -> None:
    """Run a command, and turn its errors into messages and exit codes.

    An `InputError` prints its message to stderr and exits with code 2. With `--debug` on the
    command line, its traceback is printed first. Ctrl-C exits with code 130 as soon as Python
    regains control, without waiting for work that JAX still runs.
    """
    # With the `aot` extra but no GPU, JAX would log a traceback about the missing CUDA.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    code = _exit_code(main)
    if code and (process := _process_index()) is not None:
        # The other processes abort if process 0 exits first.
        if code != _INTERRUPTED or process == 0:
            time.sleep(_GRACE)
        _exit_now(code)
    # Python's usual exit would wait for a device program that still runs, or abort the process.
    if code == _INTERRUPTED:
        _exit_now(code)
    if code:
        _end_by_itself(code)
        sys.exit(code)


def _exit_code(main: Callable[[], None]) -> int:
    """Run a command and return its exit code.

    Errors that users can fix are printed. Any other error is raised, except in a job of several
    processes, where it is printed as well.
    """
    try:
        with _ctrl_c_in_callbacks():
            main()
    except KeyboardInterrupt:
        return _report_interrupt()
    except Exception as error:
        if sentence := _sentence(error):
            if _DEBUG in sys.argv:
                traceback.print_exc()
            print(f"error: {sentence}", file=sys.stderr)
            return 2
        process = _process_index()
        if process is None:
            _end_by_itself(1)
            raise
        _report_failure(error, process)
        return 1
    return 0


def _end_by_itself(code: int) -> None:
    """Let this process exit soon after its main thread has ended, even if other threads still run.

    Otherwise Python waits for all threads at exit. If an orbax save fails to begin, its threads
    wait ten minutes for a folder that is never made.
    """

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(_GRACE)
        _exit_now(code)

    threading.Thread(target=watch, daemon=True).start()


def _report_interrupt() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
    _write("stderr", "\ninterrupted\n")
    return _INTERRUPTED


@contextlib.contextmanager
def _ctrl_c_in_callbacks() -> Generator[None]:
    """Handle Ctrl-C also in callbacks of the garbage collector, such as JAX's.

    Python itself ignores exceptions there.
    """
    before = sys.unraisablehook

    def hook(event: "sys.UnraisableHookArgs") -> None:
        if issubclass(event.exc_type, KeyboardInterrupt):
            _exit_now(_report_interrupt())
        before(event)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def ctrl_c_ends_at_once() -> Generator[None]:
    """Exit at once on Ctrl-C while JAX is imported.

    An extension module would turn the interrupt into an ImportError.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: _exit_now(_report_interrupt()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _sentence(error: Exception) -> str | None:
    """Return the message for an error that users can fix; None for other errors."""
    if isinstance(error, InputError):
        return str(error)
    # Any write can fail because the disk is full or the folder has been removed.
    if isinstance(error, OSError) and (error.filename or error.strerror):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return None


def _process_index() -> int | None:
    """Return the index of this process in a job of several processes; None for a single one."""
    # A module that is still being imported lacks its later attributes.
    distributed = getattr(sys.modules.get("jax"), "distributed", None)
    if distributed is None or not distributed.is_initialized():
        return None
    return sys.modules["jax"].process_index()


def _exit_now(code: int) -> NoReturn:
    """Exit this process at once, without waiting for JAX or for other processes."""
    _write("stdout")
    _write("stderr")
    os._exit(code)


def _write(name: Literal["stdout", "stderr"], text: str = "") -> None:
    """Write text to a stream and flush it; the stream may be closed or have lost its reader."""
    stream = getattr(sys, name)
    if stream is None:  # closed before Python started
        return
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


# Words in errors of XLA's runtime after another process is lost.
_LOST = ("unavailable", "deadline_exceeded", "heartbeat", "gloo", "connect")


def end_at_once(error: Exception) -> NoReturn:
    """Print an error and exit with code 2, as `run` does, but at once and from any thread."""
    _write("stderr", f"error: {_sentence(error) or error}\n")
    _exit_now(2)


def _report_failure(error: Exception, process: int) -> None:
    reason = str(error).partition("\n")[0]
    own = f"error: process {process}"
    runtime = type(error).__name__ == "JaxRuntimeError"
    if runtime and any(word in str(error).lower() for word in _LOST):
        sentence = f"{own} lost the other processes ({reason}); start all processes again."
    else:
        traceback.print_exc()
        sentence = f"{own} failed ({reason}), which ends the other processes of the job as well."
    print(sentence, file=sys.stderr, flush=True)


def call_program(program: Literal["train", "eval"], entry_point: str, *arguments: Any) -> None:
    """Call a function of the training or the evaluation program.

    In a wheel, the two programs are packages below `redrafter_jax`. In a checkout or an editable
    installation, they are the folders `train` and `eval`.

    Args:
      program: the program's name.
      entry_point: the function, as `module:function` within the program.
      arguments: arguments of the function.

    Raises:
      InputError: a package that the program needs is not installed.
    """
    installed = find_spec(f"redrafter_jax.{program}") is not None
    package = f"redrafter_jax.{program}" if installed else program
    module, _, function = entry_point.partition(":")
    try:
        getattr(import_module(f"{package}.{module}"), function)(*arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("redrafter_jax", program):
            raise
        raise InputError(
            f"redrafter-{program} needs the package {error.name}, which is not installed; run "
            "pip install '.[train]' in a checkout of redrafter-jax."
        ) from None


def refuse_unknown_command(word: str, commands: Iterable[str]) -> None:
    """Raise `InputError` if the first word is no command, option or override (`name=value`)."""
    known = list(commands)
    if not word or word.startswith("-") or "=" in word or word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known commands: {', '.join(known)}."
    raise InputError(f"{word!r} is not a command; {hint}")


def make_folder(folder: Path, name: str) -> None:
    """Make a folder for a command's output; call this before anything slow.

    `name` is the name of the folder in the error.

    Raises:
      InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"Cannot make {name} {folder}: {error.strerror}"
        raise InputError(f"{problem}; give a path where a folder can be made.") from None


def make_folder_of(file: Path, name: str) -> None:
    """Make the folder of a command's output file; call this before anything slow.

    `name` is the name of the file in the error.

    Raises:
      InputError: the folder cannot be made, or `file` is a folder.
    """
    make_folder(file.parent, f"the folder of {name}")
    if file.is_dir():
        raise InputError(f"{name} is {file}, which is a folder; give the path of a file.")
