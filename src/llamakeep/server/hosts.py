"""Under which names a server may be asked, and by which pages.

A page of any site can let its own name stand for this machine, once it is loaded (DNS rebinding).
Then a browser takes a server here for a part of that site, and lets the page ask and read. But it
says what it asked for: `Host` has the page's name, and so has `Origin`. Addresses are no names:
nobody can let one stand for another.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from llamakeep.server.errors import ApiError

ALL = "*"
_LOCAL = ("localhost", "internal")
"""Names, and what they end in, that cannot be had on the internet."""


def is_address(name: str) -> bool:
    """Return whether a host is an address, as in a URL: `127.0.0.1`, `[::1]`."""
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether a host, a name or an address, is this machine for itself alone."""
    if _name(name) == "localhost":
        return True
    return is_address(name) and ipaddress.ip_address(name.strip("[]").partition("%")[0]).is_loopback


def _name(host: str) -> str:
    """Return the name in a `Host` header or a URL, without its port."""
    name, colon, port = host.strip().lower().rpartition(":")
    if not colon or not port.isdigit():
        name = host.strip().lower()
    return name.rstrip(".")


class Hosts:
    """Refuses what pages ask that should not, by the names that are asked for.

    Args:
        names: May stand in `Host`, beside addresses and local names. `*` for all.
        origins: Of pages that may ask, beside those of such hosts; their hosts may be asked for.
            `*` for all.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str]) -> None:
        self._origins = {each.lower() for each in origins}
        self._names = {_name(each) for each in names}
        self._names |= {_name(each.rpartition("://")[2]) for each in self._origins}

    def check(self, headers: Headers) -> None:
        """Look at the headers of a request.

        Raises:
            ApiError: A 403, for another host, or a page of another origin.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_ours(_name(host)):
            shown = _shown(host)
            raise ApiError(
                f"a server that only this machine can reach is not asked as {shown!r}: start it "
                f"with --allowed-hosts {_shown(_name(host))}, or let the proxy before it send "
                "'localhost' as its Host",
                code=403,
            )
        if origin is not None and not self._may_ask(origin, host):
            raise ApiError(
                f"pages of {_shown(origin)!r} may not ask: start the server with --cors "
                f"{_shown(origin)}",
                code=403,
            )

    def _is_ours(self, name: str) -> bool:
        if ALL in self._names or name in self._names or is_address(name):
            return True
        return any(name == each or name.endswith(f".{each}") for each in _LOCAL)

    def _may_ask(self, origin: str, host: str) -> bool:
        if ALL in self._origins or origin.lower() in self._origins:
            return True
        try:
            page = urlsplit(origin)
        except ValueError:
            return False
        name = _name(page.netloc)
        if page.scheme not in ("http", "https"):
            return False
        if page.netloc.lower() == host.lower():  # this server's own, under a name that is ours
            return True
        return is_loopback(name) or name.endswith(".localhost") or name in self._names


def _shown(text: str) -> str:
    return text[:100]
