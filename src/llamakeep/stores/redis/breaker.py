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

    One failure opens it. Then nothing passes until a probe found the server back, which is sent
    after a cool-down by somebody who has nothing else to do: see `Prober`. If the probe fails, the
    next cool-down is twice as long, up to a limit. If it succeeds, all pass again; but the
    cool-downs start short again only when no failure followed for as long as the longest one, so a
    server that answers and falls silent in turns is not trusted each time.

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

    def enter(self) -> Ticket | None:
        """Return leave to try, or None: do without, at once."""
        with self._lock:
            return Ticket(self._era, probe=False) if self._state == "closed" else None

    def wait_s(self) -> float:
        """Return the seconds until a probe is due; 0 when it is."""
        with self._lock:
            return max(0.0, self._since + self._cooldown_s - self._clock())

    def probe(self) -> Ticket | None:
        """Return leave to probe, or None: it is not due, on its way, or not needed."""
        with self._lock:
            if self._state != "open" or self._clock() - self._since < self._cooldown_s:
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
