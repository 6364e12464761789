"""Connections that say nothing: how long they may, how many there may be, and which go first.

uvicorn waits for a request's header for ever, and for as much of it as comes. A process has a
limit on its files, and a connection is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llamakeep.server.logs import tell

HEADER_S = 10.0
"""A connection whose next request's header is not complete for so long is closed."""
MOST_CONNECTIONS = 4096
_OTHER_FILES = 256
"""Of a process's files, for all but connections: states, models, and those just being accepted."""
_LEAST = 16
_MOST_HEADER_BYTES = 1 << 16
_SAY_S = 60.0


class Door:
    """What all connections of a server have in common. Of the event loop's thread.

    Args:
        most: Connections at the same time. For one more, that goes which waits for a request's
            header the longest: if all others are answered, it itself.
        header_s: How long that may be.
        clock: Seconds, for how often it is told.

    Attributes:
        waiting: Those that wait for a header, the longest first.
        n_turned_away: How many went.
    """

    def __init__(
        self, most: int, header_s: float = HEADER_S, *, clock: Callable[[], float]
    ) -> None:
        self.most = most
        self.header_s = header_s
        self.waiting: dict[Connection, None] = {}
        self.n_turned_away = 0
        self._clock = clock
        self._say_at = -float("inf")

    def protocol(self) -> type[HttpToolsProtocol]:
        """Return the protocol of connections through this door, for uvicorn."""
        return type("Connection", (Connection,), {"door": self})

    def make_room(self, n_connections: int) -> None:
        """Turn one away if there are too many."""
        if n_connections > self.most:
            self.n_turned_away += 1
            if self.waiting:
                next(iter(self.waiting)).leave()
            self.say(f"there are more than {self.most:,} connections: some are closed")

    def say(self, what: str) -> None:
        """Log that there are too many, now and then."""
        if self._clock() >= self._say_at:
            self._say_at = self._clock() + _SAY_S
            tell(
                "connections",
                what,
                level=logging.WARNING,
                most=self.most,
                turned_away=self.n_turned_away,
            )

    def hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what goes wrong in the loop: that no file is left is told now and then."""
        if str(context.get("message", "")).startswith("socket.accept()"):
            self.say(f"no connection can be taken: {context.get('exception')}")
        else:
            loop.default_exception_handler(context)


class Connection(HttpToolsProtocol):
    """A connection that may not wait for ever. See `Door`, which it comes through."""

    door: Door
    _deadline: asyncio.TimerHandle | None = None
    _in_header = False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()
        self.door.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came; what does not complete a header has a deadline, and a limit."""
        was_in_header = self._in_header
        super().data_received(data)
        if not self._in_header or self.transport.is_closing():
            return
        if was_in_header:
            self._header_bytes += len(data)
            if self._header_bytes > _MOST_HEADER_BYTES:
                self.send_400_response("The request's header is too long.")
                return
        if self._deadline is None:
            self._wait()

    def on_message_begin(self) -> None:
        """Note that a header begins."""
        self._in_header, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that it is complete."""
        self._in_header = False
        self._wait_no_more()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Be one of those that go first, if there is nothing more to answer."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.door.waiting[self] = None  # uvicorn sees to how long

    def leave(self) -> None:
        """Close at once."""
        self._wait_no_more()
        self.transport.abort()

    def _wait(self) -> None:
        self.door.waiting[self] = None
        self._deadline = self.loop.call_later(self.door.header_s, self.leave)

    def _wait_no_more(self) -> None:
        self.door.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def most_connections() -> int:
    """Return how many connections this process may have, so that files are left for the rest."""
    try:
        import resource
    except ImportError:  # pragma: no cover - depends on the system
        return MOST_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(_LEAST, min(MOST_CONNECTIONS, soft - _OTHER_FILES))
