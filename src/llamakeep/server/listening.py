"""Where a server listens."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from llamakeep.errors import InvalidValue

BACKLOG = 128
"""Connections that the system keeps until they are taken, all at once."""
_UNREAD_MS = 30_000
"""How long the system keeps what a client does not take after it was cut off."""


def bind_all(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return a socket for each address. See `bind`: where one cannot be had, none is."""
    with ExitStack() as undo:
        several = len(hosts) > 1
        bound = [undo.enter_context(bind(each, port, only_v6=several)) for each in hosts]
        undo.pop_all()
    return bound


def bind(host: str, port: int, *, only_v6: bool = False) -> socket.socket:
    """Return a socket that listens; the clients that come are kept waiting.

    Args:
        host: A name or an address of this machine.
        port: 0 for any that is free.
        only_v6: An address of IPv6 does not stand for those of IPv4, too.

    Raises:
        InvalidValue: For a port that is taken or not allowed, or a host that is none of this
            machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"--host {host!r}: {_words(error)}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this lets two programs have one port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if only_v6 and family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a client that never reads must not keep us
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidValue(
                f"port {port} of {host} is taken: another program listens there; "
                "--port chooses another one"
            ) from error
        raise InvalidValue(f"cannot listen on port {port} of {host}: {_words(error)}") from error
    sock.setblocking(False)
    return sock


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def base_url(host: str, port: int) -> str:
    """Return the URL under which this machine finds a server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
