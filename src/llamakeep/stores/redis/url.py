"""Addresses of Redis servers: one URL for a single one, for Sentinel or for a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias
from urllib.parse import parse_qsl, unquote

from llamakeep.errors import InvalidValue

Topology: TypeAlias = Literal["single", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Topology, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("single", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_PORTS: dict[Topology, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:@/\s]+)(:(?P<port>\d{1,5}))?\Z")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where to find a server, and who to be there.

    Attributes:
        shown: The URL without password and options, for messages.
        topology: `single`, `sentinel` or `cluster`.
        hosts: Host and port of the server, the sentinels, or some nodes of the cluster.
        path: Of a Unix socket, in place of hosts.
        service: The name that the sentinels know the master by.
        tls: Talk TLS.
        db: Number of the database.
        protocol: RESP version.
        username: Or None.
        password: Or None.
        sentinel_username: The sentinels' own, or None.
        sentinel_password: The sentinels' own, or None.
        tls_options: As redis-py names them.
    """

    shown: str
    topology: Topology
    hosts: tuple[tuple[str, int], ...]
    path: str = ""
    service: str = ""
    tls: bool = False
    db: int = 0
    protocol: int = 2
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Host and port, for messages."""
        return self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)


def parse_redis_url(url: str) -> RedisAddress:
    """Return what a URL says.

    ::

        redis://[[user]:password@]host[:port][/db]            rediss:// for TLS
        unix://[[user]:password@]/path/to/socket[?db=0]
        redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]
        redis+cluster://[[user]:password@]host[:port][,host[:port]...]

    User and password are the data servers'; special characters in them are written as `%40` and
    the like. Options after `?`: `db`, `protocol` (2 or 3), `sentinel_username`,
    `sentinel_password`, and for TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`,
    `ssl_cert_reqs` (`required` or `none`).

    Raises:
        InvalidValue: For anything else; the message names the URL, never a password.
    """
    if not isinstance(url, str):
        raise InvalidValue(f"the URL of a Redis server must be a str, not {type(url).__name__}")
    shown = hide_password(url)

    def refuse(problem: str) -> NoReturn:
        raise InvalidValue(f"{shown} is no URL of a Redis server: {problem}")

    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        refuse(f"it must begin with one of {', '.join(f'{known}://' for known in _SCHEMES)}")
    topology, tls = _SCHEMES[scheme]
    before, at, rest = rest.rpartition("@")
    if "/" in before or "?" in before:
        refuse("in a password write / as %2F and ? as %3F, and elsewhere @ as %40")
    user, _, password = before.partition(":")
    body, _, query = rest.partition("?")
    if "#" in rest:
        refuse("it has a #fragment")
    options = _options(query, refuse)
    known = {"db", "protocol"} | (set(_TLS_OPTIONS) if tls else set())
    if topology == "sentinel":
        known |= {"sentinel_username", "sentinel_password"}
    if unknown := sorted(options.keys() - known):
        refuse(f"it takes no option {', '.join(unknown)}")

    hosts: tuple[tuple[str, int], ...] = ()
    path, service, db = "", "", options.get("db", "")
    if scheme == "unix":
        path = unquote(body)
        if not path.startswith("/") or len(path) < 2:
            refuse("the path of the socket must be absolute")
    else:
        names, _, rest = body.partition("/")
        hosts = tuple(_host(name, _PORTS[topology], refuse) for name in names.split(","))
        if topology == "single" and len(hosts) > 1:
            refuse("several hosts are for redis+sentinel:// and redis+cluster://")
        pieces = [unquote(piece) for piece in rest.split("/")]
        if topology == "sentinel":
            service = pieces.pop(0)
            if not service:
                refuse("it does not name the service that the sentinels watch")
        if pieces and pieces[0]:
            db = pieces.pop(0)
        if any(pieces):
            refuse(f"/{rest} says too much")
    if db and not (db.isascii() and db.isdigit()):
        refuse(f"database {db!r} is not a number")
    if topology == "cluster" and int(db or 0):
        refuse("a cluster has database 0 only")
    protocol = options.get("protocol", "2")
    if protocol not in ("2", "3"):
        refuse(f"protocol {protocol!r} is neither 2 nor 3")
    if options.get("ssl_cert_reqs", "required") not in ("required", "none"):
        refuse("ssl_cert_reqs is neither `required` nor `none`")
    return RedisAddress(
        shown=shown,
        topology=topology,
        hosts=hosts,
        path=path,
        service=service,
        tls=tls,
        db=int(db or 0),
        protocol=int(protocol),
        username=unquote(user) if at and user else None,
        password=unquote(password) if at and password else None,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        tls_options={name: options[name] for name in _TLS_OPTIONS if name in options},
    )


def hide_password(url: str) -> str:
    """Return a URL without user, password and options; less where they cannot be told apart."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        # Not a URL at all; it may be a password that was put into the wrong place.
        return "***" if "@" in url or ":" in url else url
    before, _, rest = rest.rpartition("@")
    if "/" in before or "?" in before:
        return f"{scheme}://***"
    return f"{scheme}://{'***@' if before else ''}{rest.partition('?')[0]}"


def _options(query: str, refuse: Callable[[str], NoReturn]) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        pass  # its text would quote them
    refuse("its options are not of the form name=value")


def _host(name: str, default_port: int, refuse: Callable[[str], NoReturn]) -> tuple[str, int]:
    found = _HOST.match(name)
    port = int(found["port"] or default_port) if found else 0
    if not found or not 0 < port < 1 << 16:
        refuse(f"{name!r} is not a host with a port")
    return found["host"].strip("[]"), port
