"""Who watches an engine: logs and metrics hear of every request, whoever asked for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from llamakeep.engine.records import Record
from llamakeep.engine.request import Progress, Request
from llamakeep.errors import LlamakeepError
from llamakeep.explain import Served

logger = logging.getLogger("llamakeep")

PROGRESS_EVERY_MS = 2000.0
"""How often observers hear of a long prompt."""


class Observer:
    """Hears what happens in an engine, in its thread or in one that uses it; override what matters.

    What it raises is logged, and changes nothing. While it listens the engine may stand still, so
    it is quick, and waits neither for an answer nor for a thread that may wait for the engine. In
    `ended`, `served` and `refused` it may call any method of the engine. In `progressed` and
    `saved`, which come in the middle of a batch, only what does not touch the context: `stats`,
    `recent`, `submit`, and `cancel` of a ticket. After the end there are only `stats` and `recent`.
    """

    def ended(self, record: Record) -> None:
        """A request ended, however it did. Who waits for its end has heard it before.

        One record after the other, in the engine's thread or in one that called `Engine.settle`.
        """

    def served(self, record: Record, served: Served) -> None:
        """The same as `ended`, which comes before it, with what the request is explained by."""

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

    def served(self, record: Record, served: Served) -> None:
        """Tell all of them."""
        self._tell(lambda each: each.served(record, served))

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


class Untold:
    """Records of ends that observers have not heard of. From any thread.

    One thread tells at a time, and tells what others add meanwhile, too. So who finds another one
    at it need not wait, unless it wants to know that all is told.

    Args:
        observers: Hear of them.
    """

    def __init__(self, observers: Observer) -> None:
        self._observers = observers
        self._records: deque[tuple[Record, Served]] = deque()
        self._telling = threading.Lock()
        self._teller = 0

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, record: Record, served: Served) -> None:
        """Add one, for `tell`."""
        self._records.append((record, served))

    def tell(self, wait_s: float) -> bool:
        """Tell all there are; from an observer that hears of one right now, do nothing.

        Args:
            wait_s: How long to wait for a thread that tells them already. An observer in it may
                wait for the caller, so there is no waiting for ever.

        Returns:
            Whether all that were there have been told.
        """
        if self._teller == threading.get_ident():
            return False
        while self._telling.acquire(timeout=wait_s):
            try:
                self._teller = threading.get_ident()
                while self._records:
                    record, served = self._records.popleft()
                    self._observers.ended(record)
                    self._observers.served(record, served)
            finally:
                self._teller = 0
                self._telling.release()
            if not self._records:  # else it was added by one that found us here
                return True
        return False
