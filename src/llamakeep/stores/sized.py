"""A tier of sizes, for simulations: it finds and evicts as a disk does, and holds no bytes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import count

import numpy as np

from llamakeep.policy import Policy, get_policy, policy_below
from llamakeep.policy.queue import EvictionQueue
from llamakeep.states import Block, Buffer, Record
from llamakeep.stores.fake import FakeTier
from llamakeep.tokens import Place


def _begin(place: Place) -> tuple[bytes, int]:
    return place.block, int(place.tokens[0])


def _first(place: Place) -> tuple[bytes, int, int]:
    return place.block, place.start, place.first


def _hangs_off(place: Place, other: Place) -> bool:
    """Whether what is at `place` is of no use without the rows at `other`."""
    if other.kind == "checkpoint":
        return False
    if other.closes and place.block == other.next_block:
        return True
    after = place.end > other.start if place.kind == "checkpoint" else place.start >= other.end
    if place.block != other.block or not after:
        return False
    n = min(place.tokens.size, other.tokens.size)
    return bool(np.array_equal(place.tokens[:n], other.tokens[:n]))


class _Held:
    """A state in the tier, as a policy sees it."""

    __slots__ = (
        "_tier",
        "created",
        "hits",
        "last_used",
        "n_bytes",
        "name",
        "place",
        "queued",
        "sequence",
    )

    def __init__(
        self, tier: SizedTier, name: bytes, place: Place, n_bytes: int, now: float, sequence: int
    ) -> None:
        self._tier = tier
        self.name = name
        self.place = place
        self.n_bytes = n_bytes
        self.created = self.last_used = now
        self.sequence = sequence
        self.hits = self.queued = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of a segment's span; the position of a checkpoint."""
        place = self.place
        return place.end if place.kind == "checkpoint" else place.end - place.start

    @property
    def marginal_tokens(self) -> int:
        """Tokens between it and the restorable position before it, as far as the tier knows."""
        if self.place.kind != "checkpoint":
            return self.n_tokens
        return self.place.end - self._tier.restorable_before(self.place)


