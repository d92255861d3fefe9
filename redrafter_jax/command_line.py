"""What every command line shares: its settings from a file and overrides, errors as sentences."""

import argparse
import contextlib
import difflib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NoReturn

import jax

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import join
from redrafter_jax.settings.files import SettingsT, dump_settings, load_settings

# As shells count a command that Ctrl-C ended.
_INTERRUPTED = 130
# Seconds in which processes that fail alike tell so, each by itself, before the first one leaves.
_GRACE = 3


def run(main: Callable[[], None]) -> None:
    """Run a command; an `InputError` becomes its sentence on stderr and exit code 2.

    Ctrl-C ends with exit code 130, as soon as Python has its turn: it waits for nothing that JAX
    still runs.
    """
    # With the packages of the `aot` extra and no GPU, JAX would log a traceback: no CUDA was found.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    code = _exit_code(main)
    if code and jax.distributed.is_initialized():
        # Where process 0 leaves first the others abort.
        if code != _INTERRUPTED or jax.process_index() == 0:
            time.sleep(_GRACE)
        _leave(code)
    # At Python's usual end a program that still runs would be waited for, or abort the process.
    if code == _INTERRUPTED:
        _leave(code)
    if code:
        sys.exit(code)


def _exit_code(main: Callable[[], None]) -> int:
    """Of the command, whose errors are told; those of programming are raised."""
    try:
        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends it, whatever this waits for
        _write("stderr", "\ninterrupted\n")
        return _INTERRUPTED
    except Exception as error:
        if sentence := _sentence(error):
            print(f"error: {sentence}", file=sys.stderr)
            return 2
        if not jax.distributed.is_initialized():
            raise
        _tell_of_failure(error)
        return 1
    return 0


def _sentence(error: Exception) -> str | None:
    """What the user can mend, told; None for other errors."""
    if isinstance(error, InputError):
        return str(error)
    # A full disk, or a folder that was taken away meanwhile, may meet any file that is written.
    if isinstance(error, OSError) and (error.filename or error.strerror):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return None


def _leave(code: int) -> NoReturn:
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


def _tell_of_failure(error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    own = f"error: process {jax.process_index()}"
    runtime = isinstance(error, jax.errors.JaxRuntimeError)
    if runtime and any(word in str(error).lower() for word in _LOST):
        sentence = f"{own} lost the others ({reason}); start all of them again."
    else:
        traceback.print_exc()
        sentence = f"{own} failed ({reason}), and the others end with it."
    print(sentence, file=sys.stderr, flush=True)


def refuse_unknown_command(word: str, commands: Iterable[str]) -> None:
    """Refuse a first word that is neither a command, nor an option, nor an override.

    Raises:
      InputError: it is none of them.
    """
    known = list(commands)
    if not word or word.startswith("-") or "=" in word or word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known commands: {', '.join(known)}."
    raise InputError(f"{word!r} is no command; {hint}")


def parse_settings(
    model: type[SettingsT],
    description: str,
    arguments: Sequence[str] | None = None,
    *,
    command: str | None = None,
    processes: bool = False,
) -> SettingsT:
    """Settings from `--config FILE key.path=value ...`.

    `--print-config` prints the resolved whole and exits. With `processes` the command may be one of
    several that are one job, and joins the others here. A `command` of a program that has several
    is called so in the help.

    Raises:
      InputError: the file cannot be read, or any value is not valid; all problems are listed.
    """
    parser = argparse.ArgumentParser(prog=_program_name(command), description=description)
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a setting")
    if processes:
        _add_processes(parser)
    parsed = parser.parse_intermixed_args(arguments)
    settings = load_settings(model, parsed.config, parsed.overrides)
    if parsed.print_config:
        print(dump_settings(settings), end="")
        sys.exit(0)
    if processes:
        join(parsed.coordinator_address, parsed.num_processes, parsed.process_id)
    return settings


def _add_processes(parser: argparse.ArgumentParser) -> None:
    title = "one of several processes that are one job (SLURM and Open MPI are known without)"
    add = parser.add_argument_group(title).add_argument
    add("--coordinator-address", metavar="HOST:PORT", help="where process 0 listens")
    add("--num-processes", type=int, metavar="N", help="in all")
    add("--process-id", type=int, metavar="I", help="of this one, from 0")


def _program_name(command: str | None) -> str | None:
    """`python -m name command` where Python was started so; None leaves it to argparse."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return None
    return f"python -m {spec.name.removesuffix('.__main__')} {command or ''}".rstrip()


def make_folder(folder: Path, name: str) -> None:
    """Make a folder that a command writes to, before anything slow is done.

    Raises:
      InputError: it cannot be made; the sentence calls it by `name`, its setting.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make {name} {folder}: {error.strerror}.") from None
