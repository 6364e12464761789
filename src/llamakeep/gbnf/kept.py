"""What was made of texts at a cost, kept for the next time: the last used ones, within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from llamakeep.errors import GrammarError, IntegrityError

T = TypeVar("T")


class KeptGrammars(Generic[T]):
    """Keeps grammars by keys, and why there are none. Any thread may use it.

    Args:
        most_chars: Length of all that is kept together, keys included.
        size: Returns the length of what is kept under a key.
    """

    def __init__(self, most_chars: int, size: Callable[[T], int]) -> None:
        self._most_chars = most_chars
        self._size_of = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, T | GrammarError] = OrderedDict()
        self._n_chars = 0

    @property
    def n_chars(self) -> int:
        """Length of all that is kept, keys included."""
        return self._n_chars

    def get(self, key: str, make: Callable[[], T]) -> T:
        """Return what is kept under a key, or else what `make` returns, which is kept then.

        What is larger than the bound is returned and not kept. Two threads that ask for the same
        at once may both make it.

        Raises:
            GrammarError: What `make` raises; it is kept as well, and raised again.
        """
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = self._made(make)
            self._keep(key, found)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found), where=found.where)
        return found

    def check(self) -> None:
        """Raise if what is counted is not what is kept.

        Raises:
            IntegrityError: With both numbers.
        """
        with self._lock:
            n_chars = sum(self._size(key, found) for key, found in self._kept.items())
            if not n_chars == self._n_chars <= self._most_chars:
                raise IntegrityError(
                    f"grammars of {n_chars:,} characters are counted as {self._n_chars:,}, "
                    f"at most {self._most_chars:,}"
                )

    def _made(self, make: Callable[[], T]) -> T | GrammarError:
        try:
            return make()
        except GrammarError as error:  # kept without the frames that it came through
            return GrammarError(str(error), where=error.where)

    def _keep(self, key: str, found: T | GrammarError) -> None:
        n_chars = self._size(key, found)
        if n_chars > self._most_chars:
            return
        with self._lock:
            if key in self._kept:
                return
            while self._n_chars + n_chars > self._most_chars:
                old, gone = self._kept.popitem(last=False)
                self._n_chars -= self._size(old, gone)
            self._kept[key] = found
            self._n_chars += n_chars

    def _size(self, key: str, found: T | GrammarError) -> int:
        size = len(str(found)) if isinstance(found, GrammarError) else self._size_of(found)
        return len(key) + size
