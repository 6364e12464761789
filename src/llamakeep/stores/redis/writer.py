"""Writing to a Redis server that others write to as well.

A blob is entered in the ledger, then written, then said to be complete and entered in the index.
Whoever dies in between leaves an entry without a blob, or a blob that nobody finds; the entry
says how many keys there may be, and when it is overdue the next writer clears them away. Removing
goes the other way: first the keys, last the entry. So at every instant what is there is counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llamakeep.errors import BlobRejected
from llamakeep.states import Buffer
from llamakeep.stores import envelope
from llamakeep.stores.redis.blobs import MAX_CHUNKS, RedisBlobs
from llamakeep.stores.redis.breaker import Unreachable
from llamakeep.stores.redis.index import MAX_RECORDS, RedisIndex, beside, spot_of
from llamakeep.stores.redis.keys import RedisKeys, Spot
from llamakeep.stores.redis.known import KnownBlobs
from llamakeep.stores.redis.ledger import Entry, RedisLedger, Reservation
from llamakeep.tokens import Place

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import RedisLink

NOT_OURS = ("secret", "version")
"""Reasons that leave a blob alone: someone else can read it."""

_TRIES = 3
_GHOSTS_AT_ONCE = 64
_GHOSTS_EVERY_S = 1.0
_DROPPED_AT_ONCE = 4
_NOT_THERE = -2  # of a key, where PTTL is asked how long it lives


class RedisWriter:
    """Writes, lets live on, and removes. From any thread; all of it raises `Unreachable`.

    Args:
        link: To the server.
        keys: Of the prefix.
        blobs: Of the prefix.
        index: Of the prefix.
        ledger: Of the prefix.
        known: What this process knows; kept up to date.
        count: Called with the kind of each thing that happened, for counters.
        reject: Called with a name and what is wrong with what is there, to count and log it.
        max_blob_bytes: Larger ones are refused.
        clock: Seconds.
    """

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        blobs: RedisBlobs,
        index: RedisIndex,
        ledger: RedisLedger,
        known: KnownBlobs,
        *,
        count: Callable[[str], None],
        reject: Callable[[bytes, BlobRejected], None],
        max_blob_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._keys = keys
        self._blobs = blobs
        self._index = index
        self._ledger = ledger
        self._known = known
        self._count = count
        self._reject = reject
        self._max_blob_bytes = max_blob_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._next_ghosts = clock()

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, name: bytes, n_bytes: int, place: Place | None) -> Reservation | None:
        """Ask for room for a blob.

        Returns:
            A reservation that is `ok`; one that is `kept` when the blob is there; None when it
            was refused, which is counted.
        """
        n_chunks = self._blobs.n_chunks(n_bytes, place)
        entry = Entry.new(envelope.header_bytes(place) + n_bytes, n_chunks)
        fits = n_bytes <= self._max_blob_bytes and n_chunks <= MAX_CHUNKS
        instead = b""
        for _ in range(_TRIES):
            commands = [self._blobs.glancing(name, place)]
            if fits:
                # First the ledger, then the blob: who is entered there as kept was written.
                commands.insert(0, self._ledger.reserving(name, entry, instead))
            *asked, glance = self._link.run(commands)
            reservation = self._ledger.reserved(asked[0], entry) if fits else None
            if isinstance(glance, Exception):
                self._give_back(name, reservation)
                self._count("refused_server")
                return None
            try:
                is_there = self._blobs.glanced(name, glance)
            except BlobRejected as error:
                self._reject(name, error)
                if error.reason in NOT_OURS or not self._drop_keys(name, 1):
                    self._give_back(name, reservation)
                    return None
                is_there = False
            if is_there:
                self._adopt(name, n_bytes, place, reservation)
                return Reservation("kept", 0, entry)
            if reservation is None:
                self._count("refused_size")
                return None
            if reservation.outcome == "ok":
                return reservation
            if reservation.outcome in ("kept", "stale"):
                # Its keys are gone, or were never all there. What is left of them goes first.
                if not self._drop_keys(name, reservation.entry.n_chunks):
                    return None
                instead = reservation.entry.raw
            elif reservation.outcome == "busy" or not self._drop_ghosts():
                self._count(f"refused_{reservation.outcome}")
                return None
        self._count("refused_busy")
        return None

    def release(self, name: bytes, reservation: Reservation) -> None:
        """Give a reservation back that nothing was written for."""
        self._link.run([self._ledger.releasing([(name, reservation.entry)])])

    def write(
        self, name: bytes, data: Buffer, place: Place | None, reservation: Reservation
    ) -> bool:
        """Write what room was reserved for; return whether it is there. If not, nothing is."""
        entry, expires_ms = reservation.entry, reservation.expires_ms
        if not self._blobs.write(name, data, place, expires_ms):
            self.remove(name, entry)
            return False
        commands = [self._ledger.committing(name, entry)]
        spot = spot_of(place) if place is not None else None
        if spot is not None:
            commands += self._index.entering(spot, expires_ms)
            commands += self._index.measuring(spot) + self._index.sampling(spot)
        committed, *replies = self._link.run(commands)
        self._known.learn(name, spot, entry.n_bytes)
        if committed != 1 or any(isinstance(reply, Exception) for reply in replies):
            # Cleared meanwhile, or too slow for the lease, or found by nobody.
            self.remove(name, entry)
            return False
        if spot is not None and spot.branch:
            with contextlib.suppress(Unreachable):  # counted; the blob is there all the same
                n_records, sample = replies[-2:]
                self._weed(spot, self._link.whole(n_records), self._link.rows(sample))
        return True

    def extend(self, names: Sequence[bytes], entering: Spot | None = None) -> list[bytes]:
        """Let blobs and their records live on, and enter one that may not be in the index.

        Returns:
            Those that are not there.
        """
        # The ledger first: what is counted must not be gone before what it counts.
        expires_ms, n_chunks = self._ledger.extend(names)
        keys: dict[str, None] = {}
        for name, n in zip(names, n_chunks, strict=True):
            keys |= dict.fromkeys(self._keys.chunks(name, min(n, MAX_CHUNKS)))
            spot = self._known.spot(name)
            if spot is not None:
                keys |= dict.fromkeys(self._index.keys_of(spot))
        commands = [("PEXPIREAT", key, expires_ms) for key in (*keys, self._keys.namespaces)]
        if entering is not None:
            commands += self._index.entering(entering, expires_ms) + self._index.measuring(entering)
        run = self._link.run(commands)
        n_records = run[-1] if entering is not None and entering.branch else 0
        if entering is not None and isinstance(n_records, int) and n_records > MAX_RECORDS:
            (sample,) = self._link.run(self._index.sampling(entering))
            self._weed(entering, n_records, self._link.rows(sample))
        replies = dict(zip(keys, run, strict=False))
        return [name for name in names if replies.get(self._keys.chunk(name, 0), 0) == 0]

    # -- removing ----------------------------------------------------------------------------------

    def delete(self, name: bytes) -> bool:
        """Drop a blob; return whether it was there. One that is being written is left alone."""
        raw, size, glance = self._link.run(
            [
                self._ledger.reading(name),
                ("STRLEN", self._keys.chunk(name, 0)),
                self._blobs.glancing(name, None),
            ],
        )
        n_bytes = self._link.whole(size)
        if raw is None:
            if not n_bytes:
                return False
            entry = Entry.new(0, self._blobs.cut_into(self._link.text(glance), n_bytes))
        else:
            entry = self._ledger.parsed(raw)
            if not n_bytes and name in self._ledger.pending():
                return False
        return self.remove(name, entry) and n_bytes > 0

    def remove(self, name: bytes, entry: Entry) -> bool:
        """Drop a blob, its record and its entry; return whether the server did."""
        commands = [self._blobs.removing(name, entry.n_chunks)]
        spot = self._known.spot(name)
        if spot is not None:
            commands += self._index.leaving(spot)
        reply, *_ = self._link.run(commands)
        if isinstance(reply, Exception):
            return False
        self._known.forget(name)
        self._link.run([self._ledger.releasing([(name, entry)])])
        return True

    def forget(self, names: Sequence[bytes]) -> None:
        """Take out the records of blobs that are gone."""
        spots = [self._known.spot(name) for name in names]
        for name in names:
            self._known.forget(name)
        self._take_out([spot for spot in spots if spot is not None])

    # -- inside ------------------------------------------------------------------------------------

    def _adopt(
        self, name: bytes, n_bytes: int, place: Place | None, reservation: Reservation | None
    ) -> None:
        """Take a blob that is there for the one to be written: make sure that it is found."""
        if reservation is not None and reservation.outcome in ("ok", "stale"):
            # It was not counted, or its writer died before it said that all was written.
            self._link.run([self._ledger.committing(name, reservation.entry)])
        spot = spot_of(place) if place is not None else None
        self._known.learn(name, spot, envelope.header_bytes(place) + n_bytes)
        self.extend([name], spot)

    def _give_back(self, name: bytes, reservation: Reservation | None) -> None:
        if reservation is not None and reservation.outcome == "ok":
            self.release(name, reservation)

    def _drop_keys(self, name: bytes, n_chunks: int) -> bool:
        (reply,) = self._link.run([self._blobs.removing(name, n_chunks)])
        return not isinstance(reply, Exception)

    def _weed(self, spot: Spot, n_records: int, sample: Sequence[Any]) -> None:
        """Take out of a list, of some of its records, those whose blobs are gone.

        A record outlives its blob while others in its list are used, and nobody may ever ask for
        it. So whoever writes one looks at a few, and they do not pile up. Of a list that is too
        long others go too: what names find first, then what is used least.
        """
        raws = [self._link.text(raw) for raw in sample]
        others = [it for raw in raws if raw != spot.member and (it := beside(spot, raw))]
        lives = self._link.run([("PTTL", self._keys.chunk(it.name, 0)) for it in others])
        gone: list[Spot] = []
        there: list[tuple[bool, int, Spot]] = []
        for it, life_ms in zip(others, lives, strict=True):
            if life_ms == _NOT_THERE:
                gone.append(it.spot)
            elif isinstance(life_ms, int):
                there.append((not it.closes, life_ms, it.spot))
        there.sort(key=lambda one: one[:2])
        n_over = min(max(0, n_records - MAX_RECORDS - len(gone)), _DROPPED_AT_ONCE)
        self._take_out([*gone, *(its for *_, its in there[:n_over])])

    def _take_out(self, spots: Sequence[Spot]) -> None:
        self._link.run([command for spot in spots for command in self._index.leaving(spot)])

    def _drop_ghosts(self) -> bool:
        """Take out entries of blobs that the server has dropped; return whether there were any.

        Looks at those that would expire first: they were not used for longest, so they are what a
        server drops that needs room. At most once a second.
        """
        now = self._clock()
        with self._lock:
            if now < self._next_ghosts:
                return False
            self._next_ghosts = now + _GHOSTS_EVERY_S
        # First the entries, then the blobs: who is entered by then and not pending was written.
        pending = self._ledger.pending()
        oldest = self._ledger.oldest(_GHOSTS_AT_ONCE)
        sizes = self._blobs.sizes([name for name, _ in oldest])
        dropped = [
            self.remove(name, entry)
            for (name, entry), size in zip(oldest, sizes, strict=True)
            if size == 0 and name not in pending
        ]
        return any(dropped)
