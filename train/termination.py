"""Being asked to stop: a scheduler that takes the machine back sends SIGTERM some time before."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils


@contextmanager
def watch_for_termination() -> Generator[Callable[[int], bool]]:
    """Within the block SIGTERM ends nothing; the function given tells whether to stop after a step.

    Where several processes are one job, any of them may be sent it, and all stop after the same
    step: JAX agrees on one.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda _step: came
    finally:
        signal.signal(signal.SIGTERM, before)
