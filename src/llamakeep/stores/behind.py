"""Work that is done later, in order, by one thread, with the bytes that wait for it bounded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from llamakeep.budget import ByteBudget
from llamakeep.errors import OverBudget

logger = logging.getLogger("llamakeep")


class Job:
    """Something to do later.

    Attributes:
        n_bytes: Bytes that it holds until it is done.
        state: `waiting`, `running`, `done` or `cancelled`.
    """

    __slots__ = ("n_bytes", "run", "state")

    def __init__(self, run: Callable[[], None], n_bytes: int) -> None:
        self.run = run
        self.n_bytes = n_bytes
        self.state = "waiting"


class Behind:
    """A queue of jobs and the thread that does them. From any thread.

    The thread is started by the first job and does not keep the process alive: whoever has one
    closes it. In a forked child the queue is empty.

    Args:
        budget: What jobs hold counts against it, from `submit` until they are done.

    Attributes:
        errors: Jobs that raised; what they raised is logged.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.errors = 0
        self._closing = False
        self._begin()

    def _begin(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running: Job | None = None

    def after_fork(self) -> None:
        """Begin with an empty queue in a forked child, which has none of its parent's threads."""
        for job in (*self._jobs, *([self._running] if self._running else [])):
            job.state = "cancelled"
        self._begin()

    def __len__(self) -> int:
        return len(self._jobs) + (self._running is not None)

    def submit(self, run: Callable[[], None], n_bytes: int = 0) -> Job | None:
        """Put a job at the end of the queue; None when its bytes do not fit, or when closed."""
        try:
            self.budget.reserve(n_bytes)
        except OverBudget:
            return None
        job = Job(run, n_bytes)
        with self._changed:
            if self._closing:
                self.budget.release(n_bytes)
                return None
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="llamakeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> bool:
        """Take back a job that was not begun; return whether that was so."""
        with self._changed:
            if job.state != "waiting":
                return False
            job.state = "cancelled"
            self._jobs.remove(job)
            self.budget.release(job.n_bytes)
            self._changed.notify_all()
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that is in the queue now is done; return whether it is.

        Args:
            timeout: Seconds; None for as long as it takes.
        """
        with self._changed:
            todo = [*self._jobs, *([self._running] if self._running else [])]
            return self._changed.wait_for(
                lambda: all(job.state in ("done", "cancelled") for job in todo), timeout
            )

    def close(self, timeout: float | None = None) -> int:
        """Take no more jobs, wait for those in the queue, and end the thread.

        Returns:
            How many were given up because `timeout` seconds did not do. Again: does nothing.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        done = self.flush(timeout)
        with self._changed:
            given_up = list(self._jobs)
            self._jobs.clear()
            for job in given_up:
                job.state = "cancelled"
                self.budget.release(job.n_bytes)
            self._changed.notify_all()
        if done and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return len(given_up) + (not done and self._running is not None)

    @property
    def busy(self) -> bool:
        """Whether a job runs now."""
        return self._running is not None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._running = self._jobs.popleft()
                job.state = "running"
            try:
                job.run()
            except Exception:
                self.errors += 1
                logger.exception("a job behind the requests failed")
            finally:
                with self._changed:
                    job.state = "done"
                    self._running = None
                    self.budget.release(job.n_bytes)
                    self._changed.notify_all()
