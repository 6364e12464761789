"""Counting and logging what a cache refuses and what goes wrong below it, not raising it."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import weakref

from llamakeep.errors import BlobRejected, StoreError

logger = logging.getLogger("llamakeep")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _is_full(error: BaseException) -> bool:
    """Return whether the error says that there is no room left."""
    return isinstance(error, OSError) and error.errno in _FULL


class Refused(Exception):
    """Something is not done, for a reason that is no error of the caller's.

    Attributes:
        why: In a word, for the counter `refused_...`.
    """

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


class Tally:
    """Counters by kind of event. From any thread.

    The first event of a kind is logged as a warning, the others as information.

    Args:
        who: What a log line begins with.
    """

    def __init__(self, who: str) -> None:
        self.counters: dict[str, int] = {}
        self._who = who
        self._lock = threading.Lock()
        _TALLIES.add(self)

    def count(self, kind: str, n: int = 1) -> int:
        """Count events, and return how many there were in all."""
        with self._lock:
            if n:
                self.counters[kind] = self.counters.get(kind, 0) + n
            return self.counters.get(kind, 0)

    def report(self, kind: str, message: str) -> None:
        """Count an event and log it."""
        level = logging.WARNING if self.count(kind) == 1 else logging.INFO
        logger.log(level, "%s: %s (%s)", self._who, message, kind)

    def quietly(self, doing: str) -> Quietly:
        """Return a context in which errors from outside are counted and logged, and end.

        Those of the system count as `refused_disk_full` or `errors_` and what was being done,
        those of the index as `errors_index`, refusals as `refused_` and why.
        """
        return Quietly(self, doing)


class Quietly:
    """See `Tally.quietly`."""

    def __init__(self, tally: Tally, doing: str) -> None:
        self._tally = tally
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Refused):
            self._tally.report(f"refused_{error.why}", str(error))
        elif isinstance(error, BlobRejected):
            self._tally.report(f"refused_{error.reason}", str(error))
        elif isinstance(error, (OSError, sqlite3.Error, StoreError, MemoryError)):
            if _is_full(error) or (isinstance(error, sqlite3.Error) and "is full" in str(error)):
                self._tally.report("refused_disk_full", f"no room is left: {error}")
            else:
                where = "index" if isinstance(error, sqlite3.Error) else self._doing
                self._tally.report(f"errors_{where}", f"{type(error).__name__}: {error}")
        else:
            return False
        return True


_TALLIES: weakref.WeakSet[Tally] = weakref.WeakSet()


def _after_fork() -> None:
    for tally in list(_TALLIES):
        tally._lock = threading.Lock()  # the thread that held it may not be here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
