"""A lock that is free and guards whole things in a forked process, too.

Whoever forks waits until no other thread is in a cache. That comes before the index of a directory
is closed for the fork, which a thread in a cache may be using: so that module is imported here, and
what is registered last is done first.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

import llamakeep.stores.disk.index  # noqa: F401 - registers what it does around a fork


class Lock:
    """A lock that one thread may take several times."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()
_held: list[Lock] = []


def _before_fork() -> None:
    for lock in list(_LOCKS):
        lock._lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
