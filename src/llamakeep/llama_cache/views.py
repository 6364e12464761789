"""What a cache holds, as the attributes that users know show it: read-only, made when looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from llamakeep.errors import TokenError
from llamakeep.llama_cache.indexed import Entry, IndexedCache
from llamakeep.tokens import IntArray, as_tokens

T = TypeVar("T")


class KeyView(Mapping[tuple[int, ...], T], Generic[T]):
    """Keys in their order of use, the least recently used first, and something for each.

    Looking uses nothing: the order stays as it is. Costs a walk over all keys for an iteration.

    Args:
        cache: The cache.
        show: Returns what stands for the entry with these tokens, or None when it is gone.
    """

    def __init__(self, cache: IndexedCache, show: Callable[[IntArray], T | None]) -> None:
        self._cache = cache
        self._show = show

    def __repr__(self) -> str:
        return f"<{len(self)} keys of {self._cache!r}>"

    def __getitem__(self, key: tuple[int, ...]) -> T:
        found = self._show(_exact(key))
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        try:
            return self._cache._has(_exact(key))
        except KeyError:
            return False

    def __len__(self) -> int:
        return len(self._cache)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (entry.key for entry in self._entries())

    def __reversed__(self) -> Iterator[tuple[int, ...]]:
        return (entry.key for entry in reversed(self._entries()))

    def _entries(self) -> list[Entry]:
        return self._cache._entries()


def _exact(key: object) -> IntArray:
    """Return the tokens of a key.

    Raises:
        KeyError: When it can be none.
    """
    try:
        return as_tokens(key)  # type: ignore[arg-type]
    except TokenError:
        raise KeyError(key) from None
