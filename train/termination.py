"""Being asked to stop: by a scheduler, which sends SIGTERM some time before, or by Ctrl-C."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils


@contextmanager
def watch_for_termination() -> Generator[Callable[[int], signal.Signals | None]]:
    """Within the block SIGTERM and the first Ctrl-C end nothing.

    The function given tells which of them asks to stop after a step, None if none does. A second
    Ctrl-C ends as ever; where it is ignored, as in a script's background, it stays so. Where
    several processes are one job, SIGTERM may be sent to any of them, and all stop after the same
    step: JAX agrees on one; Ctrl-C ends them unsaved.
    """
    if jax.process_count() > 1:
        agreed = multihost_utils.reached_preemption_sync_point
        yield lambda step: signal.SIGTERM if agreed(step) else None
        return
    came: signal.Signals | None = None

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = signal.Signals(number)
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if (interrupt := signal.getsignal(signal.SIGINT)) is not signal.SIG_IGN:
        before[signal.SIGINT] = interrupt
    for one in before:
        signal.signal(one, note)
    try:
        yield lambda _step: came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
