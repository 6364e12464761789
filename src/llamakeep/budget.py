"""Counting bytes: one budget per tier, and nothing is allocated before it is counted."""

from __future__ import annotations

import threading

from llamakeep.errors import IntegrityError, InvalidValue, OverBudget, whole_number


class ByteBudget:
    """A limit on bytes and how much of it is taken.

    Reserving comes before allocating, so `used_bytes` never passes `capacity_bytes`, at no
    instant and whatever the order. Safe to use from any thread; every call costs O(1).

    Args:
        capacity_bytes: The limit, 0 or more. 0 means that nothing fits.

    Raises:
        InvalidValue: For a negative limit.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = whole_number("capacity_bytes", capacity_bytes, 0)
        self._used_bytes = 0
        self._peak_bytes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ByteBudget({self._used_bytes:,} of {self._capacity_bytes:,} bytes)"

    @property
    def capacity_bytes(self) -> int:
        """The limit."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What is taken now."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken."""
        return self._peak_bytes

    @property
    def free_bytes(self) -> int:
        """What a reservation can still have."""
        return self._capacity_bytes - self._used_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Set another limit.

        Raises:
            OverBudget: When more is in use; the limit stays as it is.
            InvalidValue: For a negative limit.
        """
        whole_number("capacity_bytes", capacity_bytes, 0)
        with self._lock:
            if self._used_bytes > capacity_bytes:
                raise OverBudget(f"{self._used_bytes:,} bytes are in use, above {capacity_bytes:,}")
            self._capacity_bytes = capacity_bytes

    def reserve(self, n_bytes: int) -> None:
        """Take `n_bytes`.

        Raises:
            OverBudget: When they do not fit; nothing is taken then.
            InvalidValue: For a negative number.
        """
        if n_bytes < 0:
            raise InvalidValue(f"cannot reserve {n_bytes} bytes")
        with self._lock:
            if self._used_bytes + n_bytes > self._capacity_bytes:
                raise OverBudget(
                    f"{n_bytes:,} bytes do not fit: {self._used_bytes:,} of "
                    f"{self._capacity_bytes:,} are in use"
                )
            self._used_bytes += n_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)

    def release(self, n_bytes: int) -> None:
        """Give `n_bytes` back.

        Raises:
            IntegrityError: When more would be given back than was taken.
        """
        with self._lock:
            if not 0 <= n_bytes <= self._used_bytes:
                raise IntegrityError(
                    f"cannot release {n_bytes:,} bytes: {self._used_bytes:,} are in use"
                )
            self._used_bytes -= n_bytes
