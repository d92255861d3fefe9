"""What process 0 tells the others, over real connections within one process."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from redrafter_jax.errors import InputError
from redrafter_jax.parallel import links
from redrafter_jax.parallel.links import (
    Follower,
    Leader,
    LostProcessError,
    accept,
    listen,
    reach,
)

KEY = bytes(range(32))
SECONDS = 30.0


class Job:
    """A leader and two followers, and their ends of the connections."""

    def __init__(self) -> None:
        with listen() as listener:
            port = listener.getsockname()[1]
            with ThreadPoolExecutor() as pool:
                accepted = pool.submit(accept, listener, KEY, 2, SECONDS)
                # The later one comes first.
                self.ends = {number: reach("localhost", port, KEY, number) for number in (2, 1)}
                self.own = accepted.result()
        self.leader = Leader(self.own)
        self.followers = {number: Follower(end) for number, end in self.ends.items()}

    def kill(self, number: int) -> None:
        """As the system does with the connections of a process that is killed."""
        self.ends[number].shutdown(socket.SHUT_RDWR)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.leader.close()
    for one in (*made.ends.values(), *made.own.values()):
        one.close()


def test_messages_come_in_order_and_none_is_the_last(job: Job) -> None:
    large = b"x" * 10_000_000  # more than the system keeps for a reader
    sending = threading.Thread(target=lambda: list(map(job.leader.tell, ["a", [1, 2], large])))
    sending.start()
    for follower in job.followers.values():
        assert [follower.hear() for _ in range(3)] == ["a", [1, 2], large]
    sending.join()
    job.leader.end()
    assert [follower.hear() for follower in job.followers.values()] == [None, None]


def test_hints_are_heard_aside_while_nobody_asks_for_messages(job: Job) -> None:
    hints = {number: SimpleQueue[Any]() for number in job.followers}
    for number, follower in job.followers.items():
        follower.hear_hints(hints[number].put)
    job.leader.hint(("regex", "a+"))
    assert [one.get(timeout=SECONDS) for one in hints.values()] == [("regex", "a+")] * 2
    job.leader.tell("a")
    job.leader.hint("more")
    job.leader.tell("b")
    for number, follower in job.followers.items():
        assert [follower.hear(), follower.hear()] == ["a", "b"]
        assert hints[number].get(timeout=SECONDS) == "more"
    job.followers[1].hear_hints(Mock(side_effect=RuntimeError("can't start new thread")))
    job.leader.hint("whose taking fails")
    job.leader.tell("c")
    assert job.followers[1].hear() == "c", "messages are heard on"
    job.kill(1)
    assert job.leader.wait_for_loss(SECONDS) is not None
    job.leader.hint("to nobody")


def test_all_go_by_the_value_of_process_0(job: Job) -> None:
    assert job.leader.agree(3.5) == 3.5
    assert [follower.agree(7.0) for follower in job.followers.values()] == [3.5, 3.5]


def test_a_process_that_is_gone_is_told_by_its_number(job: Job) -> None:
    lost = SimpleQueue[LostProcessError]()
    job.leader.watch(lost.put, lambda: None)
    assert job.leader.wait_for_loss(0.0) is None
    job.kill(2)
    error = lost.get(timeout=SECONDS)
    assert error.strerror == "process 2 is gone; start all processes again"
    assert job.leader.wait_for_loss(SECONDS) is job.leader.lost is error
    with pytest.raises(LostProcessError, match="process 2 is gone"):
        # What is sent first the system may still take.
        list(map(job.leader.tell, [b"x" * 100_000] * 1000))


def test_the_loss_of_process_0_is_heard_and_told(job: Job) -> None:
    told = SimpleQueue[LostProcessError]()
    job.followers[1].watch(told.put)
    job.leader.tell("the last word")
    job.leader.close()
    assert job.followers[1].hear() == "the last word"
    assert "process 0, which leads, is gone" in str(told.get(timeout=SECONDS))
    assert job.followers[2].hear() == "the last word"
    for follower in job.followers.values():
        with pytest.raises(LostProcessError, match="process 0, which leads, is gone"):
            follower.hear()


class Unknown:
    """As of another release: reading it fails."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_message_that_cannot_be_read_is_a_loss(job: Job) -> None:
    told = SimpleQueue[LostProcessError]()
    job.followers[1].watch(told.put)
    job.leader.tell(Unknown())
    with pytest.raises(LostProcessError):
        job.followers[1].hear()
    assert not told.empty()


