"""`LlamaRAMCache`: states in memory, found by the longest common prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamakeep.llama_cache.base import DEFAULT_CAPACITY_BYTES
from llamakeep.llama_cache.indexed import Entry, IndexedCache, MemoryBacking
from llamakeep.llama_cache.views import KeyView
from llamakeep.radix import RadixIndex
from llamakeep.tokens import IntArray


class LlamaRAMCache(IndexedCache):
    """A cache for `llama_cpp.Llama` in memory.

    A lookup gives the state whose key has the longest common prefix with the query, one token at
    least, even if the key goes on differently: `Llama` cuts what does not fit. Among several, a
    key that the query begins with wins, then the one used last.

    Args:
        capacity_bytes: The limit on what is kept, 0 or more; 0 keeps nothing.
        verbose: Say on standard error how many tokens each lookup matched.

    Raises:
        InvalidValue: For a negative limit.
    """

    _who = "LlamaRAMCache"

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, verbose: bool = False) -> None:
        super().__init__(MemoryBacking(capacity_bytes, self._evicted), verbose=verbose)

    @property
    def cache_state(self) -> Mapping[tuple[int, ...], Any]:
        """The states by key, least recently used first; a read-only view."""
        return KeyView(self, self._peek)

    @property
    def _current_size(self) -> int:
        return self.cache_size

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the key that `self[key]` would be of, without using it."""
        entry = self._find(key)
        return None if entry is None else entry.key

    def _search(
        self, index: RadixIndex[Entry], tokens: IntArray, *, touch: bool = False
    ) -> tuple[int, Entry | None]:
        return index.longest_common_prefix(tokens, touch=touch)
