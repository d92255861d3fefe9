"""How far a long measurement is, on stderr."""

import sys
import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redrafter_jax.parallel.processes import is_first

# Seconds between two lines where stderr is no terminal.
_INTERVAL = 10.0


def track[Item](work: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    """Yield the items; a bar on a terminal, else a line now and then, with the time left.

    Of several processes that are one job only the first one reports.
    """
    if not is_first():
        yield from work
        return
    console = Console(stderr=True)
    if console.is_terminal:
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(work, total=total, description=description)
        return
    started = said = time.perf_counter()
    print(f"{description}: 0 of {total}", file=sys.stderr, flush=True)
    for done, item in enumerate(work, start=1):
        yield item
        now = time.perf_counter()
        if now - said >= _INTERVAL:
            left = (now - started) / done * (total - done)
            line = f"{description}: {done} of {total}, about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
            said = now
