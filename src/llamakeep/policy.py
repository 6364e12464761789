"""Which kept thing goes first when room is needed.

A policy is one method, `rank`: the thing with the smallest rank goes first. It sees what every
kept thing can say about itself (`Kept`) and the time; it holds no state of its own, so one object
can serve several caches and threads. Ranks are compared with each other, all taken at the same
time; what a number is by itself means nothing.

Use makes a rank rise. Some ranks fall as time passes, since what was used long ago says less about
what will be. A policy that has such ranks says how soon that shows, in `rerank_seconds`: queues
look so far ahead (see `eviction.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal, Protocol, cast

from llamakeep.errors import InvalidValue

PolicyKind = Literal["prompts", "checkpoints", "tree"]
"""What is kept: whole prompts, the checkpoints of one prompt, or states in a prefix tree."""

HALF_LIFE_SECONDS = 6 * 3600.0
"""Time in which what a use is worth halves, unless told otherwise."""

LEAST_USE = 0.01
"""What a thing's past uses are worth at least; below it they are forgotten."""

_HALF_LIFE_PARTS = 64
"""Ranks that decay are looked up this part of a half-life ahead: 1.1 % less at that time."""


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
        """Tokens of a prompt or of a span, or the position of a checkpoint."""
        ...  # pragma: no cover - protocol

    @property
    def marginal_tokens(self) -> int:
        """Tokens between it and the restorable position before it: what losing it costs."""
        ...  # pragma: no cover - protocol


class Neighbored(Kept, Protocol):
    """A checkpoint in a list: it knows how far its neighbours are."""

    @property
    def gap_before(self) -> int:
        """Tokens from the checkpoint before it, or from 0."""
        ...  # pragma: no cover - protocol

    @property
    def gap_after(self) -> int:
        """Tokens to the next checkpoint, or to the end of what is known."""
        ...  # pragma: no cover - protocol


class Policy(Protocol):
    """Ranks kept things for eviction.

    `rank` is all that a policy must have. It may have two attributes more, for queues that keep an
    order and do not look at everything each time:

    - `rerank_seconds`: Ranks fall with time, without anything happening, and may be looked up so
      many seconds ahead. Without it they must not fall with time.
    - `looks_around`: Whether ranks depend on a thing's neighbours, through `marginal_tokens` or
      gaps. Taken for granted where it is missing, which costs a little more.
    """

    name: str

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        """Return the rank of `kept` at time `now`; the smallest is evicted first."""
        ...  # pragma: no cover - protocol


def rerank_seconds(policy: Policy) -> float:
    """Return how far ahead a policy's ranks may be looked up; `inf` when time does not matter."""
    return float(getattr(policy, "rerank_seconds", math.inf))


def looks_around(policy: Policy) -> bool:
    """Return whether a policy's ranks depend on a thing's neighbours."""
    return bool(getattr(policy, "looks_around", True))


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


def _by_name(*policies: type[Any]) -> dict[str, type[Any]]:
    return {policy.name: policy for policy in policies}


_TREE = _by_name(Oldest, LeastRecentlyUsed, TokensPerByte, Marginal)
_PROMPTS = _TREE | _by_name(Upstream)
_CHECKPOINTS = _PROMPTS | _by_name(NeighborDistance, NeighborGap)
_POLICIES: Mapping[str, Mapping[str, type[Any]]] = {
    "prompts": _PROMPTS,
    "checkpoints": _CHECKPOINTS,
    "tree": _TREE,
}


def policy_names(kind: PolicyKind = "tree") -> list[str]:
    """Return the names that `get_policy` knows for what is kept, sorted.

    Raises:
        InvalidValue: For an unknown kind.
    """
    return sorted(_allowed(kind))


def get_policy(policy: str | Policy, kind: PolicyKind = "tree") -> Policy:
    """Return the policy of that name; an object with a `rank` method is returned as it is.

    Args:
        policy: A name, for a policy with its default half-life, or an object.
        kind: What is kept: `prompts`, `checkpoints` (of one prompt), or `tree` (states in a prefix
            tree, in memory and on disk).

    Raises:
        InvalidValue: For an unknown kind, and for a name, or an object of ours, that is none for
            what is kept; the message lists those that are.
    """
    allowed = _allowed(kind)
    known = ", ".join(sorted(allowed))
    if isinstance(policy, str):
        name, is_ours = policy, policy in _CHECKPOINTS
    elif callable(getattr(policy, "rank", None)):
        name, is_ours = getattr(policy, "name", ""), type(policy) in _CHECKPOINTS.values()
    else:
        raise InvalidValue(f"policy must be {known} or have a rank method, not {policy!r}")
    if is_ours and name not in allowed:
        raise InvalidValue(f"policy {name!r} is not for {kind}; known: {known}")
    if not isinstance(policy, str):
        return policy
    if name not in allowed:
        raise InvalidValue(f"unknown policy {name!r}; known: {known}")
    return cast(Policy, allowed[name]())


def parse_policy(text: str, kind: PolicyKind = "tree") -> Policy:
    """Return the policy that a text names, with its options: `NAME` or `NAME:key=value,...`.

    Example:
        >>> parse_policy("tokens-per-byte:half_life=3600")
        TokensPerByte(half_life=3600)

    Args:
        text: A name that `get_policy` knows, and numbers for arguments of its class.
        kind: What is kept.

    Raises:
        InvalidValue: For an unknown name or option, or a value that is none.
    """
    name, _, rest = text.partition(":")
    default = get_policy(name, kind)
    options: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        try:
            options[key.strip()] = float(value)
        except ValueError:
            what = "has no value" if not equals else f"is no number: {value!r}"
            raise InvalidValue(f"policy {text!r}: {key!r} {what}") from None
    known = signature(type(default)).parameters
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        names = ", ".join(known) or "it has none"
        raise InvalidValue(f"policy {name!r} has no option {unknown!r}; known: {names}")
    make = cast("type[Any]", type(default))
    return cast(Policy, make(**options)) if options else default


def _allowed(kind: str) -> Mapping[str, type[Any]]:
    if kind not in _POLICIES:
        raise InvalidValue(f"kind must be {', '.join(_POLICIES)}, not {kind!r}")
    return _POLICIES[kind]
