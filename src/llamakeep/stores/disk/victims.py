"""Which states of a directory go when room is needed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable

from llamakeep.policy import Policy, looks_around
from llamakeep.policy.queue import EvictionQueue
from llamakeep.stores.disk import rows
from llamakeep.stores.disk.rows import CHECKPOINT, SEGMENT, Row

_AT_ONCE = 64
_LOOK_AGAIN = 64
_SCANNED_FOR_EACH = 16


class Victims:
    """Drops states, what the policy ranks first in front, and none that something hangs off.

    The order is remembered between calls. It may be old: others use, add and drop states as well.
    So what was added since is looked up first, what comes to the front is looked up again, and now
    and then all of it (see `is_old`): until then a checkpoint may count for more than it does,
    before which another has been added.

    Every call happens in the transaction of the index's one writer, which is the lock here, too.

    Args:
        policy: Ranks states.
        clock: Seconds.
        drop: Removes the file of a state.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], drop: Callable[[bytes], None]
    ) -> None:
        self._queue = EvictionQueue[Row](policy, clock, lambda row: True)
        self._drop = drop
        self._looks_around = looks_around(policy)
        self._look_again = 0
        self._n_popped = 0
        self._seen = (b"", 0)  # which database, and up to where

    @property
    def is_old(self) -> bool:
        """Whether it is time to `load` all that may go: a scan for every so many that went."""
        return not len(self._queue) or self._n_popped > self._look_again

    def load(self, found: Iterable[Row], n_states: int) -> None:
        """Begin again with these states, which were found in a scan of `n_states`."""
        self._queue.clear()
        for row in found:
            self._queue.push(row)
        self._look_again = max(_LOOK_AGAIN, n_states // _SCANNED_FOR_EACH)
        self._n_popped = 0

    def look_around(self, sql: sqlite3.Connection, found: Iterable[Row]) -> None:
        """Look up what is before checkpoints, if the policy asks for that.

        Costs a few look-ups for each block back to there, of each block once.
        """
        known: dict[bytes | None, int] = {}
        for row in found if self._looks_around else ():
            if row.kind == CHECKPOINT:
                row.before = rows.restorable_before(sql, row, known)

    def add(self, sql: sqlite3.Connection, name: bytes) -> None:
        """Think of a state that something hung off until now."""
        row = rows.get(sql, name) if self._has_room else None
        if row is not None and row.kind:
            self.look_around(sql, [row])
            self._queue.push(row)

    @property
    def _has_room(self) -> bool:
        return 0 < len(self._queue) < 64 * self._look_again

    def _notice(self, sql: sqlite3.Connection) -> None:
        """Think of what was written since the last time, by whomever."""
        database, last = rows.newest(sql)
        if database != self._seen[0]:
            self._queue.clear()
        elif self._has_room:
            written = rows.written_after(sql, self._seen[1])
            self.look_around(sql, written)
            for row in written:
                self._queue.push(row)
        self._seen = (database, last)

    def evict(self, sql: sqlite3.Connection, n_bytes: int, held: Collection[bytes]) -> list[Row]:
        """Drop states until `n_bytes` are free, or none is left, or enough for one transaction.

        Files go before their rows: what ends in between leaves rows without files, which are
        noticed, and no files without rows, which would not be counted.

        Args:
            sql: The index, in a transaction.
            n_bytes: How much to free.
            held: Names of states that stay.

        Returns:
            What went.

        Raises:
            OSError: When a file cannot be removed, and none was before it: what was is committed.
        """
        self._notice(sql)
        gone: list[Row] = []
        aside: list[Row] = []

        def can_go(row: Row) -> bool:
            now = rows.get(sql, row.name)
            # Another may have taken its place, of another size: that one has a row of its own.
            if now is None or now.sequence != row.sequence or rows.hangs_off(sql, now):
                return False
            if row.name in held:
                aside.append(row)
                return False
            row.last_used, row.hits, row.parent = now.last_used, now.hits, now.parent
            self.look_around(sql, [row])
            return True

        while sum(row.n_bytes for row in gone) < n_bytes and len(gone) < _AT_ONCE:
            row = self._queue.pop(can_go)
            if row is None:
                break
            self._n_popped += 1
            try:
                self._take(sql, row, held, gone)
            except OSError:
                if not gone:
                    raise
                break
        for row in aside:
            self._queue.push(row)
        return gone

    def _take(
        self, sql: sqlite3.Connection, row: Row, held: Collection[bytes], gone: list[Row]
    ) -> None:
        """Drop a state, and above it what is of no use without it; queue what may go then."""
        pending = [row]
        while pending:
            row = pending.pop()
            higher = rows.directly_above(sql, row)
            self._drop(row.name)
            rows.remove(sql, row.name)
            gone.append(row)
            for each in higher:
                if each.kind != SEGMENT or rows.hangs_off(sql, each):
                    continue
                if each.name not in held and rows.is_rolling(sql, each.namespace):
                    pending.append(each)
                else:
                    self._queue.push(each)
