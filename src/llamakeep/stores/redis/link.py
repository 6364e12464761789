"""The line to a Redis server: connecting, deadlines, errors. The one module that imports redis."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import redis
import redis.sentinel
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from llamakeep.stores.redis.breaker import CircuitBreaker, Ticket, Unreachable
from llamakeep.stores.redis.deadlines import Deadlines, Resolver, TimedSocket
from llamakeep.stores.redis.prober import Prober
from llamakeep.stores.redis.url import RedisAddress

logger = logging.getLogger("llamakeep")

Command: TypeAlias = tuple[Any, ...]
"""A command's name, its key (for EVAL: the script, the number of keys, the key), and the rest."""

T = TypeVar("T")

_MAX_ROUNDS = 1 << 16  # of a walk through keys, about 1,000 each: so that every walk ends
_READ_BYTES = 1 << 18
_MAX_CONNECTIONS = 1 << 16
_SAY_AGAIN_S = 60.0
_MAX_SAID = 64
_AUTH = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)
_BROKEN = (
    *_AUTH,
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.InvalidResponse,
    OSError,
)
"""After these the server counts as gone; what else it says is an answer."""


class _Occupied(Exception):
    """Another thread is connecting still: that says nothing about the server."""


class RedisLink:
    """Runs commands on a server, within a deadline and behind a circuit breaker.

    Connects when it is first used. From any thread.

    Args:
        address: Where the server is.
        breaker: Decides whether it is asked at all.
        count: Called with the kind of each thing that happened, for counters.
        timeout_s: The longest silence, and the time for an operation that moves nothing.
        connect_timeout_s: What a connection may take on top, once for an operation.
        min_bytes_per_s: What an operation moves may take its time at this rate on top.

    Attributes:
        prober: Finds out whether a server that failed is back.
    """

    def __init__(
        self,
        address: RedisAddress,
        breaker: CircuitBreaker,
        count: Callable[[str], None],
        *,
        timeout_s: float,
        connect_timeout_s: float,
        min_bytes_per_s: float,
    ) -> None:
        self._address = address
        self._breaker = breaker
        self.prober = Prober(breaker, self._ping)
        self._count = count
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        self._deadlines = Deadlines(timeout_s, connect_timeout_s, len(address.hosts))
        self._resolver = Resolver()
        self._lock = threading.Lock()
        self._client: Any = None
        self._sentinel: Any = None
        self._closed = False
        self._said_auth = False
        self._said: dict[str, float] = {}
        self._options: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "protocol": address.protocol,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": connect_timeout_s,
            "socket_read_size": _READ_BYTES,
        }
        if address.tls:
            self._options |= address.tls_options
            if address.tls_options.get("ssl_cert_reqs") == "none":
                self._options["ssl_check_hostname"] = False
        if address.protocol == 3:
            with contextlib.suppress(ImportError):  # before redis-py 6.4 there was nothing to stop
                from redis.maint_notifications import MaintNotificationsConfig

                self._options["maint_notifications_config"] = MaintNotificationsConfig(
                    enabled=False
                )

    # -- running commands --------------------------------------------------------------------------

    def run(self, commands: Sequence[Command], *, n_bytes: int = 0) -> list[Any]:
        """Run commands in one round trip for each node, and return their replies.

        A reply that is an error is an exception in the list, counted and logged.

        Args:
            commands: To run; in order, where one node runs them.
            n_bytes: What they move, about.

        Raises:
            Unreachable: When there is no answer in time, or nobody was asked.
        """
        if not commands:
            return []
        return self.call(lambda client: self._pipeline(client, commands), n_bytes)

    def call(self, operation: Callable[[Any], T], n_bytes: int = 0) -> T:
        """Run an operation on redis-py's client, as `run` does."""
        ticket = None if self._closed else self._breaker.enter()
        if ticket is None:
            self._count("skipped")
            self.prober.watch()  # it may have been left behind by a fork
            raise Unreachable("closed" if self._closed else "the server lately did not answer")
        self._count("round_trips")
        return self._attempt(ticket, operation, n_bytes)

    def whole(self, reply: Any) -> int:
        """Return the number that a reply is.

        Raises:
            Unreachable: When it is none: the server refused, or is not what it should be.
        """
        if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
            return int(reply)
        if isinstance(reply, int):
            return reply
        raise self.nonsense(reply)

    def text(self, reply: Any) -> bytes:
        """Return the bytes that a reply is. Raises as `whole` does."""
        if isinstance(reply, bytes):
            return reply
        raise self.nonsense(reply)

    def rows(self, reply: Any) -> list[Any]:
        """Return the list that a reply is. Raises as `whole` does."""
        if isinstance(reply, (list, tuple, set)):
            return list(reply)
        raise self.nonsense(reply)

    def nonsense(self, reply: Any) -> Unreachable:
        """Count a reply that cannot be meant, and return what to raise."""
        if isinstance(reply, Exception):
            return Unreachable(str(reply))  # which was counted when it came
        self._count("errors_other")
        self._say_refused(f"answered {type(reply).__name__}")
        return Unreachable(f"the server answered {type(reply).__name__}")

    def nodes(self) -> list[Any]:
        """Return what `on_node` takes: the primaries of a cluster, or the one server.

        Raises:
            Unreachable: As `run` does.
        """
        if self._address.topology != "cluster":
            return [None]
        return self.call(lambda client: list(client.get_primaries()))

    def on_node(self, node: Any, *command: Any) -> Any:
        """Run a command without keys on one of `nodes`.

        Raises:
            Unreachable: As `run` does; also when the command is refused.
        """

        def execute(client: Any) -> list[Any]:
            target = client if node is None else node.redis_connection
            try:
                return [target.execute_command(*command)]
            except exceptions.ResponseError as error:
                return [error]

        (reply,) = self.call(execute)
        if isinstance(reply, Exception):
            raise self.nonsense(reply) from reply
        return reply

    def scan(self, pattern: str) -> Iterator[list[bytes]]:
        """Yield the keys that match, some at a time. Walks through all keys of the server.

        Raises:
            Unreachable: As `on_node` does.
        """
        for node in self.nodes():
            cursor = 0
            for _ in range(_MAX_ROUNDS):
                cursor, keys = self.on_node(node, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                yield keys
                if not cursor:
                    break

    def close(self) -> None:
        """Close all connections. What other threads are waiting for fails. Again does nothing."""
        self._closed = True
        self.prober.end()
        with self._lock:
            client, self._client = self._client, None
            sentinel, self._sentinel = self._sentinel, None
        if client is not None:
            client.close()
            if self._address.topology != "cluster":
                client.connection_pool.disconnect()
        for one in sentinel.sentinels if sentinel is not None else ():
            one.close()
            one.connection_pool.disconnect()
        self.prober.join(self._timeout_s)
        self._resolver.close(self._timeout_s)

    # -- inside ------------------------------------------------------------------------------------

    def _pipeline(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for command in commands:
                if self._address.topology == "cluster":
                    # redis-py would ask the server where the keys of an EVAL are, each time.
                    key = command[3] if command[0] == "EVAL" else command[1]
                    node = client.get_node_from_key(key)
                    pipe.execute_command(*command, target_nodes=node)
                else:
                    pipe.execute_command(*command)
            replies: list[Any] = pipe.execute(raise_on_error=False)
            return replies

    def _ping(self, ticket: Ticket) -> None:
        """Find out whether the server is back; of a cluster, whether all of it is."""
        self._count("probes")
        where = {"target_nodes": "primaries"} if self._address.topology == "cluster" else {}
        with contextlib.suppress(Unreachable):  # counted, and the breaker knows
            self._attempt(ticket, lambda client: client.ping(**where), 0)

    def _attempt(self, ticket: Ticket, operation: Callable[[Any], T], n_bytes: int) -> T:
        try:
            with self._deadlines.within(self._timeout_s + n_bytes / self._min_bytes_per_s):
                result = operation(self._connected())
        except exceptions.ResponseError as error:
            self._note(error)
            if isinstance(error, _BROKEN):
                self._failed(ticket, error)
            else:
                self._breaker.succeeded(ticket)  # it said no, but it did answer
            raise Unreachable(str(error)) from error
        except _Occupied as error:
            if ticket.probe:
                self._breaker.failed(ticket)
            raise Unreachable(str(error)) from error
        except Exception as error:
            self._note(error)
            self._failed(ticket, error)
            self._hang_up()
            raise Unreachable(str(error)) from error
        except BaseException:
            if ticket.probe:
                self._breaker.failed(ticket)
            self._hang_up()
            raise
        broken: Exception | None = None
        for reply in result if isinstance(result, list) else ():
            if isinstance(reply, Exception):
                self._note(reply)
                broken = broken or (reply if isinstance(reply, _BROKEN) else None)
        if broken is None:
            self._breaker.succeeded(ticket)
        else:
            self._failed(ticket, broken)  # one node of several; the others did answer
        return result

    def _hang_up(self) -> None:
        """Close connections that may still have replies coming which nobody waits for."""
        client = self._client
        if client is None:
            return
        clients = [client]
        if self._address.topology == "cluster":
            clients = [node.redis_connection for node in client.get_nodes()]
        for one in clients:
            if one is not None:
                one.connection_pool.disconnect(inuse_connections=False)

    def _note(self, error: Exception) -> None:
        """Count an error, and log what is not about the line."""
        if self._closed:
            return
        if isinstance(error, exceptions.RedisClusterException) and error.__cause__ is not None:
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(error, (*_AUTH, exceptions.NoPermissionError)):
            self._count("errors_auth")
        elif isinstance(error, (exceptions.TimeoutError, TimeoutError)):
            self._count("errors_timeout")
        elif isinstance(error, _BROKEN):
            self._count("errors_connection")
        elif isinstance(error, exceptions.OutOfMemoryError):
            self._count("errors_full")
        else:
            self._count("errors_other")
        if isinstance(error, _BROKEN):
            return  # said once, when the breaker opens
        if isinstance(error, exceptions.RedisError):
            self._say_refused(str(error))
        else:
            logger.error("the client of %s failed", self._address.shown, exc_info=error)

    def _say_refused(self, problem: str) -> None:
        # A full server refuses everything that is written, all day.
        now = time.monotonic()
        if len(self._said) > _MAX_SAID:
            self._said.clear()
        if now - self._said.get(problem, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said[problem] = now
            logger.warning("%s refused a command: %s", self._address.shown, problem)

    def _failed(self, ticket: Ticket, error: Exception) -> None:
        if not self._breaker.failed(ticket) or self._closed:
            return
        self._count("breaker_opened")
        self.prober.watch()
        cause = error.__cause__ if isinstance(error, exceptions.RedisClusterException) else error
        if isinstance(cause, _AUTH):
            if not self._said_auth:
                self._said_auth = True
                logger.warning(
                    "%s does not accept the user or password that it was given; nothing is shared "
                    "until it does: %s",
                    self._address.place,
                    cause,
                )
            return
        logger.warning(
            "%s is left alone for %g seconds: %s",
            self._address.shown,
            self._breaker.cooldown_s,
            error,
        )

    def _connected(self) -> Any:
        """Return the client. Making one for a cluster asks a node, within the deadline."""
        client = self._client
        if client is not None:
            return client
        if not self._lock.acquire(timeout=self._deadlines.dialling()):
            raise _Occupied("another thread is connecting")
        try:
            if self._closed:
                raise ConnectionError("closed")
            if self._client is None:
                self._client = self._connect()
            return self._client
        finally:
            self._lock.release()

    def _connect(self) -> Any:
        address, options = self._address, self._options
        tcp, managed, unix = self._connection_classes()
        retry = Retry(NoBackoff(), 0)  # a second try would double the timeout
        if address.topology == "cluster":
            (host, port), *others = address.hosts
            node: Any = ClusterNode
            # Only a client made from a URL takes a class of connections.
            shown_host = f"[{host}]" if ":" in host else host
            return redis.RedisCluster(
                url=f"redis://{shown_host}:{port}",
                startup_nodes=[node(*other) for other in others],
                connection_class=tcp,
                retry=retry,
                require_full_coverage=False,
                **options,
            )
        options = options | {"retry": retry, "max_connections": _MAX_CONNECTIONS}
        if address.topology == "sentinel":
            make: Any = redis.sentinel.Sentinel
            sentinel = make([])
            own = {
                "username": address.sentinel_username,
                "password": address.sentinel_password,
                "connection_class": tcp,
                # Before redis-py 6 it did not understand what sentinels say in version 3.
                "protocol": 2,
            }
            sentinel.sentinels = [
                redis.Redis(
                    connection_pool=redis.ConnectionPool(host=host, port=port, **(options | own))
                )
                for host, port in address.hosts
            ]
            self._sentinel = sentinel
            return sentinel.master_for(
                address.service, db=address.db, connection_class=managed, **options
            )
        if address.path:
            options |= {"connection_class": unix, "path": address.path}
        else:
            host, port = address.hosts[0]
            options |= {"connection_class": tcp, "host": host, "port": port}
        return redis.Redis(connection_pool=redis.ConnectionPool(db=address.db, **options))

    def _connection_classes(self) -> tuple[type[Any], type[Any], type[Any]]:
        """Return redis-py's classes of connections over TCP, to a sentinel's master, over Unix."""
        deadlines, resolver = self._deadlines, self._resolver

        class Dialled(Connection):
            """Connects within the deadline, look-up of the name included."""

            def _connect(self) -> Any:
                failed: OSError | None = None
                places = resolver.look_up(self.host, self.port, deadlines.dialling())
                until = time.monotonic() + deadlines.dialling()
                for n_left, (family, kind, proto, _, place) in zip(
                    range(len(places), 0, -1), places, strict=True
                ):
                    sock = socket.socket(family, kind, proto)
                    try:
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        sock.settimeout(max((until - time.monotonic()) / n_left, 0.001))
                        sock.connect(place)
                        return sock
                    except OSError as error:
                        failed = error
                        sock.close()
                    except BaseException:
                        sock.close()
                        raise
                raise failed or OSError(f"{self.host} has no address")

        class Timed(Dialled):
            def _connect(self) -> Any:
                return TimedSocket(super()._connect(), deadlines)

        class TimedTLS(SSLConnection, Dialled):
            def _connect(self) -> Any:
                # The handshake takes the timeout that the socket was dialled with.
                return TimedSocket(super()._connect(), deadlines)  # type: ignore[no-untyped-call]

        class TimedUnix(UnixDomainSocketConnection):
            def _connect(self) -> Any:
                deadlines.dialling()
                return TimedSocket(super()._connect(), deadlines)  # type: ignore[no-untyped-call]

        class Managed(redis.sentinel.SentinelManagedConnection, Timed):
            pass

        class ManagedTLS(redis.sentinel.SentinelManagedConnection, TimedTLS):
            pass

        if self._address.tls:
            return TimedTLS, ManagedTLS, TimedUnix
        return Timed, Managed, TimedUnix
