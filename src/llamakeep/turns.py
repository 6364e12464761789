"""One call at a time on a model, streams included.

A turn begins with a call and ends when the call has returned, or when the stream it returned is
exhausted, closed or abandoned. Calls that a call makes on the same model belong to its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from llamakeep.errors import KeeperBusy

Running: TypeAlias = Callable[[], AbstractContextManager[object]]


class Turns:
    """Hands out turns. A thread that asks while another's turn lasts waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._running = False

    @property
    def nested(self) -> bool:
        """Whether the asking code runs inside the current turn."""
        return self._running and self._owner == threading.get_ident()

    def begin(self) -> None:
        """Take the turn, waiting for it if need be.

        Raises:
            KeeperBusy: When the turn belongs to this thread's own open stream: waiting would
                never end.
        """
        if self._owner == threading.get_ident() and self._lock.locked():
            raise KeeperBusy(
                "a stream of this model is still open in this thread: exhaust or close it first"
            )
        self._lock.acquire()
        self._owner, self._running = threading.get_ident(), True

    def suspend(self) -> None:
        """Hand control back to the caller of a stream; the turn lasts."""
        self._running = False

    def resume(self) -> None:
        """Go on with a stream, whichever thread asks for its next item."""
        self._owner, self._running = threading.get_ident(), True

    def end(self) -> None:
        """Give the turn back."""
        self._owner, self._running = None, False
        self._lock.release()


class OpenStream(Generator[Any, Any, None]):
    """A generator whose turn lasts until it is exhausted, closed or dropped.

    Args:
        turns: The turn is taken already and is suspended between items.
        inner: What produces the items.
        running: Entered while `inner` runs.
        finish: Called once, inside the turn, before it ends.
    """

    def __init__(
        self,
        turns: Turns,
        inner: Generator[Any, Any, Any],
        running: Running,
        finish: Callable[[], None],
    ) -> None:
        self._turns = turns
        self._inner = inner
        self._context = running
        self._finish: Callable[[], None] | None = finish
        self._stepping = threading.Lock()

    def send(self, value: Any) -> Any:
        """Produce the next item."""
        return self._step(lambda: self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise `error` where the stream stands."""
        return self._step(lambda: self._inner.throw(*error))

    def close(self) -> None:
        """End the stream and its turn. Calling it again does nothing."""
        if self._finish is not None:
            self._step(self._inner.close, last=True)

    def __del__(self) -> None:
        self.close()

    def _step(self, step: Callable[[], Any], *, last: bool = False) -> Any:
        # Who comes while another thread, or this very stream, is at it must not end its turn.
        mine = False
        try:
            mine = self._stepping.acquire(blocking=False)
            if not mine:
                raise ValueError("stream already executing")
            return self._advance(step, last=last)
        finally:
            if mine:
                self._stepping.release()

    def _advance(self, step: Callable[[], Any], *, last: bool) -> Any:
        if self._finish is None:
            raise StopIteration
        self._turns.resume()
        try:
            with self._context():
                item = step()
        except BaseException:
            self._end()
            raise
        if last:
            self._end()
        else:
            self._turns.suspend()
        return item

    def _end(self) -> None:
        finish, self._finish = self._finish, None
        self._context = nullcontext  # it holds the model, which may be dropped now
        self._inner = _nothing()
        try:
            if finish is not None:
                finish()
        finally:
            self._turns.end()


def _nothing() -> Generator[Any, Any, None]:
    yield from ()
