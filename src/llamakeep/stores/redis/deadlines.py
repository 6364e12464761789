"""Waiting for a network no longer than one may."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any


class Deadlines(threading.local):
    """When the calling thread's operation on the network must be over.

    Args:
        idle_s: The longest silence.
        connect_s: What connecting may take on top, once for an operation.
        n_hosts: How many hosts may have to be tried: one that swallows everything must leave time
            for the next.
    """

    def __init__(self, idle_s: float, connect_s: float, n_hosts: int = 1) -> None:
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._share_s = connect_s / max(1, n_hosts)
        self._at = float("inf")
        self._connected = False

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let what happens inside take `seconds`, and once the time for a connection."""
        self._at = time.monotonic() + seconds
        self._connected = False
        try:
            yield
        finally:
            self._at = float("inf")

    def left(self) -> float:
        """Return the seconds that a single wait may last.

        Raises:
            TimeoutError: When there are none.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the operation took too long")
        return min(left, self._idle_s)

    def dialling(self) -> float:
        """Return the seconds that connecting to a host may take from now.

        Raises:
            TimeoutError: When there are none.
        """
        if not self._connected:
            self._connected = True
            self._at += self._connect_s
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("connecting took too long")
        return min(left, self._share_s)


class TimedSocket:
    """A connected socket whose every wait ends at the thread's deadline.

    redis-py has a timeout for each `recv`, so a server that sends a byte now and then could hold a
    reader as long as it likes.
    """

    def __init__(self, sock: socket.socket, deadlines: Deadlines) -> None:
        self._sock = sock
        self._deadlines = deadlines
        self._limit_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        """Let a wait be shorter than the deadline says; never longer."""
        self._limit_s = seconds

    def recv(self, n_bytes: int, flags: int = 0) -> bytes:
        """Receive, until the deadline."""
        self._wait()
        return self._sock.recv(n_bytes, flags)

    def recv_into(self, buffer: Any, n_bytes: int = 0, flags: int = 0) -> int:
        """Receive into a buffer, until the deadline."""
        self._wait()
        return self._sock.recv_into(buffer, n_bytes, flags)

    def sendall(self, data: Any) -> None:
        """Send everything, until the deadline."""
        view = memoryview(data).cast("B")
        while view:
            self._wait()
            view = view[self._sock.send(view) :]

    def _wait(self) -> None:
        left = self._deadlines.left()
        self._sock.settimeout(left if self._limit_s is None else min(left, self._limit_s))


class Resolver:
    """Looks host names up, and does not wait longer than it may.

    The system's own look-up takes no timeout and lasts tens of seconds when a name server is
    down. So it runs in a thread; who gave up on it leaves it to those who come later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._found: dict[tuple[str, int], list[Any] | OSError] = {}

    def look_up(self, host: str, port: int, seconds: float) -> list[Any]:
        """Return what `socket.getaddrinfo` does.

        Raises:
            OSError: When there is no such host.
            TimeoutError: When the answer takes longer than `seconds`.
        """
        with contextlib.suppress(OSError):  # a number needs no look-up
            return socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
        with self._lock:
            thread = self._threads.get((host, port))
            if thread is None:
                name = f"llamakeep-resolve-{host}"
                thread = threading.Thread(
                    target=self._run, args=(host, port), name=name, daemon=True
                )
                self._threads[host, port] = thread
                thread.start()
        thread.join(seconds)
        with self._lock:
            if thread.is_alive():
                raise TimeoutError(f"looking up {host} took too long")
            self._threads.pop((host, port), None)
            found = self._found[host, port]
        if isinstance(found, OSError):
            raise found
        return found

    def _run(self, host: str, port: int) -> None:
        try:
            found: list[Any] | OSError = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
        except OSError as error:
            found = error
        with self._lock:
            self._found[host, port] = found

    def close(self, seconds: float) -> None:
        """Wait a little for look-ups that were given up; what hangs longer ends by itself."""
        for thread in list(self._threads.values()):
            thread.join(seconds)
