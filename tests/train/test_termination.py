"""What asks a run to stop, and what still ends it at once."""

import signal

import pytest

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
