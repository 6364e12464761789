"""Memory over tiers that outlive the process: reads fall through, writes go down behind.

What is put is in memory at once, and in a queue for each tier below. A read that memory cannot
serve asks the tiers in order; what it found is offered to memory afterwards (`take_promoted`),
because only the tree knows what may be evicted for it. Nothing here waits for a device or a
network, except a read that has nowhere else to go, and the methods that say so.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from llamakeep.budget import ByteBudget
from llamakeep.errors import OverBudget, whole_number
from llamakeep.states import Block, Buffer, Record, frozen
from llamakeep.stores.base import Promoted, State, Tier
from llamakeep.stores.behind import Behind
from llamakeep.stores.descriptions import Described
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import Place

logger = logging.getLogger("llamakeep")

QUEUE_BYTES = 256 << 20
"""Default limit on the bytes that the queues hold and memory does not."""
_WORTH_A_THREAD = 1 << 20
_END: Any = object()
_LOOK_S = 1.0
"""How often who waits for a tier looks whether the store was closed."""
_MAX_JOBS = 4_096
"""Paths that wait to be told to a tier; of more than these, uses are not told."""
_MAX_REPLACED = 4_096
"""Tails of which it is remembered what took their place."""


class _Write:
    """A blob that some tier lacks.

    Attributes:
        missing: The tiers that lack it.
        data: The blob, when memory no longer holds it; it counts against the queue's limit then.
        sightings: Prompts that used it since it was put.
        admitted: It is to go down.
        instead_of: Tails whose place it takes.
        path: The states that lead to it, and it.
        queued: The tiers whose queue it is in.
    """

    __slots__ = ("admitted", "data", "instead_of", "missing", "path", "queued", "sightings")

    def __init__(self, path: Sequence[State], missing: Sequence[Tier]) -> None:
        self.path = path
        self.missing = list(missing)
        self.data: Buffer | None = None
        self.sightings = 0
        self.admitted = False
        self.instead_of: list[bytes] = []
        self.queued: set[Tier] = set()

    @property
    def place(self) -> Place | None:
        """Where it belongs."""
        return self.path[-1].place


class TieredStore:
    """Memory over tiers, nearest first. One thread at a time; its own threads write behind.

    Args:
        memory: Holds what was put; its capacity is this store's.
        below: The tiers, nearest first. Each has a queue and a thread of its own, so that a slow
            one does not hold up the others.
        queue_bytes: Limit on what is held besides memory: blobs that memory has evicted and that
            still wait to be written, and blobs that were read from below and may come into
            memory. One blob for each tier, the one that is being written, can come on top.
        second_sighting: A state goes down only when a second prompt has used it.
        min_tokens: States of prompts shorter than this do not go down.
        drain_s: Seconds that the end of the process waits for the queues.

    Raises:
        InvalidValue: For a negative number.

    Attributes:
        counters: What happened: `written_<tier>`, `refused_<tier>`, `cut_off_<tier>` (what it
            hangs off is nowhere any more), `dropped_queue_full`, `dropped_at_close`, `cancelled`,
            `promoted_<tier>`.
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
        self._drain_s = drain_s
        self._budget = ByteBudget(whole_number("queue_bytes", queue_bytes, 0))
        self._behind = {tier: Behind() for tier in below}
        self._writes: dict[bytes, _Write] = {}  # what some tier lacks, by name
        self._described = Described()
        self._replaced: dict[bytes, bytes] = {}  # tails, by what took their place
        self._closed = False
        self._begin()
        _open.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._deleted: Counter[bytes] = Counter()  # deletions on their way down
        self._ready: dict[bytes, Promoted] = {}
        self._reader = ThreadPoolExecutor(1, "llamakeep-read")

    def _after_fork(self) -> None:
        """Begin anew with what memory holds: a forked child has none of its parent's threads."""
        self._budget = ByteBudget(self._budget.capacity_bytes)
        for behind in self._behind.values():
            behind.after_fork()
        self._begin()
        for name, write in list(self._writes.items()):
            write.data = None
            write.queued.clear()
            if not self.memory.holds(name):
                del self._writes[name]

    def __repr__(self) -> str:
        tiers = ", ".join(map(repr, (self.memory, *self.below)))
        return f"TieredStore({tiers})"

    def _count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counters[what] += times

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
        path = (State(name, place),)
        with self._lock:
            write = self._writes.setdefault(name, _Write(path, self.below))
            write.admitted |= place is None
        if place is None:
            self._send(path)
        return True

    def put_below(
        self, name: bytes, n_bytes: int, produce: Callable[[], Buffer], place: Place
    ) -> str:
        """Keep a blob in the tiers alone. See `TreeStore.put_below`."""
        if not self.below or self._second_sighting or place.end < self._min_tokens:
            return ""
        if name not in self._writes:
            try:
                self._budget.reserve(n_bytes)
            except OverBudget:
                self._count("dropped_queue_full")
                return ""
            write = _Write((State(name, place),), self.below)
            try:
                write.data = frozen(produce())
            except BaseException:
                self._budget.release(n_bytes)
                raise
            write.admitted = True
            with self._lock:
                self._writes[name] = write
        return self.below[0].tier

    def evict(self, name: bytes) -> None:
        """Drop a blob from memory; what waits to be written and what is below stays."""
        data = self.memory.get(name)
        self.memory.evict(name)
        with self._lock:
            write = self._writes.get(name)
            if write is None or data is None or write.data is not None:
                return
            if write.queued:
                try:
                    self._budget.reserve(data.nbytes)
                except OverBudget:
                    self.counters["dropped_queue_full"] += 1
                else:
                    write.data = data
                    return
            del self._writes[name]

    def admit(
        self, name: bytes, data: Buffer, place: Place | None = None, origin: str = ""
    ) -> bool:
        """Keep in memory what the tier `origin` has, and soon in the tiers nearer than that."""
        if not self.memory.admit(name, data):
            return False
        tiers = [tier.tier for tier in self.below]
        nearer = self.below[: tiers.index(origin)] if origin in tiers else ()
        if nearer:
            path = (State(name, place),)
            with self._lock:
                self._writes.setdefault(name, _Write(path, nearer)).admitted = True
            self._send(path)
        return True

    # -- going down ----------------------------------------------------------------------------

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Say what a namespace is; a tier hears it with a state. See `TreeStore.introduce`."""
        self._described.learn(namespace, description)

    def seen(self, path: Sequence[State], n_tokens: int, *, used: bool) -> None:
        """Note a path that a prompt saved or used: what is to go down goes. See `TreeStore.seen`.

        A tier that lost something of the path since, or did not take it, gets it again.
        """
        is_news = False
        with self._lock:
            for index, state in enumerate(path):
                write = self._writes.get(state.name)
                if write is None:
                    continue
                write.sightings += used
                write.admitted |= n_tokens >= self._min_tokens and (
                    write.sightings > 0 or not self._second_sighting
                )
                if not write.admitted:
                    path = path[:index]  # nothing goes down without what it hangs off
                    break
                write.path = path[: index + 1]
                is_news = True
        if path and (used or is_news):
            self._send(path, used=used)

    def _send(self, path: Sequence[State], *, used: bool = False) -> None:
        """Let every tier know of a path, and take what it lacks of it, soon."""
        for tier, behind in self._behind.items():
            with self._lock:
                lacked = [
                    write
                    for state in path
                    if (write := self._writes.get(state.name)) and tier in write.missing
                ]
                if not lacked and len(behind) > _MAX_JOBS:
                    continue
                if behind.submit(partial(self._take_down, tier, path, used)):
                    for write in lacked:
                        write.queued.add(tier)

    def _take_down(self, tier: Tier, path: Sequence[State], used: bool) -> None:
        """Put into a tier what it lacks of a path, from the root on, as far as that is here."""
        try:
            absent = set(tier.touch([state.name for state in path], hit=used))
            for name, place in path:
                write = self._writes.get(name)
                if name not in absent and (write is None or tier not in write.missing):
                    continue
                data = self._in_memory(name)
                if data is None and (newer := self._newer(name)) is not None:
                    # What hangs off a tail hangs off the longer one that took its place.
                    write = self._writes.get(newer)
                    if newer not in tier.touch([newer], hit=False):
                        continue
                    name, place = newer, write.place if write is not None else None
                    data = self._in_memory(newer) if place is not None else None
                if data is None:
                    self._count(f"cut_off_{tier.tier}")
                    break  # nothing goes down without what it hangs off
                if place is not None and (said := self._described.get(place.namespace)):
                    tier.introduce(place.namespace, said)
                if not tier.put(name, data.nbytes, partial(_itself, data), place):
                    self._count(f"refused_{tier.tier}")
                    break
                self._count(f"written_{tier.tier}")
                if write is not None:
                    self._note_written(tier, name, write)
        finally:
            self._end(tier, path)

    def _newer(self, name: bytes) -> bytes | None:
        """Return the tail that has taken a tail's place, the longest one; None without one."""
        with self._lock:
            newer = self._replaced.get(name)
            while newer is not None and newer in self._replaced:
                newer = self._replaced[newer]
            return newer

    def _note_written(self, tier: Tier, name: bytes, write: _Write) -> None:
        with self._lock:
            if tier in write.missing:
                write.missing.remove(tier)
            replaced = list(write.instead_of)
        for old in replaced:
            tier.supersede(old, name)

    def _end(self, tier: Tier, path: Sequence[State]) -> None:
        """Note that a job is done. What memory still holds may be sent again."""
        with self._lock:
            for name, _ in path:
                write = self._writes.get(name)
                if write is None:
                    continue
                write.queued.discard(tier)
                if write.queued:
                    continue
                self._let_go(write)
                if not (write.missing and self.memory.holds(name)):
                    del self._writes[name]

    def _let_go(self, write: _Write) -> None:
        """Give up the blob that a write holds on to. Under the lock."""
        if write.data is not None:
            self._budget.release(write.data.nbytes)
            write.data = None

    def _drop(self, name: bytes) -> _Write | None:
        """Forget that a blob is to go down."""
        with self._lock:
            write = self._writes.pop(name, None)
            if write is not None:
                self._let_go(write)
        return write

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took, everywhere. See `TreeStore.supersede`."""
        self.memory.evict(old)
        before = self._drop(old)
        if before is not None and before.queued:
            self._count("cancelled")
        replaced = [old, *(before.instead_of if before is not None else ())]
        with self._lock:
            self._replaced.pop(new, None)  # it is there again: no circle
            self._replaced[old] = new
            while len(self._replaced) > _MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            after = self._writes.get(new)
            attached = after is not None and not after.queued
            if after is not None and attached:
                after.instead_of += replaced  # nothing goes before what takes its place is there
        for tier, behind in self._behind.items() if not attached else ():
            behind.submit(_superseding(tier, replaced, new))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the tiers have what is to go down.

        Args:
            timeout: Seconds; None for as long as it takes.

        Returns:
            Whether each of these states is in every tier now. False also when a tier refused one,
            because it is full, out of reach or closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            due = [write for write in self._writes.values() if write.admitted]
            idle = [write.path for write in due if not write.queued]
        for path in idle:
            self._send(path)
        for behind in self._behind.values():
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not behind.flush(rest):
                return False
        return not any(write.missing for write in due)

    def close(self, timeout: float | None = None) -> None:
        """Write what is to go down, then let go of the tiers. Again: does nothing.

        Args:
            timeout: Seconds to wait; None for `drain_s`. What is left then is dropped and counted.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + (self._drain_s if timeout is None else timeout)
        self.flush(max(0.0, deadline - time.monotonic()))
        with self._lock:
            left = sum(write.admitted for write in self._writes.values())
        for behind in self._behind.values():
            behind.close(max(0.0, deadline - time.monotonic()))
        self._count("dropped_at_close", left)
        if left:
            logger.warning("%d states did not reach the tiers below", left)
        self._reader.shutdown()
        for tier in self.below:
            tier.close()
        _open.discard(self)

    # -- reading -------------------------------------------------------------------------------

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, from memory or the nearest tier that has it; or None. May wait.

        What comes from a tier is taken into memory where there is free room.
        """
        data = self._in_memory(name)
        if data is not None or name in self._deleted:
            return data
        for tier in self.below:
            found = tier.get(name)
            if found is not None:
                # The tier may want its own memory back.
                if self.memory.put(name, found.nbytes, partial(_copy_of, found)):
                    self._count(f"promoted_{tier.tier}")
                return found
        return None

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None, in order. See `Tier.get_many`. May wait.

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
                    if data is not None and tier.reads_into_its_own:
                        served.append((name, tier, data.nbytes))
                    elif data is not None and self._reserve(name, data.nbytes):
                        self._offer(name, data, tier)
                yield data
        finally:
            for reader in readers.values():
                reader.close()
            for name, tier, n_bytes in served:
                self._promote_later(name, tier, n_bytes)

    def _read_ahead(self, blobs: Iterator[Buffer | None]) -> Generator[Buffer | None, None, None]:
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

    # -- coming up -----------------------------------------------------------------------------

    def _reserve(self, name: bytes, n_bytes: int) -> bool:
        """Take room for a blob that is to be offered to memory."""
        if n_bytes > self.memory.capacity_bytes or self.memory.holds(name):
            return False
        try:
            self._budget.reserve(n_bytes)
        except OverBudget:
            self._count("dropped_queue_full")
            return False
        return True

    def _promote_later(self, name: bytes, tier: Tier, n_bytes: int) -> None:
        """Read a blob again, behind the requests, into memory that is not the tier's.

        To hold on to what was read would cost the request more: the tier would have to read the
        rest of the prompt into memory that was not used before.
        """

        def promote() -> None:
            if not self._reserve(name, n_bytes):
                return
            data = tier.get(name)
            if data is None or data.nbytes != n_bytes:
                self._budget.release(n_bytes)
            else:
                self._offer(name, _copy_of(data), tier)

        self._behind[tier].submit(promote)

    def _offer(self, name: bytes, data: Buffer, tier: Tier) -> None:
        """Offer a blob, for which there is room, to memory."""
        with self._lock:
            if name in self._ready:
                self._budget.release(data.nbytes)
                return
            self._ready[name] = Promoted(name, data, tier.tier)
            self.counters[f"promoted_{tier.tier}"] += 1

    def take_promoted(self) -> Iterator[Promoted]:
        """Yield what was read from below and may come into memory, and forget it."""
        while self._ready:
            with self._lock:
                promoted = self._ready.pop(next(iter(self._ready)))
            try:
                yield promoted
            finally:
                self._budget.release(promoted.data.nbytes)

    def find_pending(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what only the queues hold and begins like the prompt. See `Tier.find`."""
        by_name = {block.name: block for block in blocks}
        found = []
        with self._lock:
            for name, write in self._writes.items():
                block = by_name.get(write.place.block) if write.place is not None else None
                if write.data is None or block is None or write.place is None:
                    continue
                record = block.offer(name, write.place, write.data.nbytes, self.below[0].tier)
                found += [record] if record is not None else []
        return found

    # -- everywhere ----------------------------------------------------------------------------

    def forget(self, name: bytes) -> None:
        """Drop the blob everywhere, below soon."""
        self.memory.delete(name)
        self._drop(name)
        if self.below:
            with self._lock:
                self._deleted[name] += len(self.below)
        for tier, behind in self._behind.items():
            if not behind.submit(self._deleting(tier, name)):
                self._deleting(tier, name)()

    def _deleting(self, tier: Tier, name: bytes) -> Callable[[], None]:
        def run() -> None:
            try:
                tier.delete(name)
            finally:
                with self._lock:
                    self._deleted[name] -= 1
                    self._deleted += Counter()  # forget those that are done

        return run

    def delete(self, name: bytes) -> bool:
        """Drop the blob everywhere; return whether it was there. May wait, to know that."""
        there = name in self
        self.forget(name)
        return there

    def clear(self) -> None:
        """Drop everything everywhere. Waits for what is being written."""
        for name in list(self._writes):
            self._drop(name)
        for behind in self._behind.values():
            behind.flush()
        for _ in self.take_promoted():
            pass
        self.memory.clear()
        for tier in self.below:
            tier.clear()

    def forget_namespaces(self, namespaces: Sequence[bytes]) -> Callable[[], None]:
        """Drop what tiers of our own have of some namespaces; what is on its way there, too.

        It takes its turn behind what is being written. See `TreeStore.forget_namespaces`.
        """
        wanted = set(namespaces)
        with self._lock:
            mine = [
                name
                for name, write in self._writes.items()
                if write.place is not None and write.place.namespace in wanted
            ]
        for name in mine:
            self._drop(name)
        for tier, behind in self._behind.items():
            behind.submit(partial(tier.forget_namespaces, tuple(wanted)))

        def wait() -> None:
            for behind in self._behind.values():
                while not behind.flush(_LOOK_S):  # until it is done, or its thread has ended
                    pass

        return wait

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, bytes):
            return False
        if self._in_memory(name) is not None:
            return True
        return name not in self._deleted and any(name in tier for tier in self.below)

    def _names(self) -> set[bytes]:
        with self._lock:
            names = {name for name, write in self._writes.items() if write.data is not None}
            gone = set(self._deleted)
        names.update(self.memory)
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
        with self._lock:
            counters = dict(self.counters)
            ready_bytes = sum(promoted.data.nbytes for promoted in self._ready.values())
        return {
            "queue_bytes": self._budget.used_bytes - ready_bytes,
            "ready_bytes": ready_bytes,
            "queue_capacity_bytes": self._budget.capacity_bytes,
            "queue_peak_bytes": self._budget.peak_bytes,
            "queued": sum(map(len, self._behind.values())),
            "errors": sum(behind.errors for behind in self._behind.values()),
            **counters,
            "tiers": {tier.tier: self._stats_of(tier) for tier in self.below},
        }

    @staticmethod
    def _stats_of(tier: Tier) -> dict[str, Any]:
        if tier.is_remote:  # what it has is asked over a network: see `RedisStore.stats`
            return dict(tier.counters)
        used, capacity = tier.used_bytes, tier.capacity_bytes
        return {"used_bytes": used, "capacity_bytes": capacity, **tier.counters}


def _itself(data: Buffer) -> Buffer:
    return data


def _copy_of(data: Buffer) -> Buffer:
    return frozen(np.array(data))


def _superseding(tier: Tier, replaced: Sequence[bytes], new: bytes) -> Callable[[], None]:
    def run() -> None:
        for old in replaced:
            tier.supersede(old, new)

    return run


_open: weakref.WeakSet[TieredStore] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    """Let what is to go down go, before the process ends."""
    deadline = time.monotonic() + max((store._drain_s for store in _open), default=0.0)
    for store in list(_open):
        store.close(max(0.0, deadline - time.monotonic()))


def _after_fork() -> None:
    for store in list(_open):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
