"""The order in which kept things are evicted, kept up to date lazily."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from llamakeep.policy import Kept, Policy

_SMALL = 64


class Evictable(Kept, Protocol):
    """A kept thing that can stand in a queue."""

    queued: bool
    """Whether it does; written by the queue alone."""


T = TypeVar("T", bound=Evictable)


class EvictionQueue(Generic[T]):
    """Kept things, what the policy ranks first in front.

    Nothing moves when a thing is used: its rank is compared again when it comes to the front, and
    what has risen since goes back. What cannot be evicted when it comes to the front leaves the
    queue; its owner pushes it again when it can. Every call costs O(log n), amortised.

    Args:
        policy: Ranks things; a rank may rise, never fall.
        clock: Seconds.
        is_kept: Whether a thing still exists; the queue forgets the others now and then.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], is_kept: Callable[[T], bool]
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._is_kept = is_kept
        self._numbers = itertools.count()
        self._heap: list[tuple[tuple[float, int], int, T]] = []
        self._tidy_at = _SMALL

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        return (kept for _, _, kept in self._heap)

    def push(self, kept: T) -> None:
        """Put a thing into the queue; one that stands in it already stays where it is."""
        if kept.queued:
            return
        rank = self._policy.rank(kept, self._clock())
        heapq.heappush(self._heap, (rank, next(self._numbers), kept))
        kept.queued = True
        if len(self._heap) > self._tidy_at:
            live = [item for item in self._heap if self._is_kept(item[2])]
            heapq.heapify(live)
            self._heap = live
            self._tidy_at = max(_SMALL, 2 * len(live))

    def pop(self, can_go: Callable[[T], bool]) -> T | None:
        """Take out what goes first of the things that exist and `can_go`; None when none can."""
        now = self._clock()
        while self._heap:
            rank, _, kept = heapq.heappop(self._heap)
            kept.queued = False
            if not self._is_kept(kept) or not can_go(kept):
                continue
            if self._policy.rank(kept, now) > rank:
                self.push(kept)
                continue
            return kept
        return None

    def clear(self) -> None:
        """Forget everything."""
        for kept in self:
            kept.queued = False
        self._heap.clear()
