"""Messages from process 0 of a job to the other processes, and detection of lost processes.

The connections are plain TCP and independent of JAX's collectives. A process that waits for a
message uses no device. The connections of a process that dies close at once, but a collective may
wait for such a process for minutes.
"""

import errno
import hmac
import json
import logging
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import jax

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.processes import bytes_from_first, is_first

_log = logging.getLogger(__name__)

# Seconds to wait for the connections, and for a new connection to prove that it knows the key.
_PATIENCE, _HELLO_SECONDS = 60.0, 5.0
# Bytes of the job's secret, of a challenge and of a signature. JAX's own channel shares the secret.
_KEY = 32
# Bytes of a process's index.
_NUMBER = 4

Value = TypeVar("Value")


class Hint(NamedTuple):
    """A message that a follower handles as soon as it arrives, possibly before earlier messages.

    A hint may speed up later work, but must not change any result.
    """

    content: Any


class LostProcessError(ConnectionError):
    """The error for a process of the job that has ended too early; `name` is its name."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ECONNRESET, f"{name} is gone; start all processes again")
        self._name = name

    def __reduce__(self) -> tuple[type["LostProcessError"], tuple[str]]:
        return LostProcessError, (self._name,)


class Leader:
    """The connections of process 0 to the other processes.

    Args:
      others: connection to each other process, by process number.

    Attributes:
      lost: the error about the first process that was lost; None while all processes are alive.
    """

    def __init__(self, others: Mapping[int, socket.socket]) -> None:
        self.lost: LostProcessError | None = None
        self._others = others
        self._sends = threading.Lock()
        self._loses = threading.Event()
        self._asked = self._ends = False
        self._on_loss: Callable[[LostProcessError], object] = lambda error: None
        self._on_request: Callable[[], object] = lambda: None
        for number, other in others.items():
            threading.Thread(target=self._watch, args=(number, other), daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send a message to all other processes.

        Raises:
          LostProcessError: a process is gone.
        """
        content = pickle.dumps(message)
        with self._sends:
            for number, other in self._others.items():
                try:
                    other.sendall(content)
                except OSError:
                    raise self._lose(number) from None

    def hint(self, content: Any) -> None:
        """Send a hint to all other processes; any thread may call this. See `Hint`."""
        with suppress(LostProcessError):  # which `tell` raises, too
            self.tell(Hint(content))

    def agree(self, value: Value) -> Value:
        """Return `value` here, and from `Follower.agree` in all other processes."""
        self.tell(value)
        return value

    def watch(
        self, on_loss: Callable[[LostProcessError], object], on_request: Callable[[], object]
    ) -> None:
        """Set the callbacks for a lost process and for a process that asks to end the job.

        The callbacks replace earlier ones. A callback is called at once if its event has already
        happened. It may be called more than once, and from other threads.

        Args:
          on_loss: called if a process is lost before `end` is called.
          on_request: called if a process has called `Follower.ask_for_end`.
        """
        self._on_loss, self._on_request = on_loss, on_request
        if self.lost is not None:
            on_loss(self.lost)
        if self._asked:
            on_request()

    def wait_for_loss(self, seconds: float) -> LostProcessError | None:
        """Wait up to `seconds` for the loss of a process; return the error, or None."""
        self._loses.wait(seconds)
        return self.lost

    def end(self) -> None:
        """Tell all other processes that no more messages will come."""
        self._ends = True
        with suppress(LostProcessError):
            self.tell(None)

    def close(self) -> None:
        """Close the connections; to the other processes, process 0 is then lost."""
        self._ends = True
        for other in self._others.values():
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)

    def _watch(self, number: int, other: socket.socket) -> None:
        with suppress(OSError):
            while other.recv(1):
                self._asked = True
                self._on_request()
        if not self._ends:
            self._on_loss(self._lose(number))

    def _lose(self, number: int) -> LostProcessError:
        if self.lost is None:
            self.lost = LostProcessError(f"process {number}")
            # Sent without waiting: a process whose buffer is full learns only that process 0 is
            # lost.
            for other in self._others.values():
                with suppress(OSError):
                    other.send(pickle.dumps(self.lost), socket.MSG_DONTWAIT)
        self._loses.set()
        return self.lost


class Follower:
    """The connection of a process to process 0.

    Args:
      first: connection to process 0.
    """

    def __init__(self, first: socket.socket) -> None:
        self._first = first
        self._heard = SimpleQueue[Any]()
        self._lost: LostProcessError | None = None
        self._on_loss: Callable[[LostProcessError], object] = lambda error: None
        self._on_hint: Callable[[Any], object] = lambda content: None
        threading.Thread(target=self._listen, daemon=True).start()

    def hear(self) -> Any:
        """Wait for the next message that is no hint, and return it; None after the last message.

        Raises:
          LostProcessError: process 0 is lost, or reports that another process is lost.
        """
        message = self._heard.get()
        if isinstance(message, LostProcessError):
            raise message
        return message

    def agree(self, value: Value) -> Value:
        """Return the value that process 0 gave to `Leader.agree`; `value` is ignored."""
        del value
        return self.hear()

    def hear_hints(self, on_hint: Callable[[Any], object]) -> None:
        """Set the function to call, from another thread, with the content of each hint."""
        self._on_hint = on_hint

    def watch(self, on_loss: Callable[[LostProcessError], object]) -> None:
        """Set the callback for a lost process; it replaces an earlier callback.

        The callback is called at once if a process is already lost. It may be called more than
        once, and from another thread.
        """
        self._on_loss = on_loss
        if self._lost is not None:
            on_loss(self._lost)

    def ask_for_end(self) -> None:
        """Ask process 0 to end the job."""
        with suppress(OSError):
            self._first.sendall(b".")

    def _listen(self) -> None:
        message: Any = ...
        with self._first.makefile("rb") as stream:
            while message is not None:
                try:
                    message = pickle.load(stream)
                except Exception:  # unpickling may raise anything, for instance between releases
                    message = LostProcessError("process 0, which leads,")
                if isinstance(message, LostProcessError):
                    self._lost = message
                    self._on_loss(message)
                    self._heard.put(message)
                    return
                if isinstance(message, Hint):
                    try:
                        self._on_hint(message.content)
                    except Exception:  # a lost hint costs time, a lost listener everything
                        _log.exception("A hint of process 0 was not taken.")
                else:
                    self._heard.put(message)


