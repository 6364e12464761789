"""Memory over tiers that outlive the process: reads fall through, writes go down behind.

What is put is in memory at once, and in the queue for the tiers below. A read that memory cannot
serve asks the tiers in order; what it found is offered to memory afterwards (`take_promoted`),
because only the tree knows what may be evicted for it. Nothing here waits for a device or a
network, except a read that has nowhere else to go.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from llamakeep.errors import OverBudget, whole_number
from llamakeep.states import Block, Buffer, Record, frozen
from llamakeep.stores.base import Tier
from llamakeep.stores.behind import Behind, Job
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import Place

logger = logging.getLogger("llamakeep")

QUEUE_BYTES = 256 << 20
"""Default limit on the bytes that wait to be written."""
_WORTH_A_THREAD = 1 << 20
_END: Any = object()
_MAX_TOUCHED = 65_536
"""Uses that wait to be told to the tiers; more than these are not told."""


class _Write:
    """A blob on its way down.

    Attributes:
        missing: The tiers that lack it.
        data: The blob while it is in the queue; None while memory alone holds it.
        sightings: Prompts that used it since it was put.
        admitted: It is to go down as soon as there is room in the queue.
        instead_of: Tails whose place it takes.
        job: The job that writes it, while there is one.
    """

    __slots__ = ("admitted", "data", "instead_of", "job", "missing", "place", "sightings")

    def __init__(self, place: Place | None, missing: Sequence[Tier]) -> None:
        self.place = place
        self.missing = list(missing)
        self.data: Buffer | None = None
        self.sightings = 0
        self.admitted = False
        self.instead_of: list[bytes] = []
        self.job: Job | None = None


class TieredStore:
    """Memory over tiers, nearest first. One thread at a time; its own thread writes behind.

    Args:
        memory: Holds what was put; its capacity is this store's.
        below: The tiers, nearest first.
        queue_bytes: Limit on the bytes that wait to be written, or to be taken into memory. They
            are held besides the memory's capacity when memory has evicted them meanwhile.
        second_sighting: A state goes down only when a second prompt has used it.
        min_tokens: States of prompts shorter than this do not go down.
        drain_s: Seconds that the end of the process waits for the queue.

    Raises:
        InvalidValue: For a negative number.

    Attributes:
        counters: What happened: `written_<tier>`, `refused_<tier>`, `dropped_queue_full`,
            `dropped_at_close`, `cancelled`, `promoted_<tier>`.
    """

    tier = "ram"

    def __init__(
        self,
        memory: MemoryStore,
        *below: Tier,
        queue_bytes: int = QUEUE_BYTES,
        second_sighting: bool = False,
        min_tokens: int = 0,
        drain_s: float = 10.0,
    ) -> None:
        self.memory = memory
        self.below: Sequence[Tier] = below
        self.counters: Counter[str] = Counter()
        self._second_sighting = second_sighting
        self._min_tokens = whole_number("min_tokens", min_tokens, 0)
        self._behind = Behind(whole_number("queue_bytes", queue_bytes, 0), drain_s=drain_s)
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._writes: dict[bytes, _Write] = {}  # what some tier lacks, by name
        self._deleted: Counter[bytes] = Counter()  # deletions on their way down
        self._touched: dict[bytes, None] = {}
        self._touching = False
        self._reader = ThreadPoolExecutor(1, "llamakeep-read")
        self._ready: list[tuple[bytes, Buffer]] = []
        self._origin: dict[bytes, Tier] = {}  # of what is ready
        self._closed = False

    def __repr__(self) -> str:
        tiers = ", ".join(map(repr, (self.memory, *self.below)))
        return f"TieredStore({tiers})"

    # -- memory --------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes in memory."""
        return self.memory.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in memory now."""
        return self.memory.used_bytes

    def cost_bytes(self, n_bytes: int, place: Place | None = None) -> int:
        """Return the bytes that a blob of `n_bytes` counts for in memory."""
        return self.memory.cost_bytes(n_bytes, place)

    def held(self) -> Iterator[bytes]:
        """Yield the names of what is in memory."""
        return self.memory.held()

    def holds(self, name: bytes) -> bool:
        """Whether a blob is in memory."""
        return self.memory.holds(name)

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], Buffer],
        place: Place | None = None,
    ) -> bool:
        """Keep the blob in memory, and soon in every tier. See `Store.put`.

        A state with a place goes down when the path to it was `seen`, so that no tier has a state
        without what it hangs off; a blob without one goes down at once.
        """
        if self.memory.holds(name):
            return True
        on_its_way = self._in_memory(name)
        if on_its_way is not None:
            return self.memory.admit(name, on_its_way)
        if not self.memory.put(name, n_bytes, produce, place):
            return False
        with self._lock:
            self._writes.setdefault(name, _Write(place, self.below))
        if place is None:
            self._send(name)
        return True

    def put_below(
        self, name: bytes, n_bytes: int, produce: Callable[[], Buffer], place: Place
    ) -> str:
        """Keep a blob in the tiers alone. See `TreeStore.put_below`."""
        budget = self._behind.budget
        if not self.below or self._second_sighting or place.end < self._min_tokens:
            return ""
        if name in self._writes or self._is_below(name):
            return self.below[0].tier
        if n_bytes > budget.free_bytes:
            self._count("dropped_queue_full")
            return ""
        data = produce()
        with self._lock:
            write = self._writes[name] = _Write(place, self.below)
            write.admitted = True
        if self._send(name, frozen(data)):
            return self.below[0].tier
        with self._lock:
            self._writes.pop(name, None)
        return ""

    def _count(self, what: str, times: int = 1) -> None:
        with self._counting:
            self.counters[what] += times

    def evict(self, name: bytes) -> None:
        """Drop a blob from memory; what is in the queue or below stays."""
        self.memory.evict(name)
        with self._lock:
            write = self._writes.get(name)
            if write is not None and write.data is None:
                del self._writes[name]

    def admit(self, name: bytes, data: Buffer, place: Place | None = None) -> bool:
        """Keep in memory what a tier has, and soon in the tiers nearer than that."""
        if not self.memory.admit(name, data):
            return False
        with self._lock:
            origin = self._origin.pop(name, None)
            nearer = self.below[: self.below.index(origin)] if origin in self.below else ()
            if nearer and name not in self._writes:
                self._writes[name] = _Write(place, nearer)
                self._writes[name].admitted = True
        if nearer:
            self._send(name)
        return True

    # -- going down ----------------------------------------------------------------------------

    def seen(self, names: Sequence[bytes], n_tokens: int, *, used: bool) -> None:
        """Note a path that a prompt saved or used: what is to go down goes. See `TreeStore.seen`.

        What a full queue or a failing tier kept from going down goes when it is seen again.
        """
        for name in names:
            write = self._writes.get(name)
            if write is None:
                continue
            write.sightings += used
            write.admitted |= n_tokens >= self._min_tokens and (
                write.sightings > 0 or not self._second_sighting
            )
            if write.admitted and not self._send(name):
                break  # nothing goes down without what it hangs off
        if used:
            self._tell(names)

    def _send(self, name: bytes, data: Buffer | None = None) -> bool:
        """Put a blob into the queue; return whether it is there or needs not be."""
        with self._lock:
            write = self._writes.get(name)
            if write is None or write.data is not None:
                return True
            if not write.missing:
                del self._writes[name]
                return True
            data = self.memory.get(name) if data is None else data
            if data is None:
                del self._writes[name]
                return False
            write.data = data
        write.job = self._behind.submit(lambda: self._write(name, write), data.nbytes)
        if write.job is None:
            with self._lock:
                write.data = None
            self._count("dropped_queue_full")
            return False
        return True

    def _write(self, name: bytes, write: _Write) -> None:
        data = write.data
        if data is None:  # pragma: no cover - a cancelled job does not run
            return
        for tier in list(write.missing):
            if tier.put(name, data.nbytes, lambda: data, write.place):
                write.missing.remove(tier)
                self._count(f"written_{tier.tier}")
                for old in write.instead_of:
                    tier.supersede(old, name)
            else:
                self._count(f"refused_{tier.tier}")
        with self._lock:
            write.data = write.job = None
            # What memory still holds may go down later, to a tier that failed.
            if self._writes.get(name) is write and not (write.missing and self.memory.holds(name)):
                del self._writes[name]

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took, everywhere. See `TreeStore.supersede`."""
        self.memory.evict(old)
        with self._lock:
            before = self._writes.pop(old, None)
            after = self._writes.get(new)
            replaced = [old, *(before.instead_of if before is not None else ())]
            attached = after is not None and after.data is None
            if after is not None and attached:
                after.instead_of += replaced  # nothing goes before what takes its place is there
        if before is not None and before.job is not None and self._behind.cancel(before.job):
            self._count("cancelled")
        if not attached and self.below:
            self._behind.submit(lambda: self._supersede(replaced, new))

    def _supersede(self, replaced: Sequence[bytes], new: bytes) -> None:
        for tier in self.below:
            for old in replaced:
                tier.supersede(old, new)

    def _tell(self, names: Sequence[bytes]) -> None:
        """Let the tiers know of a use, soon."""
        with self._lock:
            if not self.below or len(self._touched) >= _MAX_TOUCHED:
                return
            self._touched.update(dict.fromkeys(names))
            if self._touching:
                return
            self._touching = True
        if self._behind.submit(self._touch) is None:
            self._touching = False

    def _touch(self) -> None:
        with self._lock:
            names, self._touched, self._touching = list(self._touched), {}, False
        for tier in self.below:
            tier.touch(names)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the tiers have what is to go down; return whether they were all told.

        What a tier refuses, because it is full or out of reach, counts as told.

        Args:
            timeout: Seconds; None for as long as it takes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        told: set[bytes] = set()
        while True:
            with self._lock:
                left = [n for n, w in self._writes.items() if w.admitted and n not in told]
            sent = list(itertools.takewhile(self._send, left))
            told.update(sent)
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._behind.flush(rest):
                return False
            if not sent:
                return not left

    def close(self, timeout: float | None = 10.0) -> None:
        """Write what is in the queue, then let go of the tiers. Again: does nothing.

        Args:
            timeout: Seconds to wait for the queue; what is left then is dropped and counted.
        """
        if self._closed:
            return
        self._closed = True
        dropped = self._behind.close(timeout)
        self._reader.shutdown()
        self._count("dropped_at_close", dropped)
        if dropped:
            logger.warning("%d states and notes did not reach the tiers below in time", dropped)
        for tier in self.below:
            tier.close()

    # -- reading -------------------------------------------------------------------------------

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, from memory or the nearest tier that has it; or None.

        What comes from a tier is taken into memory where there is free room.
        """
        data = self._in_memory(name)
        if data is not None or name in self._deleted:
            return data
        for tier in self.below:
            data = tier.get(name)
            if data is not None:
                copy = frozen(np.array(data))
                if self.memory.admit(name, copy):
                    self._count(f"promoted_{tier.tier}")
                return copy
        return None

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None, in order. See `Tier.get_many`.

        What a tier below served is read into memory of its own behind, and offered by
        `take_promoted`.
        """
        plan = [(name, self._in_memory(name)) for name in names]
        wanted: dict[Tier, list[bytes]] = {}
        for name, data in plan:
            if data is None and self.below and name not in self._deleted:
                wanted.setdefault(self._nearest(name), []).append(name)
        readers = {tier: self._read_ahead(tier.get_many(wanted[tier])) for tier in wanted}
        source = {name: tier for tier, found in wanted.items() for name in found}
        served: list[tuple[bytes, Tier, int]] = []
        try:
            for name, data in plan:
                if data is None and name in source:
                    tier = source[name]
                    data = next(readers[tier])
                    if data is not None:
                        if tier is self.below[0] and tier.tier == "disk":
                            served.append((name, tier, data.nbytes))
                        else:
                            self._offer(name, data, tier)
                yield data
        finally:
            for name, tier, n_bytes in served:
                self._promote_later(name, tier, n_bytes)

    def _read_ahead(self, blobs: Iterator[Buffer | None]) -> Iterator[Buffer | None]:
        """Yield blobs; while a large one is used, the next one is read and compared."""
        data = next(blobs, _END)
        while data is not _END:
            ahead = None
            if data is not None and data.nbytes >= _WORTH_A_THREAD:
                ahead = self._reader.submit(next, blobs, _END)
            try:
                yield data
            finally:  # nobody may leave while the iterator runs
                data = ahead.result() if ahead is not None else None
            if ahead is None:
                data = next(blobs, _END)

    def _in_memory(self, name: bytes) -> Buffer | None:
        data = self.memory.get(name)
        if data is None:
            write = self._writes.get(name)
            data = write.data if write is not None else None
        return data

    def _nearest(self, name: bytes) -> Tier:
        """Return the tier to read from. The last one is not asked before it is read."""
        return next((tier for tier in self.below[:-1] if name in tier), self.below[-1])

    def _promote_later(self, name: bytes, tier: Tier, n_bytes: int) -> None:
        """Read a blob again, into memory that is not the tier's, behind the requests."""
        if n_bytes > self.memory.capacity_bytes:
            return

        def promote() -> None:
            data = tier.get(name)
            if data is not None:
                self._offer(name, frozen(np.array(data)), tier)

        self._behind.submit(promote)

    def _offer(self, name: bytes, data: Buffer, tier: Tier) -> None:
        if data.nbytes > self.memory.capacity_bytes or self.memory.holds(name):
            return
        try:
            self._behind.budget.reserve(data.nbytes)
        except OverBudget:
            self._count("dropped_queue_full")
            return
        with self._lock:
            self._ready.append((name, data))
            self._origin[name] = tier
        self._count(f"promoted_{tier.tier}")

    def take_promoted(self) -> list[tuple[bytes, Buffer]]:
        """Return what was read from below and may come into memory, and forget it."""
        if not self._ready:
            return []
        with self._lock:
            ready, self._ready = self._ready, []
            self._origin = {name: self._origin[name] for name, _ in ready}
        self._behind.budget.release(sum(data.nbytes for _, data in ready))
        return ready

    def find_pending(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is on its way down and begins like the prompt. See `Tier.find`."""
        by_name = {block.name: block for block in blocks}
        found = []
        with self._lock:
            for name, write in self._writes.items():
                place, data = write.place, write.data
                block = by_name.get(place.block) if place is not None else None
                if place is None or data is None or block is None:
                    continue
                offset = place.start - place.origin
                if offset < block.tokens.size and int(block.tokens[offset]) == place.first:
                    tokens = place.tokens[offset:]
                    tier = self.below[0].tier
                    found.append(Record(place.kind, name, place.start, tokens, data.nbytes, tier))
        return found

    # -- everywhere ----------------------------------------------------------------------------

    def _is_below(self, name: bytes) -> bool:
        return name not in self._deleted and any(name in tier for tier in self.below)

    def delete(self, name: bytes) -> bool:
        """Drop the blob everywhere; return whether it was there."""
        there = self.memory.delete(name)
        with self._lock:
            write = self._writes.pop(name, None)
        there = there or write is not None or self._is_below(name)
        if write is not None and write.job is not None and self._behind.cancel(write.job):
            self._count("cancelled")
        if self.below:
            with self._lock:
                self._deleted[name] += 1
            if self._behind.submit(lambda: self._delete(name)) is None:
                self._delete(name)
        return there

    def _delete(self, name: bytes) -> None:
        for tier in self.below:
            tier.delete(name)
        with self._lock:
            self._deleted[name] -= 1
            self._deleted += Counter()  # forget those that are done

    def clear(self) -> None:
        """Drop everything everywhere. Waits for what is being written."""
        with self._lock:
            jobs = [write.job for write in self._writes.values() if write.job is not None]
            self._writes.clear()
        for job in jobs:
            self._behind.cancel(job)
        self._behind.flush()
        self.take_promoted()
        self.memory.clear()
        for tier in self.below:
            tier.clear()

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, bytes):
            return False
        return name in self.memory or self._in_memory(name) is not None or self._is_below(name)

    def _names(self) -> set[bytes]:
        names = set(self.memory)
        with self._lock:
            names.update(name for name, write in self._writes.items() if write.data is not None)
            gone = set(self._deleted)
        for tier in self.below:
            names.update(name for name in tier if name not in gone)
        return names

    def __len__(self) -> int:
        return len(self._names())

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names())

    def check(self, *, fix: bool = False) -> None:
        """Compare what is counted with what is kept, in memory and below. See `Store.check`."""
        self.flush()
        self.memory.check(fix=fix)
        for tier in self.below:
            tier.check(fix=fix)

    def stats(self) -> dict[str, Any]:
        """Return what waits, what was dropped and why, and each tier's counters; JSON-ready."""
        return {
            "queue_bytes": self._behind.budget.used_bytes,
            "queue_capacity_bytes": self._behind.budget.capacity_bytes,
            "queue_peak_bytes": self._behind.budget.peak_bytes,
            "queued": len(self._behind),
            "errors": self._behind.errors,
            **self.counters,
            "tiers": {tier.tier: self._stats_of(tier) for tier in self.below},
        }

    @staticmethod
    def _stats_of(tier: Tier) -> dict[str, Any]:
        if tier.tier == "shared":  # what it has is asked over a network: see `RedisStore.stats`
            return dict(tier.counters)
        used, capacity = tier.used_bytes, tier.capacity_bytes
        return {"used_bytes": used, "capacity_bytes": capacity, **tier.counters}
