"""Requests to stop: SIGTERM, which schedulers send before they kill a job, and Ctrl-C."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

import jax
from jax.experimental import multihost_utils

# Seconds that Python has to exit by itself after a second Ctrl-C; it cannot while XLA compiles.
_GRACE = 1.0
_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def watch_for_termination() -> Generator[Callable[[int], signal.Signals | None]]:
    """Record SIGTERM and the first Ctrl-C within the block, and report them on stderr.

    The yielded function takes the number of the finished step, and returns the signal that was
    received, or None. A second Ctrl-C ends the process within a second. If the process ignored
    Ctrl-C before, as background jobs of scripts do, Ctrl-C stays ignored.

    In a job of several processes, any process may receive SIGTERM. JAX then makes all processes
    stop after the same step. Ctrl-C ends such a job without saving.
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
    """Report signals from a thread, because Python's signal handlers wait while XLA runs."""
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
                message = f"\n{name}: finishing this step and saving; Ctrl-C stops now, unsaved\n"
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
