"""Being asked to stop: by a scheduler, which sends SIGTERM some time before, or by Ctrl-C."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

import jax
from jax.experimental import multihost_utils

# Seconds that Python gets to end by itself after a second Ctrl-C. It cannot while XLA compiles.
_GRACE = 1.0
_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def watch_for_termination() -> Generator[Callable[[int], signal.Signals | None]]:
    """Within the block SIGTERM and the first Ctrl-C end nothing; they are acknowledged on stderr.

    The yielded function returns which of them asks to stop after a step, or None. A second Ctrl-C
    ends the process within a second. An ignored Ctrl-C, as of a script's background job, stays
    ignored. Where several processes are one job, SIGTERM may be sent to any of them, and all stop
    after the same step, on which JAX agrees; Ctrl-C ends them unsaved.
    """
    if jax.process_count() > 1:
        agreed = multihost_utils.reached_preemption_sync_point
        yield lambda step: signal.SIGTERM if agreed(step) else None
        return
    received: signal.Signals | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        if received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        received = received or signal.Signals(number)

    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if (interrupt := signal.getsignal(signal.SIGINT)) is not signal.SIG_IGN:
        before[signal.SIGINT] = interrupt
    for one in before:
        signal.signal(one, handle)
    try:
        with _acknowledge():
            yield lambda _step: received
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def _acknowledge() -> Generator[None]:
    """Answer signals from a thread: Python's handlers wait until XLA has compiled or computed."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    left = threading.Event()

    def listen() -> None:
        asked = False
        while number := os.read(reading, 1):
            if asked and number[0] == signal.SIGINT and not left.wait(_GRACE):
                with suppress(OSError):
                    os.write(2, _SHOW_CURSOR * os.isatty(2) + b"\nstopped, unsaved\n")
                os._exit(130)
            if not asked and number[0] in (signal.SIGINT, signal.SIGTERM):
                asked = True
                name = signal.Signals(number[0]).name
                message = f"\n{name}: finishing this step and saving; Ctrl-C stops now\n"
                with suppress(OSError):
                    os.write(2, message.encode())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(previous)
        os.close(writing)
        listener.join()
        os.close(reading)
