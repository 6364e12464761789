"""Work that is done later, in order, by one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger("llamakeep")


class Behind:
    """A queue of jobs and the thread that does them. From any thread.

    The thread is started by the first job and does not keep the process alive: whoever has one
    closes it. In a forked child the queue is empty. An interrupt leaves nothing half done: what
    is put into the queue is there or not.

    Attributes:
        errors: Jobs that raised; what they raised is logged.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._closed = False
        self._given_up = False
        self.after_fork()

    def after_fork(self) -> None:
        """Begin with an empty queue: a forked child has none of its parent's threads."""
        # Each with whether it may be given up; None ends the thread.
        self._jobs: SimpleQueue[tuple[Callable[[], object], bool] | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return self._jobs.qsize()

    def submit(self, run: Callable[[], object]) -> bool:
        """Put a job at the end of the queue; return whether it is there, and not closed."""
        if self._closed:
            return False
        self._put(run, may_be_given_up=True)
        return True

    def _put(self, run: Callable[[], object], *, may_be_given_up: bool) -> None:
        self._jobs.put((run, may_be_given_up))
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="llamakeep", daemon=True)
                self._thread.start()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that is in the queue now is done; return whether it is.

        Args:
            timeout: Seconds; None for as long as it takes.
        """
        if self._thread is None or not self._thread.is_alive():
            return True
        done = threading.Event()
        self._put(done.set, may_be_given_up=False)
        return done.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Take no more jobs, and end the thread when those in the queue are done.

        Those that are not begun when `timeout` seconds are over are given up. Again: does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._given_up = not self.flush(timeout)
        self._jobs.put(None)
        thread = self._thread
        if not (self._given_up or thread is None or thread is threading.current_thread()):
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, may_be_given_up = job
            if self._given_up and may_be_given_up:
                continue
            try:
                run()
            except Exception:
                self.errors += 1
                logger.exception("a job behind the requests failed")
            del run, job  # what it holds is free while nothing is to be done
