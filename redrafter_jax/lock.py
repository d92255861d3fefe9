"""One run at a time in a folder: a lock that the system takes away from a process that dies."""

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

# What the first process finds of the lock.
_FREE, _HELD, _FAILED = range(3)


@contextmanager
def hold(place: Path, name: str) -> Generator[None]:
    """Within the block no other run writes to a folder, or to a file and what goes on from it.

    The folder, or the file's, exists. Of processes that are one job the first one holds it.

    Raises:
      InputError: another run holds it, or it cannot be locked; the sentence calls it by `name`, its
        setting.
    """
    path = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    # In place of the system's lock a file that merely exists would outlive a run that is killed.
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
    # The others wait for what the first one found.
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
            with suppress(OSError):  # the folder was taken away meanwhile
                path.unlink(missing_ok=True)
        lock.release()


def _describe_self() -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        user = f"user {os.getuid()}"
    return f"process {os.getpid()} of {user} on {platform.node()}, since {started}"
