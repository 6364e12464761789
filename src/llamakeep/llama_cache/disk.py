"""`LlamaDiskCache`: states in a directory, found by the longest common prefix."""

from __future__ import annotations

import importlib.util
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llamakeep.errors import InvalidValue, StoreError, TokenError, whole_number
from llamakeep.llama_cache.base import DEFAULT_CAPACITY_BYTES, LOGGER
from llamakeep.llama_cache.indexed import Entry, IndexedCache
from llamakeep.llama_cache.packed import Packed, unpack
from llamakeep.llama_cache.reader import Reader
from llamakeep.llama_cache.snapshots import Plan, Snapshot, State
from llamakeep.llama_cache.views import KeyView
from llamakeep.radix import RadixIndex
from llamakeep.stores.disk.layout import home
from llamakeep.stores.disk.store import DiskStore, Mark
from llamakeep.stores.envelope import MAX_TOKENS
from llamakeep.tally import Refused
from llamakeep.tokens import IntArray, TokensLike, as_tokens, snapshot_name

if TYPE_CHECKING:
    from typing_extensions import Self

    from llamakeep.llama_cache.reader import NamespaceLike

logger = logging.getLogger(LOGGER)

_LOOK_AGAIN = 64


class DiskBacking:
    """States in a directory that other processes may use, too.

    Args:
        path: The directory.
        capacity_bytes: The limit on the bytes of the states, of whoever's.

    Raises:
        InvalidValue: For a negative limit.
        StoreError: When the directory cannot be used.
    """

    is_proven = False

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        whole_number("capacity_bytes", capacity_bytes, 0)
        # `capacity_bytes` is the only limit: no room on the file system is left to others.
        self.store = DiskStore(path, capacity_bytes, min_free_bytes=0)
        # Up to where an index knows the directory, and at which size it is to be made again.
        self._known: weakref.WeakKeyDictionary[RadixIndex[Entry], tuple[Mark, int]] = (
            weakref.WeakKeyDictionary()
        )
        # A file does not name a class. What has the attributes of a state that was put here is of
        # its class, other states of that which llama_cpp has for them.
        self._kinds: dict[frozenset[str], type] = {}

    @property
    def capacity_bytes(self) -> int:
        """The limit."""
        return self.store.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What counts against it."""
        return self.store.used_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Set the limit. See `Backing.resize`."""
        self.store.resize(capacity_bytes)

    def put(self, entry: Entry, plan: Plan) -> bool:
        """Keep a state. See `Backing.put`. Costs a copy, a hash, a write and three flushes."""
        n_tokens = entry.tokens.size
        if not 0 < n_tokens <= MAX_TOKENS:
            raise Refused("key", f"a key of {n_tokens:,} tokens is not written to disk")
        snapshot = plan.snapshot()
        packed = Packed(snapshot)
        if packed.n_bytes > self.capacity_bytes:
            raise Refused(
                "too_large", f"its {packed.n_bytes:,} bytes never fit into {self.capacity_bytes:,}"
            )
        if self.used_bytes + packed.n_bytes > self.capacity_bytes:
            self.store.delete(entry.name)  # else the old one stays until the new one is there
        if not self.store.put(entry.name, packed.n_bytes, packed.bytes, entry.place, replace=True):
            return False
        self._kinds[snapshot.attributes] = snapshot.make
        return True

    def get(self, entry: Entry) -> Snapshot | None:
        """Return what is kept, verified, or None. Costs a read and a hash of it."""
        failures = self._n_failures()
        snapshot = self.store.parse(
            entry.name, lambda payload: unpack(payload.read, payload.left_bytes, State)
        )
        if snapshot is None:
            if self._n_failures() > failures:
                raise Refused("unreadable", "it cannot be read now")
            return None
        kind = self._kinds.get(snapshot.attributes) or _known_kind()
        return replace(snapshot, make=kind)

    def _n_failures(self) -> int:
        counters = dict(self.store.counters)
        return sum(n for kind, n in counters.items() if kind.startswith("errors_"))

    def has(self, entry: Entry) -> bool:
        """Whether the state is there."""
        return entry.name in self.store

    def touch(self, entry: Entry) -> None:
        """Make the state the most recently used one."""
        self.store.touch([entry.name])

    def delete(self, entry: Entry) -> None:
        """Drop a state."""
        self.store.delete(entry.name)

    def clear(self) -> None:
        """Drop everything, whoever's."""
        self.store.clear()

    def check(self) -> None:
        """Compare what is counted with what is there. See `DiskStore.check`."""
        self.store.check()

    def in_order(self, namespace: bytes) -> list[Entry]:
        """Return what is kept in a namespace, least recently used first."""
        return list(self._proven(namespace, None)[0])

    def follow(self, reader: Reader, index: RadixIndex[Entry]) -> None:
        """Add to a reader's index what came into the directory since the last time.

        What went is found out when it is looked for. Costs a look at every row that came since.
        """
        since, look_again = self._known.get(index, (None, 0))
        if len(index) > look_again:
            since = None  # half of it may be gone by now, and in the way of what is not
        found, mark = self._proven(reader.namespace, since)
        if since is not None and since.database != mark.database:
            since = None
            found, mark = self._proven(reader.namespace, None)
        if since is None:
            index.clear()
        for entry in found:
            if reader.has_room(entry.tokens):
                index.insert(entry.tokens, entry)
        if since is None:
            look_again = max(_LOOK_AGAIN, 2 * len(index))
        self._known[index] = mark, look_again

    def _proven(self, namespace: bytes, since: Mark | None) -> tuple[Iterator[Entry], Mark]:
        found, mark = self.store.snapshots(namespace, since)
        # Nothing seals the rows, but a name proves which tokens it stands for.
        return (
            Entry(each.name, namespace, tokens)
            for each in found
            if (tokens := _checked(each.tokens)) is not None
            and snapshot_name(namespace, tokens) == each.name
        ), mark


