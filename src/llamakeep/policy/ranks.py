"""Policies that look at a thing and at the time, and at nothing else."""

from __future__ import annotations

import math

from llamakeep.errors import InvalidValue
from llamakeep.policy.base import Kept, Neighbored

HALF_LIFE_SECONDS = 6 * 3600.0
"""Time in which what a use is worth halves, unless told otherwise."""

LEAST_USE = 0.01
"""What a thing's past uses are worth at least; below it they are forgotten."""

_HALF_LIFE_PARTS = 64
"""Ranks that decay are looked up this part of a half-life ahead: 1.1 % less at that time."""


class Oldest:
    """Evict in order of insertion, whatever was used since."""

    name = "oldest"
    looks_around = False

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Rank by the time of insertion."""
        return kept.created, kept.sequence


class Upstream(Oldest):
    """Evict as llama-server does.

    That is in order of insertion. What else its rules say of checkpoints, `CheckpointList` does
    itself; a hit that moves its entry out of the cache is `PromptCache`'s to do.

    Source: both notes on llama-server's eviction.
    """

    name = "upstream"


class LeastRecentlyUsed:
    """Evict what was not stored or reused for the longest time."""

    name = "lru"
    looks_around = False

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Rank by the time of the last use."""
        return kept.last_used, kept.sequence


class _Decaying:
    """What policies share whose ranks fall with time.

    Args:
        half_life: Seconds in which what past uses are worth halves.

    Raises:
        InvalidValue: When that is not a positive, finite number.
    """

    def __init__(self, half_life: float = HALF_LIFE_SECONDS) -> None:
        try:
            is_right = 0 < half_life < math.inf
        except TypeError:
            is_right = False
        if not is_right:
            raise InvalidValue(f"half_life must be a positive number of seconds, not {half_life!r}")
        self.half_life = float(half_life)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(half_life={self.half_life:g})"

    @property
    def rerank_seconds(self) -> float:
        """How far ahead ranks may be looked up: a 64th of the half-life."""
        return self.half_life / _HALF_LIFE_PARTS

    def uses(self, kept: Kept, now: float) -> float:
        """Return what the past uses are worth now: hits * 2^(-age / half_life), 0 below 0.01.

        A use that is still to come, by a clock that was put back, is worth one of now: more would
        be without bounds.
        """
        age = max(0.0, now - kept.last_used)
        worth = kept.hits * 2.0 ** (-age / self.half_life)
        return worth if worth >= LEAST_USE else 0.0


class TokensPerByte(_Decaying):
    """Evict what saves the fewest tokens for its bytes, and was used least of late.

    The rank is (e + 1) * tokens / bytes, where e is what past uses are worth by now. Ties, such as
    states of one size that nobody used, go in order of insertion. What occupies nothing goes last:
    it makes no room.

    Args:
        half_life: Seconds in which what past uses are worth halves.

    Raises:
        InvalidValue: When that is not a positive, finite number.
    """

    name = "tokens-per-byte"
    looks_around = False

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Rank by tokens per byte, and by use."""
        if kept.n_bytes <= 0:
            return math.inf, kept.sequence
        # The quotient by itself: it must be the same wherever the ratio is, for ties to be ties.
        return (self.uses(kept, now) + 1.0) * (kept.n_tokens / kept.n_bytes), kept.sequence


class Marginal(_Decaying):
    """Evict what costs least to lose for its bytes, times how likely it is to be used again.

    What goes first has the least (e + 2^(-age / half_life)) * marginal_tokens / bytes, where e is
    what past uses are worth by now. What costs nothing to lose goes before all else; what occupies
    nothing goes last.

    The rank is the logarithm of that, base 2, plus now / half_life. So it does not underflow for
    what lay idle for a thousand half-lives; and the decay that everything shares cancels: a rank
    falls only once, when e does, and otherwise the order of two things stays as it is. Times of
    use that are closer than a 10^11th of the clock's reading to each other count as the same.

    Args:
        half_life: Seconds in which the chance of another use halves.

    Raises:
        InvalidValue: When that is not a positive, finite number.
    """

    name = "marginal"
    looks_around = True

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Rank by what losing it costs, per byte, and by use."""
        if kept.n_bytes <= 0:
            return math.inf, kept.sequence
        cost = kept.marginal_tokens
        if cost <= 0:
            return -math.inf, kept.sequence
        n_uses = 1 + kept.hits if self.uses(kept, now) else 1
        worth = math.log2(n_uses * cost / kept.n_bytes)
        return worth + kept.last_used / self.half_life, kept.sequence


class NeighborDistance:
    """Evict the checkpoint that is closest to a neighbour.

    Only of checkpoints in a list, which leaves out those that have to stay.
    """

    name = "neighbor-distance"
    looks_around = True

    def rank(self, kept: Neighbored, now: float) -> tuple[float, int]:
        """Rank by the distance to the nearer neighbour."""
        return float(min(kept.gap_before, kept.gap_after)), kept.sequence


class NeighborGap:
    """Evict the checkpoint whose two gaps have the least product.

    It differs from the nearest neighbour's distance where one gap is wide: what stands beside a
    gap is worth more. Only of checkpoints in a list, which leaves out those that have to stay.
    """

    name = "neighbor-gap"
    looks_around = True

    def rank(self, kept: Neighbored, now: float) -> tuple[float, int]:
        """Rank by the product of the gaps before and after it."""
        return float(kept.gap_before * kept.gap_after), kept.sequence
