"""What the dashboard remembers of requests that ended: the last ones, and sums over time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from llamakeep.engine import Observer, Record

INTERVAL_S = 10
MOST_INTERVALS = 360
"""An hour."""
MOST_RECENT = 50
MOST_LETTERS = 80
"""Of what a client calls its request."""


class Series(Observer):
    """Requests by when they ended. From any thread.

    Args:
        clock: Seconds since 1970.

    Attributes:
        since: When it began to watch.
        version: Grows with every request.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.since = clock()
        self.version = 0
        self._clock = clock
        self._gate = threading.Lock()
        self._intervals: deque[list[int]] = deque(maxlen=MOST_INTERVALS)
        self._recent: deque[tuple[float, Record]] = deque(maxlen=MOST_RECENT)
        self._evaluated_tokens = 0
        self._evaluated_ms = 0.0

    def ended(self, record: Record) -> None:
        """Note a request."""
        now = self._clock()
        start = int(now) // INTERVAL_S * INTERVAL_S
        with self._gate:
            self._recent.append((now, record))
            last = self._intervals[-1] if self._intervals else None
            if last is None or last[0] < start:  # a clock that was set back adds to the last one
                last = [start, 0, 0, 0]
                self._intervals.append(last)
            last[1] += record.reused_tokens
            last[2] += record.evaluated_tokens
            last[3] += record.generated_tokens
            if record.generated_tokens:  # else its prompt may have been given up half way
                self._evaluated_tokens += record.evaluated_tokens
                self._evaluated_ms += record.prompt_ms - record.restore_ms
            self.version += 1

    def intervals(self) -> list[list[int]]:
        """Return when each interval began, and its reused, evaluated and generated tokens.

        The oldest comes first. Those in which nothing ended are left out.
        """
        with self._gate:
            return [list(each) for each in self._intervals]

    def recent(self) -> list[dict[str, Any]]:
        """Return the last requests and when they `ended`, the newest first: JSON-ready."""
        with self._gate:
            found = list(self._recent)
        return [
            {"ended": round(at, 3)} | record.to_json() | {"label": record.label[:MOST_LETTERS]}
            for at, record in reversed(found)
        ]

    def ms_of(self, n_tokens: int) -> float:
        """Return about how long it would take to evaluate so many tokens, by what others took."""
        with self._gate:
            if not self._evaluated_tokens:
                return 0.0
            return n_tokens * self._evaluated_ms / self._evaluated_tokens
