"""`LlamaTrieCache`: states in memory, found by keys that are wholly a prefix of the query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llamakeep.llama_cache.base import DEFAULT_CAPACITY_BYTES
from llamakeep.llama_cache.indexed import Entry, IndexedCache, MemoryBacking
from llamakeep.llama_cache.views import KeyView
from llamakeep.radix import RadixIndex
from llamakeep.tokens import IntArray, TokensLike, as_tokens


class TrieNode:
    """A point in a tree of tokens: which tokens lead on, and the state that is kept there.

    Those of a cache are made when they are looked at, and show what is there then. They are
    read-only.

    Attributes:
        children: Nodes by token.
        state: The state under the key that ends here, or None.
    """

    def __init__(self) -> None:
        self.children: Mapping[int, TrieNode] = {}
        self.state: Any = None


class _LiveNode(TrieNode):
    """A node of a cache, see `TrieNode`."""

    def __init__(self, cache: LlamaTrieCache, tokens: IntArray) -> None:
        self._cache = cache
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"<TrieNode after {self._tokens.size:,} tokens>"

    @property
    def children(self) -> Mapping[int, TrieNode]:  # type: ignore[override]
        """Nodes by token."""
        return _Children(self._cache, self._tokens)

    @property
    def state(self) -> Any:
        """The state under the key that ends here, or None."""
        return self._cache._peek(self._tokens)


class _Children(Mapping[int, TrieNode]):
    """The nodes after some tokens."""

    def __init__(self, cache: LlamaTrieCache, tokens: IntArray) -> None:
        self._cache = cache
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"<nodes by token: {self._next()}>"

    def __getitem__(self, token: int) -> TrieNode:
        if token not in self._next():
            raise KeyError(token)
        return _LiveNode(self._cache, np.append(self._tokens, np.int32(token)))

    def __iter__(self) -> Iterator[int]:
        return iter(self._next())

    def __len__(self) -> int:
        return len(self._next())

    def _next(self) -> list[int]:
        return self._cache._next_tokens(self._tokens)


class LlamaTrieCache(IndexedCache):
    """A cache for `llama_cpp.Llama` in memory, for states that are used as they are.

    A lookup gives the state of the longest key that the query begins with, all of it; the empty
    key begins everything. So what is given back never has to be cut, which models with a recurrent
    state or a sliding window cannot do.

    Args:
        capacity_bytes: The limit on what is kept, 0 or more; 0 keeps nothing.

    Raises:
        InvalidValue: For a negative limit.
    """

    _who = "LlamaTrieCache"

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        super().__init__(MemoryBacking(capacity_bytes, self._evicted))

    @property
    def root(self) -> TrieNode:
        """The node before any token."""
        return _LiveNode(self, np.empty(0, np.int32))

    @property
    def lru_tracker(self) -> Mapping[tuple[int, ...], TrieNode]:
        """The node of each key, least recently used first; a read-only view."""
        return KeyView(self, self._node_of)

    @property
    def _current_size(self) -> int:
        return self.cache_size

    def _find_longest_prefix_node(
        self, key: TokensLike
    ) -> tuple[TrieNode | None, tuple[int, ...] | None]:
        """Return the node and the key that `self[key]` would be of, without using it."""
        entry = self._find(key)
        if entry is None:
            return None, None
        return _LiveNode(self, entry.tokens), entry.key

    def _prune(self, key: TokensLike) -> None:
        """Drop the state under exactly this key, if it is there."""
        self._drop(as_tokens(key))

    def _node_of(self, tokens: IntArray) -> TrieNode | None:
        return _LiveNode(self, tokens) if self._has(tokens) else None

    def _next_tokens(self, tokens: IntArray) -> list[int]:
        with self._lock:
            return self._index().next_tokens(tokens)

    def _missing(self, index: RadixIndex[Entry]) -> str:
        return "Key not found"

    def _search(
        self, index: RadixIndex[Entry], tokens: IntArray, *, touch: bool = False
    ) -> tuple[int, Entry | None]:
        return index.longest_prefix(tokens, touch=touch)


LlamaCache = LlamaTrieCache
"""The name that older programs import."""
