"""Blobs on a Redis or Valkey server, shared by machines.

`keys` draws what is stored under which key, `blobs` how a blob is cut, `index`
how it is found, `ledger` how all clients together keep to a limit, `link` what happens
when the server does not answer.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from llamakeep.errors import (
    BlobRejected,
    IntegrityError,
    InvalidValue,
    StoreError,
    whole_number,
)
from llamakeep.states import Block, Buffer, Record, frozen
from llamakeep.stores import envelope
from llamakeep.stores.redis.blobs import MAX_VALUE_BYTES, RedisBlobs
from llamakeep.stores.redis.breaker import CircuitBreaker, Unreachable
from llamakeep.stores.redis.index import RedisIndex
from llamakeep.stores.redis.keys import DEFAULT_PREFIX, RedisKeys
from llamakeep.stores.redis.known import KnownBlobs
from llamakeep.stores.redis.ledger import RedisLedger
from llamakeep.stores.redis.lookup import RedisLookup
from llamakeep.stores.redis.namespaces import RedisNamespaces
from llamakeep.stores.redis.upkeep import RedisUpkeep, SharedEntry
from llamakeep.stores.redis.url import parse_redis_url
from llamakeep.stores.redis.writer import NOT_OURS, RedisWriter
from llamakeep.tokens import Place

logger = logging.getLogger("llamakeep")

_TOUCHED_AT_ONCE = 512
_LONGEST_S = 1e9


class RedisStore:
    """Keeps blobs on a server that others use too. From any thread.

    Makes no connection before it is used. Whatever happens to the server, reading is a miss and
    writing is refused; `counters` say how often and why. A server that does not answer is asked
    once, and then left alone until a thread of this store's own, which runs only then, has found it
    back: see `CircuitBreaker` and `Prober`. So a request pays for it once.

    The server decides what to drop: each blob expires `ttl_s` after its last use, and what does
    not fit its memory goes by its own policy (`maxmemory-policy`: `allkeys-lru` suits a server
    that has nothing else; with `capacity_bytes` take a `volatile-` one, which leaves the ledger
    alone). The store itself never evicts: what does not fit is refused.

    Needs Redis 6.2 or newer, or Valkey, and the right to run EVAL.

    Args:
        url: Of a single server, of sentinels or of a cluster: see `parse_redis_url`.
        secret: What blobs are sealed with; all who share have the same. What was sealed with
            another one, or not at all, is a miss.
        allow_unauthenticated: Do without a secret: whoever can write to the server decides what
            this process takes for its own states.
        capacity_bytes: What all clients together may keep under this prefix, headers included;
            the index is not counted. All should say the same. None: whatever the server's own
            `maxmemory` allows; the property is then `sys.maxsize`.
        ttl_s: How long a blob lives after its last use. All who share should say the same.
        timeout_s: The longest silence of the server, and the time for a round trip.
        connect_timeout_s: What making a connection may take on top.
        min_bytes_per_s: A transfer may take its bytes at this rate on top of the timeout; what is
            slower is cut off.
        max_blob_bytes: Larger blobs are refused, and not believed in.
        chunk_bytes: Blobs are cut into values of at most this size. A server takes 512 MiB.
        prefix: Begins all keys.
        lease_s: A writer that is silent for so long has died, and its work is thrown away.
        cooldown_s: How long a server that failed is left alone at first.
        longest_cooldown_s: And at most.
        clock: For cool-downs, in seconds.

    Raises:
        InvalidValue: For a URL that is none, a missing secret, and numbers that cannot be meant.
        StoreError: When redis-py is not installed.
    """

    tier = "shared"
    is_remote = True
    reads_into_its_own = False

    def __init__(
        self,
        url: str,
        *,
        secret: str | bytes | None = None,
        allow_unauthenticated: bool = False,
        capacity_bytes: int | None = None,
        ttl_s: float = 7 * 24 * 3600,
        timeout_s: float = 0.25,
        connect_timeout_s: float = 0.5,
        min_bytes_per_s: float = 50e6,
        max_blob_bytes: int = 1 << 30,
        chunk_bytes: int = 64 << 20,
        prefix: str = DEFAULT_PREFIX,
        lease_s: float = 60.0,
        cooldown_s: float = 1.0,
        longest_cooldown_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address = parse_redis_url(url)
        key = envelope.seal_key(secret)
        if key is None and not allow_unauthenticated:
            raise InvalidValue(
                f"{address.shown} is shared: give a secret, or allow_unauthenticated=True when "
                "everyone who can write to it may decide what this process answers"
            )
        for what, seconds in (
            ("ttl_s", ttl_s),
            ("timeout_s", timeout_s),
            ("connect_timeout_s", connect_timeout_s),
            ("min_bytes_per_s", min_bytes_per_s),
            ("lease_s", lease_s),
        ):
            if not 0 < seconds <= _LONGEST_S:
                raise InvalidValue(f"{what} must be above 0 and at most 1e9, not {seconds!r}")
        if capacity_bytes is not None:
            capacity_bytes = whole_number("capacity_bytes", capacity_bytes, 0)
        if whole_number("chunk_bytes", chunk_bytes, 1) > MAX_VALUE_BYTES:
            raise InvalidValue(
                f"chunk_bytes must be at most {MAX_VALUE_BYTES:,}, not {chunk_bytes:,}"
            )
        self._capacity_bytes = capacity_bytes
        self._max_blob_bytes = max_blob_bytes = whole_number("max_blob_bytes", max_blob_bytes, 0)
        self.counters: dict[str, int] = {}
        self._address = address
        ttl_ms = max(1, int(ttl_s * 1000))
        self._lock = threading.Lock()
        self._known = KnownBlobs()
        self._last_used_bytes = 0
        self._keys = RedisKeys(prefix)
        self._breaker = CircuitBreaker(clock, cooldown_s=cooldown_s, longest_s=longest_cooldown_s)
        try:
            from llamakeep.stores.redis.link import RedisLink
        except ImportError as error:
            raise StoreError(
                f"{address.shown} needs redis-py: pip install llamakeep[redis]"
            ) from error
        self._link = RedisLink(
            address,
            self._breaker,
            self._count,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            min_bytes_per_s=min_bytes_per_s,
        )
        self._blobs = RedisBlobs(
            self._link, self._keys, key, chunk_bytes=chunk_bytes, max_blob_bytes=max_blob_bytes
        )
        self._index = RedisIndex(self._keys)
        self._ledger = RedisLedger(
            self._link,
            self._keys,
            capacity_bytes,
            ttl_ms=ttl_ms,
            lease_ms=max(1, int(lease_s * 1000)),
        )
        self._namespaces = RedisNamespaces(self._link, self._keys, self._count, ttl_ms=ttl_ms)
        self._writer = RedisWriter(
            self._link,
            self._keys,
            self._blobs,
            self._index,
            self._ledger,
            self._known,
            count=self._count,
            reject=self._reject,
            max_blob_bytes=max_blob_bytes,
            clock=clock,
        )
        self._upkeep = RedisUpkeep(self._link, self._keys, self._ledger, self._writer.remove)

    def __repr__(self) -> str:
        return f"RedisStore({self._address.shown!r}, prefix={self._keys.prefix!r}, {self.state})"

    @property
    def state(self) -> str:
        """The circuit breaker's: `closed` (the server is asked), `open` (not) or `half-open`."""
        return self._breaker.state

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes; `sys.maxsize` where the server decides."""
        return sys.maxsize if self._capacity_bytes is None else self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that all clients keep under this prefix, or are writing. Asks the server.

        What the server said last, when it does not answer.
        """
        try:
            self._last_used_bytes = self._ledger.totals().used_bytes
        except Unreachable:
            self._count("misses_unreachable")
        return self._last_used_bytes

    def cost_bytes(self, n_bytes: int, place: Place | None = None) -> int:
        """Return the bytes that a blob counts for: its own and its header's."""
        return envelope.header_bytes(place) + n_bytes

    # -- reading -----------------------------------------------------------------------------------

    def find(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is kept in these blocks and begins like the prompt. See `Tier.find`.

        One round trip when there are only whole blocks, or nothing; two where something starts
        with a block and ends in it, or is a checkpoint; three where spans start and end inside.
        Neither that nor what is answered follows what branches off: see `lookup`.
        """
        look_up = RedisLookup(
            self._link,
            self._keys,
            self._count,
            max_blob_bytes=self._max_blob_bytes,
            tier=self.tier,
        )
        try:
            finds = look_up.find(blocks)
        except Unreachable:
            self._count("misses_unreachable")
            return []
        for each in finds.found:
            self._known.learn(each.record.name, each.spot, each.n_bytes)
        for name, spot in finds.gone:
            self._known.learn(name, spot, 0)
        if finds.gone:
            self._forget([name for name, _ in finds.gone])
        for name, error in finds.wrong:
            self._drop(name, error)
        return [each.record for each in finds.found]

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, read-only, or None. See `Store.get`."""
        return next(self.get_many([name]))

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None for one that is gone, in order. See `Tier.get_many`.

        One round trip for each 16 MiB, and one more when a size is not known from `find`. A blob
        is a view of the bytes that came from the server; one of several chunks is joined.
        """
        n_yielded = 0
        try:
            wanted = self._wanted(names)
            for values in self._blobs.fetch(wanted):
                batch = wanted[n_yielded : n_yielded + len(values)]
                gone = [
                    name for (name, _), value in zip(batch, values, strict=True) if value == b""
                ]
                if gone:
                    self._forget(gone)
                for index, (name, expected) in enumerate(batch):
                    value, values[index] = values[index], None
                    n_yielded += 1
                    yield self._opened(name, value, expected) if value else None
        except Unreachable:
            self._count("misses_unreachable", len(names) - n_yielded)
            for _ in range(len(names) - n_yielded):
                yield None

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, bytes):
            return False
        try:
            return bool(self._blobs.sizes([name])[0])
        except Unreachable:
            self._count("misses_unreachable")
            return False

    # -- writing -----------------------------------------------------------------------------------

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], Buffer],
        place: Place | None = None,
    ) -> bool:
        """Keep the blob that `produce` returns. See `Store.put`.

        Takes three or four round trips, also when the blob is there. False also while another
        client is writing the same name, and for a name that is taken by what is not ours.
        """
        n_bytes = whole_number("n_bytes", n_bytes, 0)
        try:
            reservation = self._writer.reserve(name, n_bytes, place)
        except Unreachable:
            self._count("refused_unreachable")
            return False
        if reservation is None or reservation.outcome == "kept":
            return reservation is not None
        try:
            data = produce()
            if data.nbytes != n_bytes:
                raise IntegrityError(f"blob has {data.nbytes:,} bytes, {n_bytes:,} were announced")
        except BaseException:
            self._quietly(self._writer.release, name, reservation)
            raise
        try:
            kept = self._writer.write(name, data, place, reservation)
        except Unreachable:
            # It stays entered until the lease is over; then whoever writes next clears it away.
            self._count("refused_unreachable")
            return False
        self._count("written" if kept else "refused_server")
        for other, abandoned in reservation.abandoned:
            self._quietly(self._writer.remove, other, abandoned)
        return kept

    def delete(self, name: bytes) -> bool:
        """Drop the blob; return whether it was there. See `Store.delete`."""
        try:
            return self._writer.delete(name)
        except Unreachable:
            self._count("refused_unreachable")
            return False

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took, once that is there. See `Tier.supersede`."""
        if old != new and new in self and self.delete(old):
            self._count("superseded")

    def touch(self, names: Sequence[bytes], *, hit: bool = True) -> list[bytes]:
        """Let these states, and what finds them, live `ttl_s` from now. See `Tier.touch`.

        Two round trips. A state that this process neither found nor wrote lives on, but what finds
        it is not known here.
        """
        absent: list[bytes] = []
        # Some at a time: the server does nothing else while it looks at them.
        for at in range(0, len(names), _TOUCHED_AT_ONCE):
            try:
                absent += self._writer.extend(names[at : at + _TOUCHED_AT_ONCE])
            except Unreachable:
                self._count("refused_unreachable")
                break
        return absent

    def clear(self) -> None:
        """Drop everything under this prefix. Walks through all keys of the server.

        Raises:
            StoreError: When the server does not let it.
        """
        try:
            self._upkeep.clear()
        except Unreachable as error:
            raise StoreError(f"{self._address.shown} was not cleared: {error}") from error
        self._known.clear()
        self._namespaces.forget()

    # -- what is there -----------------------------------------------------------------------------

    def __len__(self) -> int:
        try:
            totals = self._ledger.totals()
        except Unreachable:
            self._count("misses_unreachable")
            return 0
        return totals.n_names - totals.n_pending

    def __iter__(self) -> Iterator[bytes]:
        return iter([entry.name for entry in self.entries()])

    def entries(self) -> list[SharedEntry]:
        """Return what is kept under this prefix; nothing when the server does not answer."""
        try:
            return self._upkeep.entries()
        except Unreachable:
            self._count("misses_unreachable")
            return []

    def stats(self) -> dict[str, Any]:
        """Return figures, JSON-ready. None: there is no limit, or the server does not tell."""
        figures: dict[str, Any] = {
            "tier": self.tier,
            "address": self._address.shown,
            "used_bytes": None,
            "capacity_bytes": self._capacity_bytes,
            "blobs": None,
            "server_used_bytes": None,
            "server_capacity_bytes": None,
        }
        try:
            totals = self._ledger.totals()
            figures["used_bytes"] = totals.used_bytes
            figures["blobs"] = totals.n_names - totals.n_pending
            used_bytes, limit_bytes = self._upkeep.server_bytes()
            figures["server_used_bytes"] = used_bytes
            figures["server_capacity_bytes"] = limit_bytes or None
        except Unreachable:
            self._count("misses_unreachable")
        with self._lock:
            return figures | {"state": self.state, "counters": dict(self.counters)}

    def check(self, *, fix: bool = False) -> None:
        """Compare the ledger with the keys, while nobody writes. Walks through all of the server.

        Raises:
            IntegrityError: With the numbers, unless `fix` mends them: what is not counted, and
                what is not all there, is dropped.
            StoreError: When the server does not let it look.
        """
        try:
            problem = self._upkeep.check(fix)
        except Unreachable as error:
            raise StoreError(f"{self._address.shown} was not checked: {error}") from error
        if problem and not fix:
            raise IntegrityError(problem)

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Remember what the parts of a namespace are. See `Tier.introduce`."""
        self._quietly(self._namespaces.introduce, namespace, description)

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """Return the descriptions of namespaces, as whoever wrote them put it: nothing seals them.

        At most 1,024, of 64 KiB each.
        """
        try:
            return self._namespaces.read()
        except Unreachable:
            self._count("misses_unreachable")
            return {}

    def forget_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Do nothing: others may use these states, and what nobody uses expires."""

    def close(self) -> None:
        """Let go of all connections; from then on everything is a miss. Again does nothing."""
        self._link.close()

    # -- inside ------------------------------------------------------------------------------------

    def _count(self, kind: str, n: int = 1) -> None:
        with self._lock:
            self.counters[kind] = self.counters.get(kind, 0) + n

    def _reject(self, name: bytes, error: BlobRejected) -> None:
        self._count(f"rejected_{error.reason}")
        logger.warning("blob %s on %s %s", name.hex()[:16], self._address.shown, error)

    def _drop(self, name: bytes, error: BlobRejected) -> None:
        """Say what is wrong with a blob, and drop it unless someone else can read it."""
        self._reject(name, error)
        if error.reason not in NOT_OURS:
            self._quietly(self._writer.delete, name)

    def _forget(self, gone: list[bytes]) -> None:
        """Take out the records of blobs that the server dropped, so that nobody asks again."""
        self._count("misses_gone", len(gone))
        self._quietly(self._writer.forget, gone)

    def _quietly(self, action: Callable[..., object], *arguments: object) -> None:
        try:
            action(*arguments)
        except Unreachable:
            self._count("refused_unreachable")

    def _wanted(self, names: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Return names with the most bytes that their first chunks should have."""
        known = {name: self._known.get(name) for name in names}
        strange = [name for name, one in known.items() if one is None]
        sizes = dict(zip(strange, self._blobs.sizes(strange), strict=True))
        return [(name, one.n_bytes if (one := known[name]) else sizes[name] or 0) for name in names]

    def _opened(self, name: bytes, value: bytes, expected: int) -> Buffer | None:
        try:
            payload = self._blobs.opened(name, value, expected)
        except BlobRejected as error:
            self._drop(name, error)
            return None
        except Unreachable:
            self._count("misses_unreachable")
            return None
        self._count("hits")
        return frozen(payload)
