"""The one core of the three caches that map tokens to states: an index, a limit, an order of use.

What is kept is found through a `RadixIndex` for each namespace, and lies in a `Backing`: memory or
a directory, which counts the bytes and says what goes first. The classes that users see only differ
in which key they look for, and in what they show of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llamakeep.errors import IntegrityError, whole_number
from llamakeep.llama_cache import forks
from llamakeep.llama_cache.base import BaseLlamaCache, verbose_logger
from llamakeep.llama_cache.reader import Reader
from llamakeep.llama_cache.snapshots import Plan, Snapshot
from llamakeep.radix import RadixIndex
from llamakeep.stores.memory import MemoryStore
from llamakeep.tally import Refused, Tally
from llamakeep.tokens import IntArray, Place, TokensLike, as_tokens, snapshot_name, snapshot_place

if TYPE_CHECKING:
    from llamakeep.llama_cache.reader import NamespaceLike

_MOST_INDEXES = 64


class Entry(NamedTuple):
    """A key, and what its state is called in the backing."""

    name: bytes
    namespace: bytes
    tokens: IntArray

    @property
    def key(self) -> tuple[int, ...]:
        """The key as users know it."""
        return tuple(self.tokens.tolist())

    @property
    def place(self) -> Place:
        """Where the state belongs."""
        return snapshot_place(self.namespace, self.tokens)


class Backing(Protocol):
    """Where the states lie. The cache's lock is held around every call."""

    is_proven: bool
    """What it returns cannot have changed since it was put."""

    @property
    def capacity_bytes(self) -> int:
        """The limit."""
        ...  # pragma: no cover - protocol

    @property
    def used_bytes(self) -> int:
        """What counts against it."""
        ...  # pragma: no cover - protocol

    def resize(self, capacity_bytes: int) -> None:
        """Set the limit; what is above it goes, least recently used first."""
        ...  # pragma: no cover - protocol

    def put(self, entry: Entry, plan: Plan) -> bool:
        """Keep a state in place of the one that has its name; room is made before.

        Returns:
            Whether it is kept; False when the backing counted and logged why not.

        Raises:
            Refused: With the reason why it is not kept. When it could never be, nothing else went.
        """
        ...  # pragma: no cover - protocol

    def get(self, entry: Entry) -> Snapshot | None:
        """Return what is kept, or None when it is gone or not what was put.

        Raises:
            Refused: When it cannot be read now.
        """
        ...  # pragma: no cover - protocol

    def has(self, entry: Entry) -> bool:
        """Whether the state is there."""
        ...  # pragma: no cover - protocol

    def touch(self, entry: Entry) -> None:
        """Make the state the most recently used one."""
        ...  # pragma: no cover - protocol

    def delete(self, entry: Entry) -> None:
        """Drop a state."""
        ...  # pragma: no cover - protocol

    def clear(self) -> None:
        """Drop everything."""
        ...  # pragma: no cover - protocol

    def check(self) -> None:
        """Compare what is counted with what is kept."""
        ...  # pragma: no cover - protocol

    def in_order(self, namespace: bytes) -> list[Entry]:
        """Return what is kept in a namespace, least recently used first."""
        ...  # pragma: no cover - protocol


class MemoryBacking:
    """States in memory.

    Args:
        capacity_bytes: The limit.
        gone: Called with what had to go.
    """

    is_proven = True

    def __init__(self, capacity_bytes: int, gone: Callable[[Entry], None]) -> None:
        self._store: MemoryStore[Snapshot] = MemoryStore(capacity_bytes)
        self._order: OrderedDict[bytes, Entry] = OrderedDict()
        self._gone = gone

    @property
    def capacity_bytes(self) -> int:
        """The limit."""
        return self._store.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What counts against it."""
        return self._store.used_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Set the limit. See `Backing.resize`."""
        whole_number("capacity_bytes", capacity_bytes, 0)
        self._shrink(capacity_bytes)
        self._store.resize(capacity_bytes)

    def put(self, entry: Entry, plan: Plan) -> bool:
        """Keep a state. See `Backing.put`."""
        if plan.nbytes > self.capacity_bytes:
            raise Refused(
                "too_large",
                f"its {plan.nbytes:,} bytes never fit into {self.capacity_bytes:,}",
            )
        self.delete(entry)
        self._shrink(self.capacity_bytes - plan.nbytes)
        self._store.put(entry.name, plan.nbytes, plan.snapshot)
        self._order[entry.name] = entry
        return True

    def _shrink(self, max_bytes: int) -> None:
        while self.used_bytes > max_bytes:
            _, entry = self._order.popitem(last=False)
            self._store.delete(entry.name)
            self._gone(entry)

    def get(self, entry: Entry) -> Snapshot | None:
        """Return what is kept, or None."""
        return self._store.get(entry.name)

    def has(self, entry: Entry) -> bool:
        """Whether the state is there."""
        return entry.name in self._store

    def touch(self, entry: Entry) -> None:
        """Make the state the most recently used one."""
        self._order.move_to_end(entry.name)

    def delete(self, entry: Entry) -> None:
        """Drop a state."""
        if self._store.delete(entry.name):
            del self._order[entry.name]

    def clear(self) -> None:
        """Drop everything."""
        self._store.clear()
        self._order.clear()

    def in_order(self, namespace: bytes) -> list[Entry]:
        """Return what is kept in a namespace, least recently used first."""
        return [entry for entry in self._order.values() if entry.namespace == namespace]

    def check(self) -> None:
        """Compare what is counted with what is kept, and with the order of use.

        Raises:
            IntegrityError: With the numbers.
        """
        self._store.check()
        if set(self._order) != set(self._store):
            raise IntegrityError(f"{len(self._order)} states have an order, {len(self._store)} are")


