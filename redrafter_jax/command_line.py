"""How every command reads its words and ends: errors as sentences, exit codes. Needs no JAX."""

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

# As shells count a command that Ctrl-C ended.
_INTERRUPTED = 130
# Seconds in which processes that fail alike tell so, each by itself, before the first one leaves,
# and those that other threads have to end after an error.
_GRACE = 3
_DEBUG = "--debug"


class Parser(argparse.ArgumentParser):
    """Errors as one sentence, without the usage; `--debug` beside `--help`."""

    def __init__(self, **options: Any) -> None:  # argparse makes those of subcommands itself
        super().__init__(**options)
        self.add_argument(_DEBUG, action="store_true", help="show the traceback of any error")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help.")

    def unknown_option(self, words: Sequence[str]) -> str | None:
        """The first word that looks like an option and is none.

        argparse would first ask for required options that are missing.
        """
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            # What begins an option stands for it, and text with a space is a value.
            known = any(option.startswith(name) for option in self._option_string_actions)
            if re.match("--|-[a-zA-Z]", word) and " " not in word and not known:
                return word
        return None

    def meant_option(self, word: str) -> str | None:
        """The option that is spelt much like a word, or begins like one of a single dash."""
        name, options = word.partition("=")[0], list(self._option_string_actions)
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
        near += [option for option in options if option.startswith(f"-{name}")]
        return near[0] if near else None

    def refuse_mistyped(self, words: Sequence[str]) -> None:
        """Refuse a word that looks like an option and is none, and name the one that was meant."""
        if word := self.unknown_option(words):
            meant = self.meant_option(word)
            hint = f"did you mean {meant}?" if meant else f"see {self.prog} --help."
            raise InputError(f"unrecognized argument: {word}; {hint}")


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Options of a command that several processes may run as one job."""
    title = "one of several processes that are one job (SLURM and Open MPI are known without)"
    add = parser.add_argument_group(title).add_argument
    add("--coordinator-address", metavar="HOST:PORT", help="where process 0 listens")
    add("--num-processes", type=int, metavar="N", help="in all")
    add("--process-id", type=int, metavar="I", help="of this one, from 0")


def program_name(command: str = "") -> str:
    """`python -m name command` where Python was started so, else `name command`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    return f"{module or Path(sys.argv[0]).name} {command}".rstrip()


def run(main: Callable[[], None]) -> None:
    """Run a command; an `InputError` becomes its sentence on stderr and exit code 2.

    With `--debug` on the command line the traceback of any error comes first. Ctrl-C ends with exit
    code 130, as soon as Python has its turn: it waits for nothing that JAX still runs.
    """
    # With the packages of the `aot` extra and no GPU, JAX would log a traceback: no CUDA was found.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    code = _exit_code(main)
    if code and (process := _process_index()) is not None:
        # Where process 0 leaves first the others abort.
        if code != _INTERRUPTED or process == 0:
            time.sleep(_GRACE)
        _exit_now(code)
    # At Python's usual end a program that still runs would be waited for, or abort the process.
    if code == _INTERRUPTED:
        _exit_now(code)
    if code:
        _end_by_itself(code)
        sys.exit(code)


def _exit_code(main: Callable[[], None]) -> int:
    """Of the command. Errors that the user can mend are printed, others are raised."""
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
    """See that a process whose command has failed does not go on when its main thread has ended.

    Python waits for all threads, and orbax's, of a save that could not begin, wait ten minutes for
    a folder that is not made.
    """

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(_GRACE)
        _exit_now(code)

    threading.Thread(target=watch, daemon=True).start()


def _report_interrupt() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends it, whatever this waits for
    _write("stderr", "\ninterrupted\n")
    return _INTERRUPTED


@contextlib.contextmanager
def _ctrl_c_in_callbacks() -> Generator[None]:
    """Hear Ctrl-C also in callbacks, such as JAX's of the garbage collector: Python ignores it."""
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
    """While JAX is imported: an extension would raise an ImportError for a KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: _exit_now(_report_interrupt()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _sentence(error: Exception) -> str | None:
    """The sentence for an error that the user can mend; None for others."""
    if isinstance(error, InputError):
        return str(error)
    # A full disk, or a folder that was taken away meanwhile, may meet any file that is written.
    if isinstance(error, OSError) and (error.filename or error.strerror):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return None


def _process_index() -> int | None:
    """Of this process, where several are one job."""
    # While it is imported a module lacks what comes later.
    distributed = getattr(sys.modules.get("jax"), "distributed", None)
    if distributed is None or not distributed.is_initialized():
        return None
    return sys.modules["jax"].process_index()


def _exit_now(code: int) -> NoReturn:
    """End this process, and wait for nothing that JAX runs or other processes do."""
    _write("stdout")
    _write("stderr")
    os._exit(code)


def _write(name: Literal["stdout", "stderr"], text: str = "") -> None:
    """The text and all before it, to a stream that may be closed, or whose reader may be gone."""
    stream = getattr(sys, name)
    if stream is None:  # closed when Python began
        return
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


# What errors of XLA's runtime say when another process is gone.
_LOST = ("unavailable", "deadline_exceeded", "heartbeat", "gloo", "connect")


def end_at_once(error: Exception) -> NoReturn:
    """End this process, from any thread, as `run` ends a command that raises this error."""
    _write("stderr", f"error: {_sentence(error) or error}\n")
    _exit_now(2)


def _report_failure(error: Exception, process: int) -> None:
    reason = str(error).partition("\n")[0]
    own = f"error: process {process}"
    runtime = type(error).__name__ == "JaxRuntimeError"
    if runtime and any(word in str(error).lower() for word in _LOST):
        sentence = f"{own} lost the others ({reason}); start all of them again."
    else:
        traceback.print_exc()
        sentence = f"{own} failed ({reason}), and the others end with it."
    print(sentence, file=sys.stderr, flush=True)


def call_program(program: Literal["train", "eval"], entry_point: str, *arguments: Any) -> None:
    """Call a function of the training or the evaluation program, `module:function` below it.

    In a wheel the two programs are packages below `redrafter_jax`; in a checkout, which an editable
    installation uses, they are the folders `train` and `eval`.

    Raises:
      InputError: a package that it needs is not installed.
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
            f"redrafter-{program} needs the package {error.name}, which is not installed; in a "
            "checkout of redrafter-jax, pip install '.[train]' installs all it needs."
        ) from None


def refuse_unknown_command(word: str, commands: Iterable[str]) -> None:
    """Refuse a first word that is neither a command, nor an option, nor an override."""
    known = list(commands)
    if not word or word.startswith("-") or "=" in word or word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known commands: {', '.join(known)}."
    raise InputError(f"{word!r} is no command; {hint}")


def make_folder(folder: Path, name: str) -> None:
    """Make a folder that a command writes to, before anything slow is done.

    Raises:
      InputError: it cannot be made; the sentence calls it by `name`, its setting.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make {name} {folder}: {error.strerror}.") from None


def make_folder_of(file: Path, name: str) -> None:
    """Make the folder of a file that a command writes in the end, and refuse a folder as the file.

    Raises:
      InputError: as said; the sentence calls the file by `name`, its setting.
    """
    make_folder(file.parent, f"the folder of {name}")
    if file.is_dir():
        raise InputError(f"{name} is {file}, a folder; name a file in it.")
