"""Which kept thing goes first when room is needed.

A policy is one method, `rank`: the thing with the smallest rank goes first. It sees what every
kept thing can say about itself (`Kept`) and the time; it holds no state of its own, so one object
can serve several caches.

A rank may rise, with use or with time; it must not fall. The queue behind it looks at a thing again
when it comes to the front, and so notices what has risen since, not what has sunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llamakeep.errors import InvalidValue


class Kept(Protocol):
    """What a policy may ask of a kept thing: a segment, a checkpoint or a whole entry."""

    created: float
    """When it was stored, in seconds of the cache's clock."""
    last_used: float
    """When it was stored or last reused."""
    sequence: int
    """A number that grows with every thing stored: breaks ties in order of insertion."""
    hits: int
    """How often it was reused."""

    @property
    def n_bytes(self) -> int:
        """What it occupies."""
        ...  # pragma: no cover - protocol

    @property
    def n_tokens(self) -> int:
        """Tokens of a span, or the position of a checkpoint."""
        ...  # pragma: no cover - protocol


class Policy(Protocol):
    """Ranks kept things for eviction."""

    name: str

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Return the rank of `kept` at time `now`; the smallest is evicted first."""
        ...  # pragma: no cover - protocol


class Oldest:
    """Evict in order of insertion, whatever was used since. What llama-server does."""

    name = "oldest"

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Rank by the time of insertion."""
        return kept.created, kept.sequence


class LeastRecentlyUsed:
    """Evict what was not stored or reused for the longest time."""

    name = "lru"

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Rank by the time of the last use."""
        return kept.last_used, kept.sequence


_POLICIES: dict[str, Callable[[], Policy]] = {
    Oldest.name: Oldest,
    LeastRecentlyUsed.name: LeastRecentlyUsed,
}


def policy_names() -> list[str]:
    """Return the names `get_policy` knows, sorted."""
    return sorted(_POLICIES)


def get_policy(policy: str | Policy) -> Policy:
    """Return the policy of that name; an object with a `rank` method is returned as it is.

    Raises:
        InvalidValue: For an unknown name; the message lists the known ones.
    """
    if not isinstance(policy, str):
        if not callable(getattr(policy, "rank", None)):
            known = ", ".join(policy_names())
            raise InvalidValue(f"policy must be {known} or have a rank method, not {policy!r}")
        return policy
    try:
        return _POLICIES[policy]()
    except KeyError:
        known = ", ".join(policy_names())
        raise InvalidValue(f"unknown policy {policy!r}; known: {known}") from None
