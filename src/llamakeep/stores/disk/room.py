"""Room for what is written into a directory: counted before it is taken, and made by evicting.

What is counted is in the index, so that all processes count together. A write first reserves its
bytes there, and gives them back when it is over or when what it wrote is counted as kept.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable

from llamakeep.policy import Policy
from llamakeep.stores.disk import rows
from llamakeep.stores.disk.index import Index
from llamakeep.stores.disk.owners import Owner, this_process
from llamakeep.stores.disk.shelf import Shelf
from llamakeep.stores.disk.victims import Victims
from llamakeep.tally import Refused, Tally
from llamakeep.tokens import Place

_FULL = "the file system has no room to spare"


class Room:
    """Reserves bytes, evicts for them, and enters what was written. From any thread.

    Args:
        shelf: The files.
        index: What is counted.
        policy: Which states go first.
        capacity_bytes: The limit on what is kept and being written.
        min_free_bytes: Room on the file system that is left to others.
        clock: Seconds.
        tally: Counts what was evicted.
    """

    def __init__(
        self,
        shelf: Shelf,
        index: Index,
        policy: Policy,
        *,
        capacity_bytes: int,
        min_free_bytes: int,
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self._shelf = shelf
        self._index = index
        self._clock = clock
        self._tally = tally
        self._victims = Victims(policy, clock, shelf.drop)
        self._owner: Owner | None = None
        self._owner_lock = threading.Lock()
        self._numbers = itertools.count(1)

    # -- one write ---------------------------------------------------------------------------------

    def reserve(
        self, name: bytes, cost: int, place: Place | None, *, replace: bool = False
    ) -> str | None:
        """Count the bytes of a state before they exist, and evict others for them if need be.

        Nothing is evicted for what cannot fit anyway, nor for what has no place.

        Returns:
            A ticket for the write, to be ended by `enter` or `release`; None when the state is
            here already, and is not to be replaced.

        Raises:
            Refused: When there is no room.
            OSError, sqlite3.Error: When the directory or the index fails.
        """
        if cost > self.capacity_bytes:
            raise Refused(
                "too_large", f"{cost:,} bytes never fit into {self.capacity_bytes:,} bytes"
            )
        owner = self._this_owner()
        ticket = f"{owner.key}-{next(self._numbers)}"
        work = _Making(self._victims, place, cost, self._tally)
        free = self._shelf.free_bytes()
        while True:
            with self._index.writing() as sql:
                if not replace and rows.get(sql, name) is not None:
                    return None
                totals = rows.totals(sql)
                over = totals.used_bytes + cost - self.capacity_bytes
                short = self._min_free_bytes + totals.writing_bytes + cost - free
                enough = work.make(sql, totals, over, short)
                if enough and (short <= 0 or self._shelf.free_bytes() >= free + short):
                    rows.reserve(sql, ticket, name, cost, owner, place, self._clock())
                    return ticket
                look_again = self._victims.is_old or work.stuck
            if enough:
                # What was evicted made no room. It is gone, so this could not be said before.
                raise Refused("disk_full", _FULL)
            work.fresh = self._evictable() if look_again else None

    def enter(
        self,
        ticket: str,
        name: bytes,
        n_bytes: int,
        cost: int,
        place: Place | None,
        *,
        replace: bool = False,
    ) -> None:
        """Give a written file its place and index it, instead of its reservation.

        Both happen in one transaction, so that files and index agree for whoever holds the lock.
        When another has written the same name meanwhile, that one stays. The ticket stays too, for
        no bytes, until the file's name is on the device.

        Raises:
            Refused: When the index was made anew meanwhile, and now has no room.
            BlobRejected: When a link is in the way.
            OSError, sqlite3.Error: When the directory or the index fails.
        """
        with self._index.writing() as sql:
            known = rows.get(sql, name) is not None
            if known and not replace and self._shelf.stat(name) is not None:
                self._shelf.discard(ticket)
            else:
                if known:
                    rows.remove(sql, name)  # it is replaced, or its file is gone
                free = self.capacity_bytes - rows.totals(sql).used_bytes
                if not rows.is_reserved(sql, ticket) and cost > free:
                    raise Refused("raced", "the index was made anew while a state was written")
                self._shelf.publish(ticket, name)
                rows.insert(sql, name, place, n_bytes, cost, rows.next_time(sql, self._clock()))
            rows.spend(sql, ticket)

    def release(self, ticket: str, failed: bytes | None = None) -> None:
        """End a write, and give back what is still reserved for it.

        Args:
            ticket: Of the write.
            failed: Name of what came to its place, perhaps, but not into the index.
        """
        self._shelf.discard(ticket)
        with self._index.writing() as sql:
            # Nobody else can be between the two: they happen under the lock that is held now.
            if failed is not None and rows.get(sql, failed) is None:
                found = self._shelf.stat(failed)
                if found is not None and stat.S_ISREG(found.st_mode):
                    self._shelf.drop(failed)
            rows.release(sql, ticket)

    # -- all of it ---------------------------------------------------------------------------------

    def trim(self, max_bytes: int) -> int:
        """Evict until no more than `max_bytes` are in use, or nothing can go; return how many."""
        n_gone = 0
        work = _Making(self._victims, None, 0, self._tally)
        while True:
            with self._index.writing() as sql:
                need = rows.totals(sql).used_bytes - max_bytes
                n = work.evict(sql, need) if need > 0 else 0
                n_gone += n
                if need <= 0 or (not n and work.fresh is not None):
                    return n_gone
                look_again = self._victims.is_old or work.stuck
            work.fresh = self._evictable() if look_again else None

    def drop(self, sql: sqlite3.Connection, names: Iterable[bytes]) -> int:
        """Drop states, whatever hangs off them; return how many were there.

        Args:
            sql: The index, in a transaction.
            names: Which ones.
        """
        n_gone = 0
        for name in names:
            row = rows.get(sql, name)
            higher = rows.directly_above(sql, row) if row is not None else []
            self._shelf.drop(name)
            n_gone += rows.remove(sql, name)
            for each in higher:
                self._victims.add(sql, each.name)
        return n_gone

    def leave(self) -> None:
        """Note that nothing more is written from here."""
        if self._owner is not None and self._owner.pid == os.getpid():
            with self._index.writing() as sql:
                rows.leave(sql, self._owner)

    def _evictable(self) -> list[rows.Row]:
        # Outside of any transaction: a scan takes long, and must not keep others from writing.
        with self._index.scanning() as sql:
            found = list(rows.evictable(sql))
            self._victims.look_around(sql, found)
            return found

    def _this_owner(self) -> Owner:
        with self._owner_lock:
            if self._owner is None or self._owner.pid != os.getpid():  # a fork is another process
                self._owner = this_process()
            return self._owner


class _Making:
    """Makes room for one state, in as many transactions as it takes.

    Attributes:
        fresh: All that may go, to be looked through again in the next transaction.
        stuck: Nothing went in the last one: what is remembered does not do.
    """

    def __init__(self, victims: Victims, place: Place | None, cost: int, tally: Tally) -> None:
        self.fresh: list[rows.Row] | None = None
        self.stuck = False
        self._victims = victims
        self._place = place
        self._cost = cost
        self._tally = tally
        self._held: set[bytes] | None = None
        self._freed = 0

    def make(self, sql: sqlite3.Connection, totals: rows.Totals, over: int, short: int) -> bool:
        """Evict for what is over the limit now, and short of the free room there was at first.

        Returns:
            Whether it is enough; else this has to be called again, in another transaction.

        Raises:
            Refused: When it cannot be enough; nothing was evicted in this transaction.
        """
        if over <= 0 and short <= self._freed:
            return True
        if self._held is None:
            above = rows.above(sql, self._place) if self._place is not None else []
            movable = totals.kept_bytes - totals.opaque_bytes - sum(row.n_bytes for row in above)
            if self._place is None or max(over, short) > movable:
                raise self.refused(over)
            self._held = {row.name for row in above}
        before = self._freed
        if not self.evict(sql, max(over, short - before)) and self.fresh is not None:
            raise self.refused(over)
        return over <= self._freed - before and short <= self._freed

    def evict(self, sql: sqlite3.Connection, n_bytes: int) -> int:
        """Evict until so much is free, or for one transaction; return how many went."""
        if self.fresh is not None:
            self._victims.load(self.fresh, rows.totals(sql).n_states)
        gone = self._victims.evict(sql, n_bytes, self._held or ())
        self.stuck = not gone
        self._tally.count("evicted", len(gone))
        self._freed += sum(row.n_bytes for row in gone)
        return len(gone)

    def refused(self, over: int) -> Refused:
        """Return why there is no room: it is over the limit, or the file system is full."""
        if over > 0:
            return Refused("no_room", f"{self._cost:,} bytes do not fit beside what has to stay")
        return Refused("disk_full", _FULL)
