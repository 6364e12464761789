"""A tier in this process's memory, with failures on demand: for tests and simulations."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from llamakeep.states import Block, Buffer, Record
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import Place


class FakeTier:
    """Does what a `Tier` does, without a device. From any thread.

    Refuses what does not fit and drops nothing by itself. After `close` everything is a miss;
    `another` opens what is there again, as the next process does.

    Args:
        capacity_bytes: The limit on bytes.
        tier: What it is called.

    Attributes:
        failing: Methods that behave as if the device were gone.
        calls: How often each method was called, and for how many names.
        gate: What `put` waits for; clear it to hold writes up.
    """

    def __init__(self, capacity_bytes: int = 1 << 40, tier: str = "disk") -> None:
        self.tier = tier
        self.is_remote = tier == "shared"
        self.reads_into_its_own = tier == "disk"
        self.counters: dict[str, int] = Counter()
        self.failing: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.hits: Counter[bytes] = Counter()
        self.closed = False
        self._blobs = MemoryStore(capacity_bytes)
        self._places: dict[bytes, Place] = {}
        self._described: dict[bytes, dict[str, Any]] = {}
        self._lock = threading.RLock()

    def another(self) -> FakeTier:
        """Return a tier over the same blobs, as another process opens it: with its own failures."""
        tier = FakeTier(0, self.tier)
        tier._blobs, tier._places, tier._lock = self._blobs, self._places, self._lock
        tier._described = self._described
        return tier

    def __repr__(self) -> str:
        return f"FakeTier({self.tier}, {len(self)} blobs)"

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes."""
        return self._blobs.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes kept now."""
        return self._blobs.used_bytes

    def cost_bytes(self, n_bytes: int, place: Place | None = None) -> int:
        """Return the bytes that a blob of `n_bytes` counts for: just these."""
        return n_bytes

    def _works(self, method: str, times: int = 1) -> bool:
        with self._lock:
            self.calls[method] += times
            if self.closed or method in self.failing:
                self.counters[f"errors_{method}"] += not self.closed
                return False
            return True

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], Buffer],
        place: Place | None = None,
    ) -> bool:
        """Keep the blob that `produce` returns. See `Store.put`."""
        self.gate.wait()
        with self._lock:
            if not self._works("put") or not self._blobs.put(name, n_bytes, produce):
                return False
            if place is not None:
                self._places.setdefault(name, place)
            return True

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, or None."""
        with self._lock:
            return self._blobs.get(name) if self._works("get") else None

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None for one that is gone, in order."""
        return map(self.get, names)

    def find(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is kept in these blocks and begins like the prompt. See `Tier.find`."""
        by_name = {block.name: block for block in blocks}
        found = []
        if not self._works("find", len(blocks)):
            return []
        with self._lock:
            for name, place in self._places.items():
                block = by_name.get(place.block)
                offset = place.start - place.origin
                if block is None or offset >= block.tokens.size:
                    continue
                if int(block.tokens[offset]) == place.first and name in self._blobs:
                    n_bytes = self._blobs.get(name).nbytes  # type: ignore[union-attr]
                    tokens = place.tokens[offset:]
                    found.append(Record(place.kind, name, place.start, tokens, n_bytes, self.tier))
        return found

    def touch(self, names: Sequence[bytes], *, hit: bool = True) -> list[bytes]:
        """Count a use of these states; return those that are not here."""
        with self._lock:
            if not self._works("touch", len(names)):
                return []
            self.hits.update(names if hit else ())
            return [name for name in names if name not in self._blobs]

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took, if that is here. See `Tier.supersede`."""
        with self._lock:
            if self._works("supersede") and old != new and new in self._blobs:
                self.delete(old)

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Remember what the parts of a namespace are."""
        with self._lock:
            if not self.closed:
                self._described[namespace] = copy.deepcopy(dict(description))

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """Return the descriptions of the namespaces that were introduced."""
        with self._lock:
            return {} if self.closed else copy.deepcopy(self._described)

    def forget_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Drop all states of some namespaces, and what describes them."""
        if self.closed:
            return
        with self._lock:
            for name in [n for n, place in self._places.items() if place.namespace in namespaces]:
                self.delete(name)
            for namespace in namespaces:
                self._described.pop(namespace, None)

    def delete(self, name: bytes) -> bool:
        """Drop the blob; return whether it was there."""
        with self._lock:
            if not self._works("delete"):
                return False
            self._places.pop(name, None)
            return self._blobs.delete(name)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._places.clear()
            self._blobs.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._blobs and not self.closed

    def __len__(self) -> int:
        return 0 if self.closed else len(self._blobs)

    def __iter__(self) -> Iterator[bytes]:
        with self._lock:
            return iter(() if self.closed else self._blobs)

    def check(self, *, fix: bool = False) -> None:
        """Compare what is counted with what is kept."""
        with self._lock:
            self._blobs.check(fix=fix)

    def close(self) -> None:
        """Let go; from then on everything is a miss. Again does nothing."""
        self.closed = True
