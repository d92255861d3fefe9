"""A lock on an output folder or file; the operating system releases the lock of a dead process."""

import getpass
import os
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import broadcast_from_first, is_first

# The result of locking in the first process.
_FREE, _HELD, _FAILED = range(3)


@contextmanager
def hold(place: Path, name: str) -> Generator[None]:
    """Lock an output against other runs while the context is open.

    In a job of several processes, the first process holds the lock.

    Args:
      place: a folder that exists, or a file in such a folder; the lock of a file also covers the
        files derived from it.
      name: name of the setting that holds `place`, for errors.

    Raises:
      InputError: another run holds the lock, or the place cannot be locked.
    """
    path = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    # There is no fallback to a file that locks by its existence, because such a file would outlive
    # a killed run.
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    found, told = _FREE, ""
    if is_first():
        try:
            lock.acquire()
            path.write_text(_describe_self(), encoding="utf-8")
        except Timeout:
            found = _HELD
            with suppress(OSError, UnicodeDecodeError):
                told = path.read_text(encoding="utf-8")
            told = told or "another process"
        except OSError as error:
            found, told = _FAILED, error.strerror or str(error)
            lock.release()
    # The other processes wait for the result of the first process.
    found = int(broadcast_from_first(np.asarray(found)))
    if found == _HELD:
        raise InputError(
            f"{name} {place} is in use by {told or 'another job'}; wait until it ends, stop it, or "
            f"give another {name}."
        )
    if found == _FAILED:
        raise InputError(
            f"{name} {place} cannot be locked ({told or 'the first process says why'}); give "
            f"another {name} where files can be written and locked."
        )
    try:
        yield
    finally:
        if is_first():
            with suppress(OSError):  # the folder may have been removed in the meantime
                path.unlink(missing_ok=True)
        lock.release()


def _describe_self() -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        user = f"user {os.getuid()}"
    return f"process {os.getpid()} of {user} on {platform.node()}, since {started}"