def test_the_others_hear_who_is_gone(job: Job) -> None:
    job.kill(1)
    assert job.leader.wait_for_loss(SECONDS) is not None
    job.leader.close()
    with pytest.raises(LostProcessError, match="process 1 is gone"):
        job.followers[2].hear()


def test_what_came_before_the_watch_is_told(job: Job) -> None:
    told = SimpleQueue[Any]()
    job.followers[2].ask_for_end()
    job.kill(1)
    assert job.leader.wait_for_loss(SECONDS) is not None
    job.leader.watch(told.put, lambda: told.put("asked"))
    due = {str(job.leader.lost), "asked"}
    while due:
        due.discard(str(told.get(timeout=SECONDS)))
    with pytest.raises(LostProcessError):
        job.followers[2].hear()
    job.followers[2].watch(told.put)
    assert "process 1 is gone" in str(told.get(timeout=SECONDS))


def test_after_the_end_nobody_is_lost(job: Job) -> None:
    told = SimpleQueue[Any]()
    job.leader.watch(told.put, lambda: told.put("asked"))
    for follower in job.followers.values():
        follower.watch(told.put)
    job.leader.end()
    for number in job.followers:
        job.kill(number)
    job.leader.close()
    assert job.leader.wait_for_loss(0.2) is None
    assert told.empty()


def test_any_process_may_ask_for_the_end(job: Job) -> None:
    asked = SimpleQueue[str]()
    job.leader.watch(lambda error: None, lambda: asked.put("asked"))
    job.followers[1].ask_for_end()
    assert asked.get(timeout=SECONDS) == "asked"
    # It goes on to follow.
    job.leader.tell("more")
    assert job.followers[1].hear() == "more"


def test_strangers_are_left_out() -> None:
    with listen() as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        silent = socket.create_connection(("localhost", port))
        silent.close()
        accepted = pool.submit(accept, listener, KEY, 1, SECONDS)
        with pytest.raises(InputError, match=rf"Process 1 has connected to localhost:{port}, but"):
            reach("localhost", port, KEY[::-1], 1)
        with closing(reach("localhost", port, KEY, 1)) as friend:
            (other,) = accepted.result().values()
            with closing(other):
                assert other.getpeername()[1] == friend.getsockname()[1]


def test_nothing_is_heard_of_a_stranger_that_poses_as_process_0() -> None:
    with listen() as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        reaching = pool.submit(reach, "localhost", port, KEY, 1)
        other, _ = listener.accept()
        with closing(other):
            other.sendall(bytes(64))  # a challenge, and no proof
            with pytest.raises(InputError, match="of this job does not"):
                reaching.result()


def test_a_stranger_that_drips_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_HELLO_SECONDS", 0.3)
    with listen() as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        ended = threading.Event()
        with closing(socket.create_connection(("localhost", port))) as stranger:

            def drip() -> None:
                with suppress(OSError):
                    while not ended.wait(0.1):
                        stranger.sendall(b"x")

            dripping = pool.submit(drip)
            accepted = pool.submit(accept, listener, KEY, 1, SECONDS)
            began = time.monotonic()
            try:
                with closing(reach("localhost", port, KEY, 1)):
                    took = time.monotonic() - began
                    accepted.result()[1].close()
            finally:
                ended.set()
            dripping.result()
    assert took < 3  # 6.8 s if each byte had its own time


def test_strangers_who_come_again_and_again_do_not_prolong_the_wait() -> None:
    with listen() as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        ended = threading.Event()

        def come_again() -> None:
            with suppress(OSError):
                while not ended.wait(0.01):
                    socket.create_connection(("localhost", port)).close()

        coming = pool.submit(come_again)
        accepted = pool.submit(accept, listener, KEY, 1, 1.0)
        try:
            with pytest.raises(InputError, match="within 1 s"):
                accepted.result(timeout=SECONDS)
        finally:
            ended.set()
        coming.result()


@pytest.mark.long
def test_who_does_not_come_is_named() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
        with ThreadPoolExecutor() as pool:
            accepted = pool.submit(accept, listener, KEY, 3, 5.0)
            with (
                closing(reach("localhost", port, KEY, 2)),
                pytest.raises(InputError, match="No connection came from the processes 1, 3"),
            ):
                accepted.result()


def test_a_host_that_cannot_be_reached_is_named() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        InputError, match=rf"Process 4 cannot connect .* at localhost:{port} \(Conn"
    ):
        reach("localhost", port, KEY, 4)