def _known_kind() -> type:
    """Return the class of states: that of llama_cpp, if it is there."""
    if importlib.util.find_spec("llama_cpp") is None:
        return State
    from llamakeep.runtime.llama_borrowed import state_class

    return state_class()


def _checked(tokens: IntArray) -> IntArray | None:
    try:
        return as_tokens(tokens)
    except TokenError:
        return None


class LlamaDiskCache(IndexedCache):
    """A cache for `llama_cpp.Llama` in a directory, which outlives the process.

    A lookup gives what `LlamaRAMCache` would give. Several processes may use one directory; each
    keeps to its own limit, and counts what the others keep.

    States mean nothing to another model, or with other settings. So those of another namespace are
    misses; and as long as it is not known which one is wanted, so is all that this cache did not
    write itself.

    Args:
        cache_dir: The directory; made when it is missing, for its owner alone. In one that holds
            other things, the states get a directory of their own, `llamakeep`.
        capacity_bytes: The limit on the sum of the values that are stored, 0 or more. When the
            directory holds more, the least recently used go at once.
        verbose: Say on standard error how many tokens each lookup matched.
        namespace: Whose states are wanted, see `set_namespace`.

    Raises:
        InvalidValue: For a negative limit, or what is no namespace.
        ModelError: When the file of the model that `namespace` names cannot be read.
        StoreError: When the directory cannot be used.

    Attributes:
        cache_dir: The directory, as it was given.
        cache: What is in it, as a dictionary of exact keys.
    """

    _who = "LlamaDiskCache"
    _backing: DiskBacking

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] = ".cache/llama_cache",
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        verbose: bool = False,
        *,
        namespace: NamespaceLike | None = None,
    ) -> None:
        if not isinstance(cache_dir, (str, os.PathLike)):
            raise InvalidValue(f"cache_dir must be a path, not {cache_dir!r}")
        self._ending: weakref.finalize[..., LlamaDiskCache] | None = None
        self.cache_dir = os.fspath(cache_dir)
        backing = DiskBacking(home(Path(cache_dir)), capacity_bytes)
        super().__init__(backing, verbose=verbose)
        self._warned = False
        self.cache = StoredStates(self)
        self._begin_unnamed(True)
        if namespace is not None:
            try:
                self.set_namespace(namespace)
            except BaseException:
                self.close()
                raise

    @property
    def counters(self) -> dict[str, int]:
        """What happened, by kind, here and in the directory: `hits`, `evicted`, `rejected_...`."""
        counters = super().counters
        for kind, n in dict(self._backing.store.counters).items():
            counters[kind] = counters.get(kind, 0) + n
        return counters

    def set_namespace(self, namespace: NamespaceLike | None) -> None:
        """Say whose states are wanted from now on. See `IndexedCache.set_namespace`."""
        store = self._backing.store
        reader = self._unnamed
        if namespace is not None:
            reader = Reader.of(namespace, None if store.read_only else store.path)
            self._introduce(reader)
            reader.guard()
        with self._lock:
            self._reader = reader

    def _introduce(self, reader: Reader) -> None:
        self._backing.store.introduce(reader.namespace, reader.description)

    def _begin_unnamed(self, is_wanted: bool) -> None:
        """Become somebody of whom nobody knows: what is written then goes at the end."""
        self._pid = os.getpid()
        if self._ending is not None:
            self._ending.detach()
        self._unnamed = Reader.of(None)
        if is_wanted:
            self._reader = self._unnamed
        store, namespace = self._backing.store, self._unnamed.namespace
        self._ending = weakref.finalize(self, _end, store, namespace, self._pid)

    def close(self) -> None:
        """Let go of the directory; then everything is a miss. Again: does nothing.

        What was written without a namespace goes: nobody could ever find it.
        """
        if self._ending is not None:
            self._ending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries())

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the key that `self[key]` would be of, without using it."""
        entry = self._find(key)
        return None if entry is None else entry.key

    def _search(
        self, index: RadixIndex[Entry], tokens: IntArray, *, touch: bool = False
    ) -> tuple[int, Entry | None]:
        return index.longest_common_prefix(tokens, touch=touch)

    def _index(self) -> RadixIndex[Entry]:
        if self._pid != os.getpid():  # a fork knows what it was before, and is somebody else
            self._begin_unnamed(self._reader is self._unnamed)
        if not self._reader.is_named and not self._warned:
            self._warned = True
            self._introduce(self._reader)
            logger.warning(
                "LlamaDiskCache does not know which model its states are of, so it returns only "
                "what it writes itself; give it namespace=, or call set_namespace(llm)"
            )
        index = super()._index()
        self._backing.follow(self._reader, index)
        return index


def _end(store: DiskStore, unnamed: bytes, pid: int) -> None:
    """Drop what nobody can find any more, and close the store; in the process that it is of."""
    if os.getpid() == pid:
        with suppress(InvalidValue, StoreError):  # there may be nothing, or nothing may be written
            store.remove_namespace(unnamed.hex())
        store.close()


class StoredStates(KeyView[Any]):
    """What a `LlamaDiskCache` holds, by exact keys: what is used of a `diskcache.Cache`.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: LlamaDiskCache) -> None:
        super().__init__(cache, cache._peek)
        self._disk = cache

    @property
    def directory(self) -> str:
        """Where the files are."""
        return str(self._disk._backing.store.path)

    def volume(self) -> int:
        """Return the bytes of all values in the directory, of whoever's."""
        return self._disk.cache_size

    def iterkeys(self) -> Iterator[tuple[int, ...]]:
        """Yield the keys, least recently used first."""
        return iter(self)

    def __bool__(self) -> bool:
        return True

    def __setitem__(self, key: TokensLike, value: Any) -> None:
        self._disk[key] = value

    def __delitem__(self, key: TokensLike) -> None:
        if not self._disk._drop(as_tokens(key)):
            raise KeyError(key)

    def close(self) -> None:
        """Let go of the directory."""
        self._disk.close()
