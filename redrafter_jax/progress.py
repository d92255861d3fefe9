"""Progress reports of long work, on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redrafter_jax.parallel.processes import is_first

# Seconds between two lines if stderr is not a terminal.
_INTERVAL = 10.0


@contextlib.contextmanager
def progress(total: int, description: str, done: int = 0) -> Generator[Callable[[int], None]]:
    """Yield a function that takes the amount of work done since its last call, and reports it.

    On a terminal, a bar shows the progress. Elsewhere, a line is written at most every 10 seconds,
    with an estimate of the time left. In a job of several processes, only the first one reports.

    Args:
      total: amount of work, in units of the caller's choice.
      description: what the work is, for the reports.
      done: amount of work that was done before this call.
    """
    if not is_first():
        yield lambda _: None
        return
    console = Console(stderr=True)
    if console.is_terminal:
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(description, total=total, completed=done)
            yield lambda amount: bar.advance(task, amount)
        return
    begun, now = done, done
    started = last = time.perf_counter()

    def write(rest: str = "") -> None:
        sys.stderr.write(f"{description}: {now} of {total}{rest}\n")
        sys.stderr.flush()

    def advance(amount: int) -> None:
        nonlocal now, last
        now += amount
        if (clock := time.perf_counter()) - last >= _INTERVAL:
            left = (clock - started) / max(now - begun, 1) * max(total - now, 0)
            # The first items to end do not predict the time of the others.
            reliable = 10 * (now - begun) >= total - begun
            write(f", about {left:.0f} s left" if reliable else "")
            last = clock

    write()
    yield advance


def track[Item](work: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    """Yield the items, and report progress; see `progress`."""
    with progress(total, description) as advance:
        for item in work:
            yield item
            advance(1)