def meet(address: str | None = None) -> Leader | Follower:
    """Connect the processes of a job; every process must make this call.

    Args:
      address: HOST:PORT of JAX's coordinator in process 0, whose host the other processes connect
        to; None takes the host name that process 0 has for itself.

    Returns:
      A `Leader` in process 0, and a `Follower` in every other process.

    Raises:
      InputError: a process cannot be reached.
    """
    if is_first():
        key = secrets.token_bytes(_KEY)
        with listen() as listener:
            told = key.hex(), socket.gethostname(), listener.getsockname()[1]
            bytes_from_first(json.dumps(told).encode())
            return Leader(accept(listener, key, jax.process_count() - 1))
    key, name, port = json.loads(bytes_from_first(b""))
    host = (address or "").rpartition(":")[0].strip("[]") or name
    return Follower(reach(host, port, bytes.fromhex(key), jax.process_index()))


def listen() -> socket.socket:
    """Open a socket that other hosts can connect to, at a free port."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual)


def accept(
    listener: socket.socket, key: bytes, count: int, seconds: float = _PATIENCE
) -> dict[int, socket.socket]:
    """Accept connections until `count` other processes of the job have connected.

    Returns the sockets by process number. A connection must prove that it knows the key; otherwise
    it is closed.

    Raises:
      InputError: fewer than `count` processes of the job have connected within `seconds`.
    """
    others: dict[int, socket.socket] = {}
    end = time.monotonic() + seconds
    while len(others) < count:
        if (other := _next(listener, end)) is None:
            for other in others.values():
                other.close()
            missing = sorted({*range(1, count + 1)} - {*others})
            raise InputError(
                f"No connection came from the processes {', '.join(map(str, missing))} within "
                f"{seconds:g} s; make sure that they run, and that no firewall keeps their hosts "
                "from any port of the host of process 0."
            )
        number = _greet(other, key)
        if number is None:
            other.close()
        else:
            others[number] = _set_up(other)
    return others


def _next(listener: socket.socket, end: float) -> socket.socket | None:
    """Return the next connection; None if there is none before `end` on the monotonic clock."""
    left = end - time.monotonic()
    if left <= 0:  # even if another connection is already waiting
        return None
    listener.settimeout(left)
    with suppress(TimeoutError):
        return listener.accept()[0]
    return None


def _greet(other: socket.socket, key: bytes) -> int | None:
    """Check that the other side of a connection knows the key, and return its process number.

    Returns None if the other side does not know the key. In return, this process proves that it
    knows the key.
    """
    asked = secrets.token_bytes(_KEY)
    with suppress(OSError):
        other.settimeout(_HELLO_SECONDS)
        other.sendall(asked)
        hello = _read(other, _NUMBER + 2 * _KEY, _HELLO_SECONDS)
        number, theirs, proof = hello[:_NUMBER], hello[_NUMBER:-_KEY], hello[-_KEY:]
        if hmac.compare_digest(proof, _sign(key, b"follows", asked, theirs, number)):
            other.sendall(_sign(key, b"leads", asked, theirs, number))
            return int.from_bytes(number)
    return None


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _read(link: socket.socket, size: int, seconds: float) -> bytes:
    """Read `size` bytes within `seconds`.

    Raises:
      OSError: the bytes have not arrived in time.
    """
    end = time.monotonic() + seconds
    content = b""
    while len(content) < size:
        link.settimeout(max(end - time.monotonic(), 1e-3))
        more = link.recv(size - len(content))
        if not more or time.monotonic() > end:
            raise ConnectionAbortedError
        content += more
    return content


def reach(host: str, port: int, key: bytes, number: int) -> socket.socket:
    """Connect this process, whose number is `number`, to process 0.

    Raises:
      InputError: the host and port cannot be reached, or process 0 of this job does not listen
        there.
    """
    try:
        first = socket.create_connection((host, port), timeout=_PATIENCE)
    except OSError as error:
        raise InputError(
            f"Process {number} cannot connect to process 0 at {host}:{port} "
            f"({error.strerror or error}); give a --coordinator-address at which all processes can "
            "reach any port of the host of process 0."
        ) from None
    own, numbered = secrets.token_bytes(_KEY), number.to_bytes(_NUMBER)
    try:
        asked = _read(first, _KEY, _PATIENCE)
        first.sendall(numbered + own + _sign(key, b"follows", asked, own, numbered))
        proof = _read(first, _KEY, _PATIENCE)
    except OSError:
        asked = proof = b""
    if not hmac.compare_digest(proof, _sign(key, b"leads", asked, own, numbered)):
        first.close()
        raise InputError(
            f"Process {number} has connected to {host}:{port}, but process 0 of this job does not "
            "listen there; give a --coordinator-address on the host of process 0."
        )
    return _set_up(first)


def _set_up(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    # Send each message at once, without waiting for more to send with it: a process waits for it.
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