class IndexedCache(BaseLlamaCache):
    """A cache that finds states by the tokens they are of. From any thread, one at a time.

    Reading a state makes it the most recently used one and leaves it where it is; the least
    recently used ones go when room is needed, before what needs it is copied. What cannot be kept
    is refused: that is counted and logged, never raised, because it happens after the answer was
    computed.

    Attributes:
        verbose: Say on standard error how many tokens each lookup matched.
    """

    verbose: bool
    _who = "llama cache"

    def __init__(self, backing: Backing, *, verbose: bool = False) -> None:
        self._backing = backing
        self._tally = Tally(self._who)
        self._lock = forks.Lock()
        # By namespace and room: what is too long for the reader is in none of its indexes.
        self._indexes: dict[tuple[bytes, int | None], RadixIndex[Entry]] = {}
        self._unnamed = self._reader = Reader.of(None)
        self.verbose = verbose

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self):,} states of this namespace; of all "
            f"{self.cache_size:,} of {self.capacity_bytes:,} bytes)"
        )

    def __bool__(self) -> bool:
        """Always true: `Llama` asks ``if self.cache`` before it uses one, also an empty one."""
        return True

    def __len__(self) -> int:
        """Return how many states can be found now, those of the namespace that is wanted."""
        with self._lock:
            return len(self._index())

    @property
    def capacity_bytes(self) -> int:
        """The limit. When it is lowered, what is above it goes at once."""
        return self._backing.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int) -> None:
        with self._lock:
            self._backing.resize(capacity_bytes)

    @property
    def cache_size(self) -> int:
        """Bytes that are kept now, of all namespaces."""
        return self._backing.used_bytes

    @property
    def counters(self) -> dict[str, int]:
        """What happened, by kind: `hits`, `misses`, `stored`, `evicted`, `refused_...`."""
        return dict(self._tally.counters)

    def set_namespace(self, namespace: NamespaceLike | None) -> None:
        """Say whose states are wanted from now on; what is kept for others is a miss.

        Args:
            namespace: A `llama_cpp.Llama` (its model, adapters and settings; states that it could
                not load are misses too, and from now on it evaluates again where a sliding window
                has lost what it needs), a `llamakeep.fingerprint.Namespace`, a label of your own,
                or None: nobody else's.

        Raises:
            InvalidValue: When it is none of them.
            ModelError: When the model's file cannot be read.

        Costs a pass over the model's file the first time it is seen.
        """
        reader = self._unnamed if namespace is None else Reader.of(namespace)
        reader.guard()
        with self._lock:
            self._reader = reader

    # -- the dictionary ----------------------------------------------------------------------------

    def __getitem__(self, key: TokensLike) -> Any:
        """Return the state that fits best, whole. It is the caller's own, but for its large bytes.

        Raises:
            KeyError: When none does.
            TokenError: When `key` is no sequence of tokens.

        Costs one lookup, whatever the number of keys, and copies of the small arrays.
        """
        tokens = as_tokens(key)
        with self._lock:
            while True:
                index = self._index()
                n_shared, entry = self._search(index, tokens, touch=True)
                if self.verbose:
                    self._say(n_shared, tokens, entry)
                if entry is None:
                    self._tally.count("misses")
                    raise KeyError(self._missing(index))
                try:
                    snapshot = self._backing.get(entry)
                    if snapshot is None:
                        self._forget(entry)  # it is gone, or not what it was
                        continue
                    self._reader.refuse_kept(snapshot, is_proven=self._backing.is_proven)
                    break
                except Refused as refused:
                    problem = refused
                self._tally.count("misses")
                self._tally.report(f"rejected_{problem.why}", f"a state is not used: {problem}")
                raise KeyError("Key not found")
            self._backing.touch(entry)
            self._tally.count("hits")
            return snapshot.revive(self._reader.n_ctx)

    def __contains__(self, key: object) -> bool:
        """Return whether a state fits. Changes nothing.

        Raises:
            TokenError: When `key` is no sequence of tokens.
        """
        tokens = as_tokens(key)  # type: ignore[arg-type]
        with self._lock:
            while True:
                _, entry = self._search(self._index(), tokens)
                if entry is None:
                    return False
                if self._backing.has(entry):
                    return True
                self._forget(entry)

    def __setitem__(self, key: TokensLike, value: Any) -> None:
        """Keep a state in place of the one with this key, unless it is too large.

        Raises:
            TokenError: When `key` is no sequence of tokens, or one of them cannot be.
            InvalidValue: When `value` does not say how large it is.
        """
        tokens = as_tokens(key)
        with self._lock:
            namespace = self._reader.namespace
            self._index()
            # A copy: the caller may change the key.
            entry = Entry(snapshot_name(namespace, tokens), namespace, tokens.copy())
            try:
                plan = Plan.of(value, scores_matter=self._reader.scores_matter)
                self._reader.refuse(value)
                kept = self._backing.put(entry, plan)
            except Refused as refused:
                self._tally.report(f"refused_{refused.why}", f"a state is not kept: {refused}")
                kept = False
            except MemoryError:
                self._tally.report("refused_memory", "a state is not kept: no memory for a copy")
                kept = False
            if kept:
                self._tally.count("stored")
                for (whose, n_ctx), index in self._indexes.items():
                    if whose == namespace and (n_ctx is None or tokens.size <= n_ctx + 1):
                        index.insert(tokens, entry)
            elif not self._backing.has(entry):  # what it was to replace may be gone
                self._forget(entry)

    def clear(self) -> None:
        """Drop all states, of all namespaces."""
        with self._lock:
            self._backing.clear()
            self._indexes.clear()

    # -- for the classes that users see ------------------------------------------------------------

    @abstractmethod
    def _search(
        self, index: RadixIndex[Entry], tokens: IntArray, *, touch: bool = False
    ) -> tuple[int, Entry | None]:
        """Return how many tokens are shared with the best key, and that key's entry."""

    def _missing(self, index: RadixIndex[Entry]) -> str:
        return "Key not found" if len(index) else "Cache is empty"

    def _index(self) -> RadixIndex[Entry]:
        """Return the index of what is wanted."""
        reader = self._reader
        which = (reader.namespace, reader.n_ctx)
        index = self._indexes.get(which)
        if index is None:
            if len(self._indexes) >= _MOST_INDEXES:
                self._indexes.clear()  # they are made again when they are wanted again
            index = self._indexes[which] = RadixIndex()
            for entry in self._entries():
                index.insert(entry.tokens, entry)
        return index

    def _entries(self) -> list[Entry]:
        """Return what can be found, least recently used first."""
        with self._lock:
            reader = self._reader
            kept = self._backing.in_order(reader.namespace)
            return [entry for entry in kept if reader.has_room(entry.tokens)]

    def _has(self, tokens: IntArray) -> bool:
        """Return whether there is a state under exactly this key."""
        with self._lock:
            entry = self._index().get(tokens)
            return entry is not None and self._backing.has(entry)

    def _peek(self, tokens: IntArray) -> Any:
        """Return the state under exactly this key, without using it, or None."""
        with self._lock:
            entry = self._index().get(tokens)
            snapshot = None
            with suppress(Refused):  # it cannot be read now
                snapshot = self._backing.get(entry) if entry is not None else None
            return snapshot.revive(self._reader.n_ctx) if snapshot else None

    def _evicted(self, entry: Entry) -> None:
        self._tally.count("evicted")
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        for (whose, _), index in self._indexes.items():
            if whose == entry.namespace and index.contains(entry.tokens):
                index.remove(entry.tokens)

    def _drop(self, tokens: IntArray) -> bool:
        """Drop the state under exactly this key; return whether it was there."""
        with self._lock:
            entry = self._index().get(tokens)
            if entry is None:
                return False
            was_there = self._backing.has(entry)
            self._backing.delete(entry)
            self._forget(entry)
            return was_there

    def _find(self, key: TokensLike) -> Entry | None:
        """Return the entry of the key that fits best, without using it."""
        tokens = as_tokens(key)
        with self._lock:
            return self._search(self._index(), tokens)[1]

    def _say(self, n_shared: int, tokens: IntArray, entry: Entry | None) -> None:
        length = "no key" if entry is None else f"a key of {entry.tokens.size:,}"
        verbose_logger().info(
            "%s: %s of %s tokens match %s",
            type(self).__name__,
            f"{n_shared:,}",
            f"{tokens.size:,}",
            length,
        )

    def check(self) -> None:
        """Compare indexes, order and counts.

        Raises:
            IntegrityError: With the numbers that do not add up.
        """
        with self._lock:
            self._backing.check()
            self._index()
            for (namespace, n_ctx), index in self._indexes.items():
                index.check()
                kept = {
                    entry.name: entry.key
                    for entry in self._backing.in_order(namespace)
                    if n_ctx is None or entry.tokens.size <= n_ctx + 1
                }
                found = {entry.name: tuple(tokens.tolist()) for tokens, entry in index.items()}
                # Others may drop what lies in a directory, and some of it may not be read.
                wrong = [
                    key
                    for name, key in found.items()
                    if kept.get(name, key if not self._backing.is_proven else None) != key
                ]
                if wrong or (self._backing.is_proven and found != kept):
                    raise IntegrityError(
                        f"{len(found)} keys are found, {len(wrong)} wrong, {len(kept)} are kept"
                    )
