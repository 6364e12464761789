"""How long things wait to be used again, learned as they do, and what waiting for it is worth.

Things are of classes, and each waits from its last use on. How long a thing waited the time before,
its gap, may say how long it will: how much, is learned (`gap_power`), and time is measured against
the gap that far. It is cut into buckets: half octaves from an eighth of a second. Of each class it
is counted how many came to a bucket, and how many of these were used in it. What waits still, or is
not known any further, counts until then: so what has just come does not look as if it never were
used (a life table).

What a class says of little evidence is drawn to what the classes together say.

What it is worth to keep a thing until its next use is the chance of that for the time that it takes
up room, if one keeps it as long as is best from now on. That is the steepest slope from the present
place on the curve of uses over time, to any later place on it (the index of Gittins). Where the
chance of a use only falls, that is the chance now; where it rises first, the peak counts as soon as
it is worth waiting for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

FIRST_S: Final = 0.125
"""End of the first bucket, in seconds."""

EDGES: Final = (0.0, *(FIRST_S * 2 ** (half / 2) for half in range(46)))
"""Where buckets begin, in seconds; the last one, of 8 days, has no end."""

N_BUCKETS: Final = len(EDGES)

_WIDTHS: Final = (*(end - start for start, end in pairwise(EDGES)), EDGES[-1])
_PRIOR: Final = 5.0
"""What the classes together count for, in waits, against the evidence of one."""
_NEVER: Final = 1e-9
_USUAL_GAP_S: Final = 16.0
"""A gap after which time is measured as it is."""
_LEAST_GAP_S: Final = 0.25
_SPREAD: Final = 5.0
"""What gaps count for as all alike, in waits, against the evidence that they say something."""


class Wait(NamedTuple):
    """Things that waited together.

    Attributes:
        klass: Their class.
        gap_s: Seconds that they had waited the time before; below 0 when that is not known.
        seconds: How long they waited.
        weight: What they count.
        used: Whether they were used then; otherwise nothing more is known.
    """

    klass: int
    gap_s: float
    seconds: float
    weight: float
    used: bool


@dataclass(frozen=True, slots=True)
class Learned:
    """What waits taught.

    Attributes:
        power: How much the next wait follows the gap before it: 0 not at all, 1 in proportion.
        worths: For each class and bucket the uses that a thing gets for each second of room.
    """

    power: float
    worths: Sequence[Sequence[float]]

    def scale(self, gap_s: float) -> float:
        """Return the seconds that count as one after such a gap."""
        return scale_of(gap_s, self.power)


def scale_of(gap_s: float, power: float) -> float:
    """Return the seconds that count as one after a gap: as many as the gap is long, to a power.

    Example:
        >>> scale_of(64.0, 0.5), scale_of(-1.0, 0.5)  # four times the usual gap; not known
        (2.0, 1.0)
    """
    if gap_s < 0:
        return 1.0
    return float((max(gap_s, _LEAST_GAP_S) / _USUAL_GAP_S) ** power)


def bucket_of(seconds: float) -> int:
    """Return the bucket in which something is that waited so long, in its own scale."""
    return max(0, bisect_right(EDGES, seconds) - 1)


def learn(groups: Sequence[int], waits: Sequence[Wait]) -> Learned:
    """Return what waits teach.

    All of them should have begun in one stretch of time up to now, those that go on included:
    otherwise what waits long would count too much.

    Args:
        groups: For each class the group that it belongs to, counted from 0: its own waits are drawn
            to those of its group, these to all.
        waits: Those that are over, and those that go on.

    Returns:
        Worths at the begin of each bucket. Costs a microsecond for each wait, and a few
        milliseconds.
    """
    power = gap_power(waits)
    used = [[0.0] * N_BUCKETS for _ in groups]
    left = [[0.0] * N_BUCKETS for _ in groups]
    for wait in waits:
        counts = used if wait.used else left
        bucket = bucket_of(wait.seconds / scale_of(wait.gap_s, power))
        counts[wait.klass][bucket] += wait.weight
    chances = _chances(groups, used, left)
    return Learned(power, [hit_density(each, _WIDTHS) for each in chances])


def _chances(
    groups: Sequence[int], used: list[list[float]], left: list[list[float]]
) -> list[list[float]]:
    """Return the chance of a use in a bucket, of what is not used before it."""
    at_risk = [_at_risk(*each) for each in zip(used, left, strict=True)]
    at_all = [n_used / (n + 1) for n_used, n in zip(_sums(used), _sums(at_risk), strict=True)]
    of_group = []
    for group in range(max(groups) + 1):
        own = [klass for klass, each in enumerate(groups) if each == group]
        members = (_sums([counts[klass] for klass in own]) for counts in (used, at_risk))
        of_group.append(_drawn_to(at_all, *members))
    return [
        _drawn_to(of_group[group], used[klass], at_risk[klass])
        for klass, group in enumerate(groups)
    ]


def gap_power(waits: Iterable[Wait]) -> float:
    """Return how much waits follow the gaps before them: the slope of their logarithms, 0 to 1.

    Each class has its own means: that some classes wait longer than others says nothing about one
    of them. Little evidence is drawn to 0.
    """
    classes: dict[int, list[tuple[float, float, float]]] = {}
    for wait in waits:
        if wait.used and wait.gap_s >= 0:
            gap, next_gap = (max(s, _LEAST_GAP_S) for s in (wait.gap_s, wait.seconds))
            case = math.log(gap), math.log(next_gap), wait.weight
            classes.setdefault(wait.klass, []).append(case)
    both = alone = 0.0
    for cases in classes.values():
        weight = sum(w for _, _, w in cases)
        x_mean = sum(x * w for x, _, w in cases) / weight
        y_mean = sum(y * w for _, y, w in cases) / weight
        both += sum((x - x_mean) * (y - y_mean) * w for x, y, w in cases)
        alone += sum((x - x_mean) ** 2 * w for x, _, w in cases)
    return min(1.0, max(0.0, both / (alone + _SPREAD)))


def _sums(counts: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _at_risk(used: list[float], left: list[float]) -> list[float]:
    """Return how many could be used in each bucket: those that came there.

    What is not known any further counts half there.
    """
    at_risk, later = [], 0.0
    for n_used, n_left in zip(reversed(used), reversed(left), strict=True):
        at_risk.append(later + n_used + n_left / 2)
        later += n_used + n_left
    return at_risk[::-1]


def _drawn_to(prior: list[float], used: list[float], at_risk: list[float]) -> list[float]:
    return [(u + _PRIOR * p) / (n + _PRIOR) for p, u, n in zip(prior, used, at_risk, strict=True)]


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
