"""What asks a run to stop, and what still ends it at once."""

import signal
import subprocess
import sys

import pytest
from places import ROOT

from train.termination import watch_for_termination


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_a_second_ctrl_c_ends(asked: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with watch_for_termination() as asked_to_stop:
        assert asked_to_stop(1) is None
        signal.raise_signal(asked)
        assert asked_to_stop(2) is asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_ctrl_c_is_acknowledged_and_obeyed_while_python_has_no_turn() -> None:
    """As during XLA's compilation: the main thread is in C and Python's handlers must wait."""
    # A shell that was started with `&` ignores Ctrl-C, and so would its children.
    program = """
import hashlib, signal
from train.termination import watch_for_termination
signal.signal(signal.SIGINT, signal.default_int_handler)
with watch_for_termination():
    print("watching", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "\n"
        told = process.stdout.readline()
        assert told == "SIGINT: finishing this step and saving; Ctrl-C stops now, unsaved\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watch_for_termination() as asked_to_stop:
            signal.raise_signal(signal.SIGINT)
            assert asked_to_stop(1) is None
            signal.raise_signal(signal.SIGTERM)
            assert asked_to_stop(2) is signal.SIGTERM
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
