"""How long things wait to be used again, learned as they do, and what waiting for it is worth.

Things are of classes, and each waits from its last use on, in buckets of time: half octaves from an
eighth of a second. Of each class it is counted how many began to wait in a bucket, and how many of
these were used in it. What waits still counts among those that began: so what has just come does
not look as if it never were used (the estimate of Kaplan and Meier).

What a class says of little evidence is drawn to what the classes together say.

What it is worth to keep a thing is how many uses it gets for the time that it takes up room, if one
keeps it as long as is best from now on. That is a ratio, the steepest slope from the present place
on the curve of uses over time, to any later place on it (the index of Gittins). Where the chance of
a use only falls, that is the chance now; where it rises first, the peak counts as soon as it is
worth waiting for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

FIRST_S: Final = 0.125
"""End of the first bucket, in seconds."""

EDGES: Final = (0.0, *(FIRST_S * 2 ** (half / 2) for half in range(46)))
"""Where buckets begin, in seconds; the last one, of 8 days, has no end."""

N_BUCKETS: Final = len(EDGES)

_WIDTHS: Final = (*(end - start for start, end in pairwise(EDGES)), EDGES[-1])
_PRIOR: Final = 20.0
"""What the classes together count for, in things, against the evidence of one."""
_NEVER: Final = 1e-9


def bucket_of(age_s: float) -> int:
    """Return the bucket in which something is that was used so many seconds ago."""
    return max(0, bisect_right(EDGES, age_s) - 1)


class Survival:
    """Counts of what was used again after how long, for some classes of things.

    Args:
        groups: For each class the group that it belongs to, counted from 0: its own counts are
            drawn to those of its group, these to all.
        memory: How many uses count fully; what is older than that counts half, and so on.
    """

    def __init__(self, groups: Sequence[int], memory: float) -> None:
        self._groups = groups
        self._memory = memory
        self._used = [[0.0] * N_BUCKETS for _ in groups]
        self._left = [[0.0] * N_BUCKETS for _ in groups]
        self._n_used = 0

    def used(self, klass: int, bucket: int) -> None:
        """Count a thing that was used after it waited until this bucket."""
        self._used[klass][bucket] += 1
        self._n_used += 1

    def left(self, klass: int, bucket: int, n: int = 1) -> None:
        """Count things that waited until this bucket, of which nothing more is known."""
        self._left[klass][bucket] += n

    def worths(self, waiting: Iterable[tuple[int, int, int]]) -> list[list[float]]:
        """Return for each class and bucket the uses that a thing gets, for each second of room.

        Args:
            waiting: What waits now: its class, its bucket, how many.

        Returns:
            Worths at the begin of each bucket. Costs a few milliseconds; halves what is old.
        """
        chances = self._chances(waiting)
        fading = 0.5 ** (self._n_used / self._memory)
        self._n_used = 0
        for counts in (*self._used, *self._left):
            counts[:] = [count * fading for count in counts]
        return [hit_density(each, _WIDTHS) for each in chances]

    def _chances(self, waiting: Iterable[tuple[int, int, int]]) -> list[list[float]]:
        """Return the chance of a use in a bucket, of what is not used before it."""
        left = [list(counts) for counts in self._left]
        for klass, bucket, n in waiting:
            left[klass][bucket] += n
        began = [_began(used, lost) for used, lost in zip(self._used, left, strict=True)]
        everything = _sums(self._used), _sums(began)
        at_all = [used / (n + 1) for used, n in zip(*everything, strict=True)]
        of_group = []
        for group in range(max(self._groups) + 1):
            own = [klass for klass, each in enumerate(self._groups) if each == group]
            members = (_sums([counts[klass] for klass in own]) for counts in (self._used, began))
            of_group.append(_drawn_to(at_all, *members))
        return [
            _drawn_to(of_group[group], self._used[klass], began[klass])
            for klass, group in enumerate(self._groups)
        ]


def _sums(counts: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _began(used: list[float], left: list[float]) -> list[float]:
    """Return how many began to wait in each bucket: those that ended there, or later."""
    began, n = [], 0.0
    for at in reversed(range(N_BUCKETS)):
        n += used[at] + left[at]
        began.append(n)
    return began[::-1]


def _drawn_to(prior: list[float], used: list[float], began: list[float]) -> list[float]:
    return [(u + _PRIOR * p) / (n + _PRIOR) for p, u, n in zip(prior, used, began, strict=True)]


def hit_density(chances: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return for each bucket the most uses a unit of time, kept from its begin to some later end.

    Example:
        >>> hit_density([0.5, 0.0, 1.0], [1.0, 1.0, 1.0])  # wait through the second for the third
        [0.6666666666666666, 0.5, 2.0]

    Args:
        chances: Of a use in each bucket, of what was not used before it.
        widths: How long each takes; what is used in it leaves after half of that on average.
    """
    # Points of the curve of uses over time, both weighed by who comes that far. A slope is the same
    # whether it is weighed by who began or by who came to its first point.
    times, uses, alive = [0.0], [0.0], 1.0
    for chance, width in zip(chances, widths, strict=True):
        times.append(times[-1] + alive * width * (1 - chance / 2))
        uses.append(uses[-1] + alive * chance)
        alive *= 1 - chance
        alive = max(alive, _NEVER)
    hull = [len(chances)]
    worths: list[float] = []

    def slope(start: int, end: int) -> float:
        return (uses[end] - uses[start]) / (times[end] - times[start])

    for at in reversed(range(len(chances))):
        while len(hull) > 1 and slope(at, hull[-1]) <= slope(at, hull[-2]):
            hull.pop()
        worths.append(slope(at, hull[-1]))
        hull.append(at)
    return worths[::-1]
