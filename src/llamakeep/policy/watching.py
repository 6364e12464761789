"""Policies that remember a little of what was used and dropped."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.policy.base import Watched

if TYPE_CHECKING:
    from typing_extensions import Self

_PROTECTED_SHARE = 0.8


def _nobody(kept: Any) -> None:
    """Tell nobody."""


def _nothing() -> int:
    """Say that nothing can be kept."""
    return 0


class WatchingPolicy:
    """What they share: one cache each, and nothing to do unless they say so."""

    selective = False
    looks_around = False

    def __init__(self) -> None:
        self._look_again: Callable[[Any], None] = _nobody
        self._capacity_bytes: Callable[[], int] = _nothing

    def fresh(self) -> Self:
        """Return a new one with the same options."""
        return type(self)()

    def begin_watching(
        self,
        look_again: Callable[[Any], None],
        capacity_bytes: Callable[[], int],
        *,
        may_refuse: bool,
    ) -> None:
        """Begin to watch a cache.

        Raises:
            InvalidValue: When it watches one already.
        """
        if self._look_again is not _nobody:
            raise InvalidValue(f"{self!r} watches a cache already; each needs its own")
        self._look_again, self._capacity_bytes = look_again, capacity_bytes

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Hear of a new thing."""

    def used(self, kept: Watched, now: float) -> None:
        """Hear of a use."""

    def replaces(self, kept: Watched, old: Watched) -> None:
        """Remember of a thing what was known of the one that it contains."""
        kept.memo, old.memo = old.memo, None

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Hear of a thing that is not kept any more."""
        kept.memo = None

    def refused(self, kept: Watched, now: float) -> None:
        """Hear of a new thing that is not kept: as if it had never come."""
        self.leaves(kept, now, evicted=False)


class _Place:
    """A thing's place in `SegmentedLRU`."""

    __slots__ = ("n_bytes", "order", "protected")

    def __init__(self, order: int, n_bytes: int) -> None:
        self.protected = False
        self.order = order
        self.n_bytes = n_bytes


class SegmentedLRU(WatchingPolicy):
    """Evict what was used once before what was used again, each by recency.

    What is used again is protected, up to a share of what can be. Of what is protected beyond
    that, the least recently used goes back among the others, as if it had just come.

    Args:
        protected: Share of the capacity that can be protected.

    Raises:
        InvalidValue: When that is not between 0 and 1.
    """

    name = "slru"

    def __init__(self, protected: float = _PROTECTED_SHARE) -> None:
        super().__init__()
        try:
            is_right = 0 < protected <= 1
        except TypeError:
            is_right = False
        if not is_right:
            raise InvalidValue(f"protected must be above 0 and at most 1, not {protected!r}")
        self._share = protected
        self._orders = itertools.count(1)
        self._protected: dict[int, Watched] = {}  # by order: the least recently used first
        self._protected_bytes = 0

    def __repr__(self) -> str:
        return f"SegmentedLRU(protected={self._share:g})"

    def fresh(self) -> Self:
        """Return a new one with the same options."""
        return type(self)(self._share)

    def rank(self, kept: Watched, now: float) -> tuple[float, int]:
        """Rank by whether it is protected, then by the last use."""
        place: _Place | None = kept.memo
        return (float(place.protected), place.order) if place is not None else (0.0, 0)

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Let a new thing wait for its first use."""
        kept.memo = _Place(next(self._orders), kept.n_bytes)

    def used(self, kept: Watched, now: float) -> None:
        """Protect a thing, and give up the protection of others where that is too much."""
        if kept.memo is None:  # an interrupt came before it was known
            self.enters(kept, now, None)
        place: _Place = kept.memo
        self._unprotect(place)
        place.order, place.protected = next(self._orders), True
        self._protected[place.order] = kept
        self._protected_bytes += place.n_bytes
        limit = self._share * self._capacity_bytes()
        while self._protected_bytes > limit and len(self._protected) > 1:
            last = next(iter(self._protected.values()))
            if last.memo is None:
                del self._protected[next(iter(self._protected))]
                continue
            self._unprotect(last.memo)
            last.memo.order = next(self._orders)
            self._look_again(last)

    def replaces(self, kept: Watched, old: Watched) -> None:
        """Put a thing in the place of one that it contains."""
        super().replaces(kept, old)
        place: _Place | None = kept.memo
        if place is None:
            return
        more = kept.n_bytes - place.n_bytes
        place.n_bytes += more
        if place.protected:
            self._protected[place.order] = kept
            self._protected_bytes += more

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Forget a thing."""
        place: _Place | None = kept.memo
        if place is not None:
            self._unprotect(place)
        super().leaves(kept, now, evicted=evicted)

    def _unprotect(self, place: _Place) -> None:
        if place.protected:
            self._protected.pop(place.order, None)
            self._protected_bytes -= place.n_bytes
            place.protected = False


class GreedyDualSizeFrequency(WatchingPolicy):
    """Evict what has the least L + uses * tokens / bytes, where L is what the last one had to go.

    So what is used often stays longer, and all that is not used again goes in the end: newcomers
    begin at a higher L. Tokens stand for the cost of evaluating them again.

    Source: L. Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    Policy, HPL-98-69R1.
    """

    name = "gdsf"

    def __init__(self) -> None:
        super().__init__()
        self._inflation = 0.0

    def __repr__(self) -> str:
        return "GreedyDualSizeFrequency()"

    def rank(self, kept: Watched, now: float) -> tuple[float, int]:
        """Rank by what was worked out at the last use."""
        return kept.memo or 0.0, kept.sequence

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Work out the rank of a new thing."""
        self.used(kept, now)

    def used(self, kept: Watched, now: float) -> None:
        """Work out the rank of a thing that was used."""
        per_byte = kept.n_tokens / kept.n_bytes if kept.n_bytes > 0 else math.inf
        kept.memo = self._inflation + (1 + kept.hits) * per_byte

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Let what comes begin where the last one went."""
        if evicted and kept.memo is not None and kept.memo < math.inf:  # or all would be equal
            self._inflation = max(self._inflation, kept.memo)
        super().leaves(kept, now, evicted=evicted)


class Random(WatchingPolicy):
    """Evict anything. What other policies have to be better than.

    A thing that comes draws how long it stays, from an exponential distribution, in a time that
    passes as things go. Such a draw says nothing about how much of it is left, so at each time all
    that is kept is as likely to go next.

    Args:
        seed: Of the draws: equal seeds, equal choices.

    Raises:
        InvalidValue: For a seed that is no whole number, 0 or more.
    """

    name = "random"

    def __init__(self, seed: float = 0) -> None:
        super().__init__()
        given: object = seed
        if isinstance(given, float) and given.is_integer():  # as options are read
            given = int(given)
        self._seed = whole_number("seed", given, 0)
        self._draws = random.Random(self._seed)
        self._time = 0.0

    def __repr__(self) -> str:
        return f"Random(seed={self._seed})"

    def fresh(self) -> Self:
        """Return a new one with the same options."""
        return type(self)(self._seed)

    def rank(self, kept: Watched, now: float) -> tuple[float, int]:
        """Rank by the time that was drawn."""
        return kept.memo or 0.0, kept.sequence

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Draw when a new thing goes."""
        kept.memo = self._time + self._draws.expovariate(1.0)

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Let the time pass."""
        if evicted and kept.memo is not None:
            self._time = max(self._time, kept.memo)
        super().leaves(kept, now, evicted=evicted)
