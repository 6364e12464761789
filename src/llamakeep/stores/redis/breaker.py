"""A circuit breaker: who pays for a server that does not answer, and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from llamakeep.errors import InvalidValue

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


class Unreachable(Exception):
    """A server did not answer, or was not asked because it lately did not: do without it.

    Already counted and logged. It stays inside the stores.
    """


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to try once; hand it back with what came of it.

    Attributes:
        era: Which period of the breaker it was given out in.
        probe: It is the one call that finds out whether the server is back.
    """

    era: int
    probe: bool


class CircuitBreaker:
    """Lets calls through while a server answers, and none while it does not.

    One failure opens it. Then nothing passes for a cool-down; after it a single call does, the
    probe. If that fails, the next cool-down is twice as long, up to a limit. If it succeeds, all
    pass again; but the cool-downs start short again only when no failure followed for as long as
    the longest one, so a server that answers and falls silent in turns is not trusted each time.

    Whoever cannot wait well, a request that reads, is let through as a probe only after twice the
    cool-down: those who write in the background come first, and find out in its place.

    What began before the breaker last changed its mind does not change it again: ten calls that
    time out together count once. From any thread; costs a lock.

    Args:
        clock: Seconds, never going back.
        cooldown_s: The first cool-down.
        longest_s: The longest one.

    Raises:
        InvalidValue: For a cool-down that is not positive, or above the longest.
    """

    def __init__(
        self, clock: Callable[[], float], *, cooldown_s: float = 1.0, longest_s: float = 60.0
    ) -> None:
        if not 0 < cooldown_s <= longest_s:
            raise InvalidValue(
                f"cooldown_s must be above 0 and at most {longest_s:g}, not {cooldown_s!r}"
            )
        self._clock = clock
        self._first_s = cooldown_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._state: BreakerState = "closed"
        self._era = 0
        self._cooldown_s = 0.0
        self._since = clock()

    @property
    def state(self) -> BreakerState:
        """`closed` lets all through, `open` none; `half-open`: the probe is on its way."""
        return self._state

    @property
    def cooldown_s(self) -> float:
        """The current cool-down, the last one while closed, 0 before the first failure."""
        return self._cooldown_s

    def enter(self, *, patient: bool) -> Ticket | None:
        """Return leave to try, or None: do without, at once.

        Args:
            patient: The caller works in the background and may be the probe first.
        """
        with self._lock:
            if self._state == "closed":
                return Ticket(self._era, probe=False)
            wait_s = self._cooldown_s * (1 if patient else 2)
            if self._state == "half-open" or self._clock() - self._since < wait_s:
                return None
            self._change("half-open")
            return Ticket(self._era, probe=True)

    def succeeded(self, ticket: Ticket) -> None:
        """Note that the server answered. Closes the breaker after a probe."""
        with self._lock:
            if ticket.probe and ticket.era == self._era:
                self._change("closed")

    def failed(self, ticket: Ticket) -> bool:
        """Note that it did not. Returns whether that opened the breaker."""
        with self._lock:
            if ticket.era != self._era:
                return False
            calm = self._state == "closed" and self._clock() - self._since >= self._longest_s
            if calm or not self._cooldown_s:
                self._cooldown_s = self._first_s
            else:
                self._cooldown_s = min(2 * self._cooldown_s, self._longest_s)
            self._change("open")
            return True

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._era += 1
        self._since = self._clock()
