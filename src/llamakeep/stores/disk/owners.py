"""Who is writing into a shared directory, and whether that process still lives.

A process that was killed cannot clean up after itself. Whoever opens the directory next does it,
but must not take the work of a living process for a dead one's leftovers.
"""

from __future__ import annotations

import os
import platform
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

UNJUDGED_SECONDS = 3600.0
"""An owner that cannot be looked up from here counts as dead when it was silent for so long."""


@dataclass(frozen=True, slots=True)
class Owner:
    """An open store of a process.

    Attributes:
        key: Random; part of the names of its temporary files.
        pid: Its process.
        started: When that process was started, in whatever unit the system counts; tells it from a
            later one with the same number.
        machine: Which machine it runs on.
        boot: Which start of that machine, and which numbering of processes there.
    """

    key: str
    pid: int
    started: float
    machine: str
    boot: str

    def is_dead(self, silent_seconds: float) -> bool:
        """Return whether it will write no more.

        Args:
            silent_seconds: How long nothing was heard from it.
        """
        if self.machine == _machine() and self.boot == _boot():
            return _started(self.pid) != self.started
        if self.lost_with_machine():
            return True
        return silent_seconds > UNJUDGED_SECONDS

    def lost_with_machine(self) -> bool:
        """Return whether this machine was started again since: what it wrote may be lost."""
        start, _, _ = self.boot.partition(" ")
        here, _, _ = _boot().partition(" ")
        return self.machine == _machine() and bool(start and here) and start != here


def this_process() -> Owner:
    """Return a new owner in this process."""
    pid = os.getpid()
    return Owner(secrets.token_hex(8), pid, _started(pid) or 0.0, _machine(), _boot())


def this_boot() -> str:
    """Return what is different after every start of the machine, where the system can tell.

    Elsewhere it may also differ when the clock was set; never is it the same after a start.
    """
    start, _, _ = _boot().partition(" ")
    return start or f"since {psutil.boot_time():.0f}"


def _started(pid: int) -> float | None:
    """Return when the process was started, or None when there is none, or none of ours."""
    try:
        # What psutil derives from this moves when the machine's clock is set.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else float(fields[19])
    except (OSError, IndexError, ValueError):
        pass
    try:
        return round(float(psutil.Process(pid).create_time()), 1)
    except psutil.Error:
        return None


@lru_cache(maxsize=1)
def _machine() -> str:
    return f"{platform.node()} {_read('/etc/machine-id')}"


def _boot() -> str:
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbering = ""
    return f"{_read('/proc/sys/kernel/random/boot_id')} {numbering}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
