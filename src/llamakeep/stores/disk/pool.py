"""Memory that is read into, used again once nobody looks at it any more.

Fresh memory costs a page fault for every 4 KiB, about as much as reading a warm file into it.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from llamakeep.states import Buffer

_GRAIN_BYTES = 1 << 16
_MAX_BLOCKS = 8


class _Block:
    """A piece of memory. Compared by identity."""

    __slots__ = ("lease", "memory")

    def __init__(self, n_bytes: int) -> None:
        self.memory: Buffer = np.empty(n_bytes, np.uint8)
        self.lease = ctypes.c_uint8 * n_bytes

    @property
    def n_bytes(self) -> int:
        return self.memory.nbytes


class BufferPool:
    """Hands out arrays to read into. From any thread; nothing is ever waited for.

    A block of memory comes back when the last array that looks into it is gone, whichever thread
    drops it: a slice or a `memoryview` of an array holds the block like the array itself.

    Args:
        pool_bytes: How much memory may lie idle here, in at most eight blocks. What is handed out
            is not counted.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self._idle: list[_Block] = []

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be used again."""
        return sum(block.n_bytes for block in list(self._idle))

    def take(self, n_bytes: int) -> Buffer:
        """Return an array of `n_bytes`, contents undefined.

        Small ones are ordinary arrays. The memory behind the others is at most an eighth larger
        than asked for, and 128 KiB: what is kept for long wastes no more than that.
        """
        if n_bytes < _GRAIN_BYTES:
            return np.empty(n_bytes, np.uint8)
        block = self._reuse(n_bytes) or _Block(-(-n_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        # An array remembers only whose memory it is, not which array it was cut from. That owner
        # must therefore not be the block, which lives on, but something that dies with its users.
        lease = block.lease.from_buffer(block.memory.data)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return np.frombuffer(memoryview(lease), np.uint8, n_bytes)

    def _reuse(self, n_bytes: int) -> _Block | None:
        most = n_bytes + n_bytes // 8 + _GRAIN_BYTES
        for block in list(self._idle):
            if n_bytes <= block.n_bytes <= most:
                try:
                    self._idle.remove(block)
                except ValueError:
                    continue  # another thread was faster
                return block
        return None

    def _give_back(self, block: _Block) -> None:
        # Runs wherever the last array is dropped, in the middle of anything: so without a lock.
        # Each call on the list is atomic.
        self._idle.append(block)
        while len(self._idle) > _MAX_BLOCKS or self.idle_bytes > self.pool_bytes:
            try:
                self._idle.pop(0)
            except IndexError:
                break
