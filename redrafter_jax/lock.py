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


@contextmanager
def hold(place: Path, name: str) -> Generator[None]:
    """Within the block no other run writes to a folder, or to a file and what goes on from it.

    The folder, or the file's, exists. Of processes that are one job the first one holds it.

    Raises:
      InputError: another run holds it; the sentence calls it by `name`, its setting.
    """
    path = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    lock = FileLock(path, blocking=False)
    holder = ""
    if is_first():
        try:
            lock.acquire()
            path.write_text(_describe_self(), encoding="utf-8")
        except Timeout:
            with suppress(OSError, UnicodeDecodeError):
                holder = path.read_text(encoding="utf-8")
            holder = holder or "another process"
    # The others wait for what the first one found.
    taken = broadcast_from_first(np.asarray(bool(holder)))
    if taken:
        raise InputError(
            f"{name} {place} is in use by {holder or 'another job'}; wait for its end, stop it, or "
            f"give another {name}."
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
