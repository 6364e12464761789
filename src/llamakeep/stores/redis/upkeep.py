"""What is kept under a prefix: listing it, clearing it, and the ledger against the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamakeep.stores.redis.breaker import Unreachable
from llamakeep.stores.redis.keys import RedisKeys
from llamakeep.stores.redis.ledger import Entry, RedisLedger

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import RedisLink


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """A blob that is kept.

    Attributes:
        name: Its name.
        n_bytes: What it counts for.
        expires_at: When it goes if it is not used, in seconds since 1970 on the server.
    """

    name: bytes
    n_bytes: int
    expires_at: float


class RedisUpkeep:
    """Looks after a prefix. From any thread; all of it raises `Unreachable`.

    Args:
        link: To the server.
        keys: Of the prefix.
        ledger: Of the prefix.
        remove: Drops a blob, its record and its entry; says whether the server did.
    """

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        ledger: RedisLedger,
        remove: Callable[[bytes, Entry], bool],
    ) -> None:
        self._link = link
        self._keys = keys
        self._ledger = ledger
        self._remove = remove

    def entries(self) -> list[SharedEntry]:
        """Return what is kept, not what is still being written."""
        self._ledger.totals()  # drops what has expired
        pending = self._ledger.pending()
        found: dict[bytes, SharedEntry] = {}
        for batch in self._ledger.walk():
            expiries = self._ledger.expiries([name for name, _ in batch])
            for (name, entry), at in zip(batch, expiries, strict=True):
                if name not in pending:
                    found[name] = SharedEntry(name, entry.n_bytes, (at or 0.0) / 1000)
        return list(found.values())

    def server_bytes(self) -> tuple[int, int]:
        """Return the memory that the server uses, and its limit, 0 for none."""
        used = limit = 0
        for node in self._link.nodes():
            memory = self._link.on_node(node, "INFO", "memory")
            if not isinstance(memory, dict):
                raise self._link.nonsense(memory)
            used += self._link.whole(memory.get("used_memory"))
            limit += self._link.whole(memory.get("maxmemory"))
        return used, limit

    def clear(self) -> None:
        """Drop everything. Walks through all keys of the server."""
        for batch in self._ledger.walk():
            for name, entry in batch:
                self._remove(name, entry)
        # Then what the ledger does not know of. The ledger stays: someone may be writing.
        ledger = {key.encode() for key in self._ledger.keys}
        for keys in self._link.scan(self._keys.all_pattern):
            self._unlink(key for key in keys if key not in ledger)

    def check(self, fix: bool) -> str:
        """Return what is wrong, in numbers, or nothing. Walks through all keys of the server."""
        totals = self._ledger.totals()
        pending = self._ledger.pending()
        entries = {name: entry for batch in self._ledger.walk() for name, entry in batch}
        wrong = [
            name
            for name, entry in entries.items()
            if name not in pending and self._bytes_of(name, entry) != entry.n_bytes
        ]
        uncounted: set[bytes] = set()
        for keys in self._link.scan(self._keys.blob_pattern):
            for key in keys:
                name, index = self._keys.chunk_of(key) or (b"", 0)
                if name not in entries or index >= entries[name].n_chunks:
                    uncounted.add(key)
        counted = sum(entry.n_bytes for entry in entries.values())
        if totals.used_bytes == counted and not wrong and not uncounted:
            return ""
        if fix:
            for name in wrong:
                self._remove(name, entries[name])
            self._unlink(uncounted)
            self._ledger.recount()
        return (
            f"{totals.used_bytes:,} bytes are counted, {counted:,} are entered; of "
            f"{len(entries):,} blobs {len(wrong):,} are not as entered, and {len(uncounted):,} "
            "keys are not entered"
        )

    def _bytes_of(self, name: bytes, entry: Entry) -> int:
        keys = self._keys.chunks(name, entry.n_chunks)
        replies = self._link.run([("STRLEN", key) for key in keys])
        return sum(self._link.whole(reply) for reply in replies)

    def _unlink(self, keys: Iterable[bytes]) -> None:
        # One by one: they are on several nodes.
        for reply in self._link.run([("UNLINK", key) for key in keys]):
            if isinstance(reply, Exception):
                raise Unreachable(str(reply)) from reply