class SizedTier(FakeTier):
    """Does what a tier of a device does within a budget, on states that only have a size.

    What goes first says the policy; never a state that another hangs off, nor one that what is
    being put hangs off, as in the disk tier. From any thread.

    Args:
        capacity_bytes: The limit on bytes.
        tier: What it is called: `disk`, or `shared`.
        policy: What goes first.
        clock: Seconds.

    Attributes:
        read_bytes: Bytes that were read.
        written_bytes: Bytes that were written.
        evicted_bytes: Bytes that were evicted.
        lookups: How often it was asked what it has.
        blocks_asked: In how many blocks.
    """

    def __init__(
        self,
        capacity_bytes: int,
        tier: str = "disk",
        *,
        policy: str | Policy = "lru",
        clock: Callable[[], float],
    ) -> None:
        super().__init__(capacity_bytes, tier)
        self.reads_into_its_own = False  # there is nothing that would be overwritten
        self._count_anew()
        self._clock = clock
        self._states: dict[bytes, _Held] = {}
        # By block and its first token, for it is there that most prompts part.
        self._by_begin: dict[tuple[bytes, int], dict[bytes, _Held]] = {}
        self._by_first: dict[tuple[bytes, int, int], dict[bytes, _Held]] = {}
        self._in_block: dict[bytes, Counter[int]] = {}  # how many start where
        self._closing: dict[bytes, _Held] = {}  # what ends where a block starts
        self._queue = EvictionQueue[_Held](
            get_policy(policy_below(policy), "disk"), clock, self._is_held
        )
        self._numbers = count(1)

    def _count_anew(self) -> None:
        self.read_bytes = self.written_bytes = self.evicted_bytes = 0
        self.lookups = self.blocks_asked = 0

    def another(self) -> SizedTier:
        """Return a tier over the same states, as another process opens it: it counts its own."""
        tier = copy.copy(self)
        tier.failing, tier.calls, tier.closed = set(), Counter(), False
        tier._count_anew()
        return tier

    def _is_held(self, held: _Held) -> bool:
        return self._states.get(held.name) is held

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], Buffer],
        place: Place | None = None,
    ) -> bool:
        """Keep a state, and evict others for it if it has a place. See `Store.put`."""
        with self._lock:
            if place is None or name in self:
                return super().put(name, n_bytes, produce)
            if not self._make_room(n_bytes, place) or not super().put(name, n_bytes, produce):
                self.counters["refused_full"] += 1
                return False
            held = _Held(self, name, place, n_bytes, self._clock(), next(self._numbers))
            self._states[name] = held
            self._by_begin.setdefault(_begin(place), {})[name] = held
            self._by_first.setdefault(_first(place), {})[name] = held
            self._in_block.setdefault(place.block, Counter())[place.start] += 1
            if place.kind == "segment" and place.closes:
                self._closing[place.next_block] = held
            self._queue.push(held)
            self.counters["written"] += 1
            self.written_bytes += n_bytes
            return True

    def _make_room(self, n_bytes: int, place: Place) -> bool:
        """Evict until there are `n_bytes`; nothing for what is larger than all there is."""
        if n_bytes > self.capacity_bytes:
            return False
        while self.used_bytes + n_bytes > self.capacity_bytes:
            aside: list[_Held] = []

            def can_go(held: _Held, aside: list[_Held] = aside) -> bool:
                above = _hangs_off(place, held.place)
                if above:
                    aside.append(held)
                return not (above or self._has_children(held))

            victim = self._queue.pop(can_go)
            for held in aside:
                self._queue.push(held)
            if victim is None:
                return False
            self.evicted_bytes += victim.n_bytes
            self.counters["evicted"] += 1
            self.delete(victim.name)
        return True

    def _has_children(self, held: _Held) -> bool:
        place = held.place
        if place.kind == "segment" and place.closes and place.next_block in self._in_block:
            return True
        near = self._by_begin[_begin(place)].values()
        return any(other is not held and _hangs_off(other.place, place) for other in near)

    def restorable_before(self, place: Place) -> int:
        """Return where the checkpoint before a place is; 0 where the tier has none."""
        at: Place | None = place
        while at is not None:
            ends = [
                other.place.end
                for other in self._by_begin.get(_begin(at), {}).values()
                if other.place.kind == "checkpoint"
                and other.place.end < place.end
                and np.array_equal(at.tokens[: other.place.tokens.size], other.place.tokens)
            ]
            if ends:
                return max(ends)
            closing = self._closing.get(at.block)
            at = closing.place if closing is not None else None
        return 0

    def delete(self, name: bytes) -> bool:
        """Drop a state; return whether it was there."""
        with self._lock:
            held = self._states.pop(name, None) if not self.closed else None
            if held is None:
                return super().delete(name)  # it has no place, or is not here
            place = held.place
            near, first = self._by_begin[_begin(place)], self._by_first[_first(place)]
            starts = self._in_block[place.block]
            del near[name], first[name]
            starts[place.start] -= 1
            if not near:
                del self._by_begin[_begin(place)]
            if not first:
                del self._by_first[_first(place)]
            if not starts[place.start]:
                del starts[place.start]
            if not starts:
                del self._in_block[place.block]
            if place.kind == "segment" and place.closes:
                self._closing.pop(place.next_block, None)
            # What it hung off may be a leaf now.
            parent = self._closing.get(place.block)
            for other in (*near.values(), *([parent] if parent is not None else [])):
                self._queue.push(other)
            return super().delete(name)

    def get(self, name: bytes) -> Buffer | None:
        """Return a state, or None."""
        data = super().get(name)
        if data is not None:
            self.read_bytes += data.nbytes
        return data

    def find(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is kept in these blocks and begins like the prompt. See `Tier.find`."""
        found = []
        with self._lock:
            self.lookups += 1
            self.blocks_asked += len(blocks)
            for block in blocks if not self.closed else ():
                for start in self._in_block.get(block.name, ()):
                    if start - block.origin >= block.tokens.size:
                        continue
                    token = int(block.tokens[start - block.origin])
                    for name, held in self._by_first.get((block.name, start, token), {}).items():
                        record = block.offer(name, held.place, held.n_bytes, self.tier)
                        found += [record] if record is not None else []
        return found

    def touch(self, names: Sequence[bytes], *, hit: bool = True) -> list[bytes]:
        """Note a use of these states; return those that are not here."""
        with self._lock:
            now, absent = self._clock(), []
            for name in names if not self.closed else ():
                held = self._states.get(name)
                if held is not None:
                    held.last_used = now
                    held.hits += hit
                elif name not in self:
                    absent.append(name)
            return absent

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._queue.clear()
            self._states.clear()
            self._by_begin.clear()
            self._by_first.clear()
            self._in_block.clear()
            self._closing.clear()
            super().clear()

    def forget_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Drop all states of some namespaces, and what describes them."""
        if self.closed:
            return
        with self._lock:
            for name, held in list(self._states.items()):
                if held.place.namespace in namespaces:
                    self.delete(name)
            super().forget_namespaces(namespaces)
