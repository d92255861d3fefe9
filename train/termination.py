"""Being asked to stop: a scheduler that takes the machine back sends SIGTERM some time before."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def watch_for_termination() -> Generator[Callable[[], bool]]:
    """Within the block SIGTERM ends nothing; the function given tells whether it has come."""
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before)
