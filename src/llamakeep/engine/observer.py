"""Who watches an engine: logs and metrics hear of every request, whoever asked for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from llamakeep.engine.records import Record
from llamakeep.engine.request import Progress, Request
from llamakeep.errors import LlamakeepError

logger = logging.getLogger("llamakeep")

PROGRESS_EVERY_MS = 2000.0
"""How often observers hear of a long prompt."""


class Observer:
    """Hears what happens in an engine, in its thread or in one that uses it; override what matters.

    What it raises is logged, and changes nothing.
    """

    def ended(self, record: Record) -> None:
        """A request ended, however it did. Who waits for its end has heard it before."""

    def progressed(self, request: Request, progress: Progress) -> None:
        """A prompt is being evaluated, and has been for `PROGRESS_EVERY_MS` or a multiple of it."""

    def refused(self, error: LlamakeepError) -> None:
        """A request was not taken. In the thread that asked."""

    def saved(self, ms: float) -> None:
        """It took this long to keep what a slot holds."""

    def closed(self) -> None:
        """The engine has ended; nothing else comes."""


class Observers(Observer):
    """Several of them as one that never raises."""

    def __init__(self, all_of_them: Iterable[Observer] = ()) -> None:
        self._all = list(all_of_them)

    def add(self, observer: Observer) -> None:
        """Let another one hear what happens from now on."""
        self._all.append(observer)

    def ended(self, record: Record) -> None:
        """Tell all of them."""
        self._tell(lambda each: each.ended(record))

    def progressed(self, request: Request, progress: Progress) -> None:
        """Tell all of them."""
        self._tell(lambda each: each.progressed(request, progress))

    def refused(self, error: LlamakeepError) -> None:
        """Tell all of them."""
        self._tell(lambda each: each.refused(error))

    def saved(self, ms: float) -> None:
        """Tell all of them."""
        self._tell(lambda each: each.saved(ms))

    def closed(self) -> None:
        """Tell all of them."""
        self._tell(lambda each: each.closed())

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for each in self._all:
            try:
                what(each)
            except Exception:  # who watches must not end what is watched
                logger.exception("an observer of the engine failed")
