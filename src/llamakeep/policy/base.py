"""What a policy is, and what it may ask of what is kept.

A policy is one method, `rank`: the thing with the smallest rank goes first. It sees what every
kept thing can say about itself (`Kept`) and the time. Ranks are compared with each other, all taken
at the same time; what a number is by itself means nothing.

Most hold no state of their own, so that one object can serve several caches and threads. Some watch
what is used (`Watching`): each of those belongs to one cache, and `get_policy` makes a new one.

Use makes a rank rise. Some ranks fall as time passes, since what was used long ago says less about
what will be. A policy that has such ranks says how soon that shows, in `rerank_seconds`: queues
look so far ahead (see `queue.py`). One that watches tells the queue itself what fell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

PolicyKind = Literal["prompts", "checkpoints", "tree", "disk"]
"""What is kept: whole prompts, the checkpoints of one prompt, states in a prefix tree, or the files
of a directory, which other processes use as well."""


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

    `rank` is all that a policy must have. It may have a `name`, or goes by that of its class, and
    two attributes more, for queues that keep an order and do not look at everything each time:

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


def name_of(policy: Policy) -> str:
    """Return what a policy is called: its `name`, or that of its class."""
    return str(getattr(policy, "name", type(policy).__name__))


def looks_around(policy: Policy) -> bool:
    """Return whether a policy's ranks depend on a thing's neighbours."""
    return bool(getattr(policy, "looks_around", True))


class Watched(Kept, Protocol):
    """A kept thing of a cache that tells its policy what happens to it."""

    memo: Any
    """What a policy that watches remembers of it, which alone writes this; None at first."""
    queued: int
    """Whether it stands in the queue of what can go."""

    @property
    def name(self) -> bytes:
        """Its name, the same when it is kept again."""
        ...  # pragma: no cover - protocol

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is true at one position only."""
        ...  # pragma: no cover - protocol


class Watching(Policy, Protocol):
    """A policy that is told what is used, kept and dropped, by the one cache that it belongs to.

    One thread at a time. Its ranks may fall at any time, if it tells the queue which.
    """

    selective: bool
    """Whether a new thing that ranks below all that could go for it is not kept."""

    def begin_watching(
        self,
        look_again: Callable[[Any], None],
        capacity_bytes: Callable[[], int],
        *,
        may_refuse: bool,
    ) -> None:
        """Begin to watch.

        Args:
            look_again: To be told of each kept thing whose rank has fallen.
            capacity_bytes: Says what can be kept at present.
            may_refuse: Whether what is new may be refused at all.

        Raises:
            InvalidValue: When it watches already.
        """
        ...  # pragma: no cover - protocol

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Hear of a new thing: it is kept from now on, or `refused`.

        Args:
            kept: The thing.
            now: The time.
            after: The kept thing that it goes on from; None where a prompt begins.
            fits: Whether all that comes with it can be kept; otherwise nothing goes for it.
        """
        ...  # pragma: no cover - protocol

    def used(self, kept: Watched, now: float) -> None:
        """Hear that a thing was reused, which counts that already."""
        ...  # pragma: no cover - protocol

    def replaces(self, kept: Watched, old: Watched) -> None:
        """Hear of a thing that is kept from now on instead of another, which it contains."""
        ...  # pragma: no cover - protocol

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Hear that a thing is not kept any more: evicted, or lost. Again: no matter."""
        ...  # pragma: no cover - protocol

    def refused(self, kept: Watched, now: float) -> None:
        """Hear that a new thing is not kept, of which it heard that it comes. Nothing went."""
        ...  # pragma: no cover - protocol


class NotWatching:
    """Hears everything for a policy that does not watch."""

    selective = False

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Do nothing."""

    def used(self, kept: Watched, now: float) -> None:
        """Do nothing."""

    def replaces(self, kept: Watched, old: Watched) -> None:
        """Do nothing."""

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Do nothing."""

    def refused(self, kept: Watched, now: float) -> None:
        """Do nothing."""


NOT_WATCHING: Final = NotWatching()


def watcher_of(
    policy: Policy,
    look_again: Callable[[Any], None],
    capacity_bytes: Callable[[], int],
    *,
    may_refuse: bool,
) -> Watching | NotWatching:
    """Let a policy begin to watch, and return who is to be told; of others, one who does not care.

    Raises:
        InvalidValue: When the policy watches another cache.
    """
    if not watches(policy):
        return NOT_WATCHING
    watching: Watching = policy  # type: ignore[assignment]
    watching.begin_watching(look_again, capacity_bytes, may_refuse=may_refuse)
    return watching


def watches(policy: Policy | str) -> bool:
    """Return whether an object is a policy that watches."""
    return callable(getattr(policy, "begin_watching", None))
