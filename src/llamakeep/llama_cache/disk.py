"""`LlamaDiskCache`: states in a directory, found by the longest common prefix."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llamakeep.errors import TokenError, whole_number
from llamakeep.llama_cache.base import DEFAULT_CAPACITY_BYTES, LOGGER
from llamakeep.llama_cache.indexed import Entry, IndexedCache
from llamakeep.llama_cache.packed import Packed, unpack
from llamakeep.llama_cache.reader import NamespaceLike, Reader
from llamakeep.llama_cache.snapshots import Plan, Snapshot, State
from llamakeep.radix import RadixIndex
from llamakeep.stores.disk.layout import home
from llamakeep.stores.disk.store import DiskStore, Mark
from llamakeep.stores.envelope import MAX_TOKENS
from llamakeep.tally import Refused
from llamakeep.tokens import IntArray, TokensLike, as_tokens, snapshot_name

if TYPE_CHECKING:
    from typing_extensions import Self

    from llamakeep.stores.disk.files import Files

logger = logging.getLogger(LOGGER)


class DiskBacking:
    """States in a directory that other processes may use, too.

    Args:
        path: The directory.
        capacity_bytes: The limit on the bytes of the states, of whoever's.
        files: The seam to the file system.

    Raises:
        InvalidValue: For a negative limit.
        StoreError: When the directory cannot be used.
    """

    def __init__(self, path: Path, capacity_bytes: int, files: Files | None = None) -> None:
        whole_number("capacity_bytes", capacity_bytes, 0)
        # `capacity_bytes` is the only limit: no room on the file system is left to others.
        self.store = DiskStore(path, capacity_bytes, min_free_bytes=0, files=files)
        self._marks: dict[bytes, Mark] = {}
        # A file does not name a class. Read states are of the one that was last put.
        self._kind: type | None = None

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
                "too_large",
                f"a state of {packed.n_bytes:,} bytes never fits into {self.capacity_bytes:,}",
            )
        self.store.delete(entry.name)
        if not self.store.put(entry.name, packed.n_bytes, packed.bytes, entry.place):
            return False
        self._kind = snapshot.make
        return True

    def get(self, entry: Entry) -> Snapshot | None:
        """Return what is kept, verified, or None. Costs a read and a hash of it."""
        if self._kind is None:
            self._kind = _known_kind()
        kind = self._kind
        return self.store.parse(
            entry.name, lambda payload: unpack(payload.read, payload.left_bytes, kind)
        )

    def has(self, entry: Entry) -> bool:
        """Whether the state is there."""
        return entry.name in self.store

    def touch(self, entry: Entry) -> None:
        """Make the state the most recently used one."""
        self.store.touch([entry.name])

    def delete(self, entry: Entry) -> None:
        """Drop a state."""
        self.store.delete(entry.name)

    def in_order(self, namespace: bytes) -> list[Entry]:
        """Return what is kept in a namespace, least recently used first."""
        return list(self._proven(namespace, None)[0])

    def follow(self, namespace: bytes, index: RadixIndex[Entry]) -> None:
        """Add to an index of a namespace what came into the directory since the last time.

        What went is found out when it is looked for. Costs a look at every row that came since.
        """
        since = self._marks.get(namespace)
        found, mark = self._proven(namespace, since)
        if since is not None and since.database != mark.database:
            index.clear()
        for entry in found:
            index.insert(entry.tokens, entry)
        self._marks[namespace] = mark

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
    """Return the class of states where none was put yet: that of llama_cpp, if it is there."""
    if importlib.util.find_spec("llama_cpp") is None:
        return State
    from llamakeep.runtime.llama_cpp import state_class

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
    misses; and as long as it is not known which one is wanted, so is all that this process did not
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
        self.cache_dir = os.fspath(cache_dir)
        backing = DiskBacking(home(Path(cache_dir)), capacity_bytes)
        super().__init__(backing, verbose=verbose)
        self._warned = False
        self.cache = StoredStates(self)
        if namespace is not None:
            try:
                self.set_namespace(namespace)
            except BaseException:
                backing.store.close()
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
        reader = Reader.of(namespace, None if store.read_only else store.path)
        if reader.description is not None:
            store.introduce(reader.namespace, reader.description)
        with self._lock:
            self._reader = reader

    def close(self) -> None:
        """Let go of the directory; then everything is a miss. Again: does nothing."""
        self._backing.store.close()

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
        return len(self._backing.store.snapshot_names(self._reader.namespace))

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the key that `self[key]` would be of, without using it."""
        entry = self._find(key)
        return None if entry is None else entry.key

    def _search(self, index: RadixIndex[Entry], tokens: IntArray) -> tuple[int, Entry | None]:
        return index.longest_common_prefix(tokens)

    def _index(self) -> RadixIndex[Entry]:
        if not self._reader.is_named and not self._warned:
            self._warned = True
            logger.warning(
                "LlamaDiskCache does not know which model its states are of, so it returns only "
                "what this process writes; give it namespace=, or call set_namespace(llm)"
            )
        index = super()._index()
        self._backing.follow(self._reader.namespace, index)
        return index


class StoredStates(Mapping[tuple[int, ...], Any]):
    """What a `LlamaDiskCache` holds, by exact keys: what is used of a `diskcache.Cache`.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: LlamaDiskCache) -> None:
        self._cache = cache

    def __repr__(self) -> str:
        return f"<{len(self)} states in {self.directory}>"

    @property
    def directory(self) -> str:
        """Where the files are."""
        return str(self._cache._backing.store.path)

    def volume(self) -> int:
        """Return the bytes of all values in the directory, of whoever's."""
        return self._cache.cache_size

    def iterkeys(self) -> Iterator[tuple[int, ...]]:
        """Yield the keys, least recently used first."""
        return (entry.key for entry in self._cache._entries())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self.iterkeys()

    def __len__(self) -> int:
        return len(self._cache)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: object) -> bool:
        return self._cache._has(as_tokens(key))  # type: ignore[arg-type]

    def __getitem__(self, key: TokensLike) -> Any:
        found = self._cache._peek(as_tokens(key))
        if found is None:
            raise KeyError(key)
        return found

    def __setitem__(self, key: TokensLike, value: Any) -> None:
        self._cache[key] = value

    def __delitem__(self, key: TokensLike) -> None:
        if not self._cache._drop(as_tokens(key)):
            raise KeyError(key)

    def close(self) -> None:
        """Let go of the directory."""
        self._cache.close()
