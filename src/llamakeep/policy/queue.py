"""The order in which kept things are evicted, kept up to date lazily.

A thing stands in the queue at a *floor*: a rank that it has at least. Where ranks do not fall with
time that is its rank when it was last looked at. Where they do, it is its rank at a time ahead, the
*horizon*, which is `rerank_seconds` of the policy after the whole queue was ranked; when that time
has come it is ranked anew. So the floor is too low at times, by what a thing rose through use since
and by what it has yet to fall until the horizon, and never too high.

What has the least rank is found by looking at what has the lowest floors, until the best that was
seen is not above the next floor. All that was looked at without need goes back.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from llamakeep.policy.base import Kept, Policy, rerank_seconds

_SMALL = 64
_CANDIDATES = 32
"""How many things are compared at their true ranks for one to go."""

Rank = tuple[float, int]
_LOWEST: Rank = (-math.inf, -1)


class Evictable(Kept, Protocol):
    """A kept thing that can stand in a queue."""

    queued: int
    """The number of its place there, or 0; written by the queue alone."""


T = TypeVar("T", bound=Evictable)


class EvictionQueue(Generic[T]):
    """Kept things, what the policy ranks first in front.

    Nothing moves when a thing is used: its rank is compared again when it comes to the front, and
    what has risen since goes back. A rank that falls otherwise than with time has to be told, with
    `look_again`. What cannot be evicted when it comes to the front leaves the queue; its owner
    pushes it again when it can.

    What goes has the least rank of all, always where ranks do not fall with time, and for the
    other policies whenever no more than 32 things may be the first. Of more than that, 32 are
    compared: what goes then is at least what would go before anything else `rerank_seconds` later.
    That is a 64th of a half-life; for `TokensPerByte`, a rank within 1.1 % of the least.

    Every call costs O(log n), amortised, a `pop` up to 32 times that; and where ranks fall with
    time a call of the policy for each thing, once in `rerank_seconds` at most.

    Args:
        policy: Ranks things.
        clock: Seconds.
        is_kept: Whether a thing still exists; the queue forgets the others now and then.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], is_kept: Callable[[T], bool]
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._is_kept = is_kept
        self._ahead = rerank_seconds(policy)
        self._falls = not math.isinf(self._ahead)
        self._ranked = self._horizon = -math.inf
        self._numbers = itertools.count(1)
        self._heap: list[tuple[Rank, int, T]] = []
        self._n_left = 0  # places that were left for another
        self._tidy_at = _SMALL

    def __len__(self) -> int:
        return len(self._heap) - self._n_left

    def __iter__(self) -> Iterator[T]:
        return (kept for _, number, kept in self._heap if kept.queued == number)

    def push(self, kept: T) -> None:
        """Put a thing into the queue; one that stands in it already stays where it is.

        Raises:
            Exception: What the policy raises; the thing is in the queue all the same.
        """
        if not kept.queued:
            try:
                floor = self._floor(kept, self._ranked_at())
            except BaseException:
                self._enter(kept, _LOWEST)  # it is ranked when it comes to the front
                raise
            self._enter(kept, floor)

    def look_again(self, kept: T) -> None:
        """Rank a thing anew, before anything goes, if it stands in the queue.

        For when something else than time let it fall. Asks the policy nothing now.
        """
        if kept.queued:
            self._n_left += 1
            self._enter(kept, _LOWEST)

    def pop(self, can_go: Callable[[T], bool], *, below: Rank | None = None) -> T | None:
        """Take out what goes first of the things that exist and `can_go`; None when none can.

        Args:
            can_go: Asked of what comes to the front, before it is ranked: also of things that are
                compared and stay.
            below: Only what ranks below this goes; None for anything.

        Raises:
            Exception: What the policy or `can_go` raises; then nothing has left the queue that
                could go.
        """
        now = self._ranked_at()
        seen: list[tuple[Rank, T]] = []
        best: tuple[Rank, int] | None = None  # its rank, and where in `seen` it is
        try:
            while self._heap and len(seen) < _CANDIDATES:
                floor, number, kept = self._heap[0]
                if best is not None and best[0] <= floor:
                    break
                if below is not None and below <= floor:
                    break
                heapq.heappop(self._heap)
                if kept.queued != number:
                    self._n_left -= 1
                    continue
                kept.queued = 0
                if not self._is_kept(kept):
                    continue
                seen.append((floor, kept))  # until it is known where it belongs
                if not can_go(kept):
                    seen.pop()
                    continue
                higher = self._floor(kept, now)
                if higher > floor:  # it was used
                    seen.pop()
                    self._enter(kept, higher)
                    continue
                seen[-1] = higher, kept
                rank = self._policy.rank(kept, now) if self._falls else higher
                if below is not None and below <= rank:
                    continue
                if best is None or rank < best[0]:
                    best = rank, len(seen) - 1
        except BaseException:
            best = None
            raise
        finally:
            for index, (floor, kept) in enumerate(seen):
                if best is None or index != best[1]:
                    self._enter(kept, floor)
        return seen[best[1]][1] if best is not None else None

    def clear(self) -> None:
        """Forget everything."""
        for kept in self:
            kept.queued = 0
        self._heap.clear()
        self._n_left = 0

    def _ranked_at(self) -> float:
        """Return the time, having ranked everything anew where the floors do not hold then."""
        now = self._clock()
        if self._falls and not self._ranked <= now <= self._horizon:
            self._ranked, self._horizon = now, now + self._ahead
            try:
                self._keep([(self._floor(it, now), number, it) for _, number, it in self._live()])
            except BaseException:
                self._horizon = -math.inf
                raise
        return now

    def _floor(self, kept: T, now: float) -> Rank:
        return self._policy.rank(kept, self._horizon if self._falls else now)

    def _enter(self, kept: T, floor: Rank) -> None:
        kept.queued = next(self._numbers)
        heapq.heappush(self._heap, (floor, kept.queued, kept))
        if len(self._heap) > self._tidy_at:
            self._keep(self._live())

    def _live(self) -> list[tuple[Rank, int, T]]:
        """Return the places that are still taken, by things that exist."""
        live = []
        for place in self._heap:
            _, number, kept = place
            if kept.queued != number:
                continue
            if self._is_kept(kept):
                live.append(place)
            else:
                kept.queued = 0
        return live

    def _keep(self, places: list[tuple[Rank, int, T]]) -> None:
        """Make these places the queue."""
        heapq.heapify(places)
        self._heap = places
        self._n_left = 0
        self._tidy_at = max(_SMALL, 2 * len(places))
