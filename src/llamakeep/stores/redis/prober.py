"""Finding out whether a server is back, so that no request has to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from llamakeep.stores.redis.breaker import CircuitBreaker, Ticket

logger = logging.getLogger("llamakeep")

_SHORTEST_S = 0.01


class Prober:
    """Probes a server that failed, after each cool-down, in a thread of its own.

    The thread runs only while the breaker is not closed. From any thread.

    Args:
        breaker: Says when a probe is due.
        ping: Asks the server, with the breaker's leave, and tells the breaker; raises nothing.
    """

    def __init__(self, breaker: CircuitBreaker, ping: Callable[[Ticket], None]) -> None:
        self._breaker = breaker
        self._ping = ping
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """See to it that the server is probed until it is back. Costs a lock."""
        with self._lock:
            if self._ended.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(target=self._run, name="llamakeep-probe", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter is ending, or has too many threads
                logger.debug("nobody can probe now: %s", error)
                return
            self._thread = thread

    def look(self) -> None:
        """Probe if it is time to; when another thread does, wait for what it finds."""
        with self._one_at_a_time:
            ticket = self._breaker.probe()
            if ticket is not None:
                self._ping(ticket)

    def end(self) -> None:
        """Probe no more."""
        self._ended.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, not longer than that."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.wait(max(_SHORTEST_S, self._breaker.wait_s())):
            self.look()
            with self._lock:
                # Who opens the breaker after this finds no thread, and starts one.
                if self._breaker.state == "closed":
                    self._thread = None
                    return
