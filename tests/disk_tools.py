"""What the tests of the disk store share."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llamakeep.states import Block, Buffer
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.disk.files import PAGE_BYTES, Files, on_disk
from llamakeep.tokens import PathNames, Place

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX permissions and links")

Open = Callable[..., DiskStore]
NAMESPACE = b"n" * 32
ROLLING = b"r" * 32
BLOCK_TOKENS = 4


class Unflushed(Files):
    """Does not wait for the device. For tests that do not ask what survives."""

    def flush(self, file: io.FileIO) -> None:
        pass

    def flush_directory(self, path: Path) -> None:
        pass


class Failing(Unflushed):
    """Fails where it is told to.

    Attributes:
        errors: What a method fails with, by its name.
        room: Bytes that can still be written; None for any number.
        free: What is said to be free; None for the truth.
        is_writable: Whether directories are said to be.
        calls: How often each method was called.
    """

    def __init__(self) -> None:
        self.errors: dict[str, OSError] = {}
        self.room: int | None = None
        self.free: int | None = None
        self.is_writable = True
        self.calls: Counter[str] = Counter()

    def _call(self, method: str) -> None:
        self.calls[method] += 1
        if method in self.errors:
            raise self.errors[method]

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free

    def writable(self, path: Path) -> bool:
        return self.is_writable

    def create(self, path: Path) -> io.FileIO:
        self._call("create")
        return super().create(path)

    def write(self, file: io.FileIO, data: memoryview) -> None:
        self._call("write")
        if self.room is not None and len(data) > self.room:
            super().write(file, data[: self.room])
            self.room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)

    def flush(self, file: io.FileIO) -> None:
        self._call("flush")

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename")
        super().rename(old, new)

    def flush_directory(self, path: Path) -> None:
        self._call("flush_directory")

    def open(self, path: Path) -> tuple[io.FileIO, os.stat_result]:
        self._call("open")
        return super().open(path)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)


def path(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> PathNames:
    """Return the names along a prompt."""
    return PathNames(namespace, np.array(tokens, np.int32), BLOCK_TOKENS)


def content(name: bytes, n_bytes: int) -> Buffer:
    """Return the only right bytes of a state, so that any others are noticed."""
    return np.resize(np.frombuffer(name, np.uint8), n_bytes)


def put(store: DiskStore, place: Place, n_bytes: int = 1000) -> bool:
    """Put the state of a place."""
    return store.put(place.name, n_bytes, lambda: content(place.name, n_bytes), place)


def is_right(store: DiskStore, name: bytes) -> bool | None:
    """Return whether the store has the state; fails when it has other bytes."""
    data = store.get(name)
    if data is None:
        return None
    assert np.array_equal(data, content(name, data.nbytes))
    return True


def blocks(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> list[Block]:
    """Return the blocks of a prompt, to ask a store what it has there."""
    names = path(tokens, namespace)
    array = np.array(tokens, np.int32)
    return [
        Block(names.block(origin), origin, array[origin : origin + BLOCK_TOKENS])
        for origin in range(0, len(tokens), BLOCK_TOKENS)
    ]


def files_below(directory: Path) -> list[Path]:
    """Return all files of states, whole or not."""
    found = []
    for part in ("blobs", "tmp"):
        for where, _, names in os.walk(directory / part):
            found += [Path(where) / name for name in names]
    return sorted(found)


def du(directory: Path) -> int:
    """Return what the files of states occupy."""
    total = 0
    for file in files_below(directory):
        try:
            total += on_disk(file.lstat().st_size)
        except FileNotFoundError:
            continue
    return total


def pages(n: int) -> int:
    """Return the bytes of so many pages."""
    return n * PAGE_BYTES


@contextmanager
def opening(where: Path) -> Iterator[Open]:
    """Yield `open_store(**options)`, which opens a directory; what was opened is closed."""
    opened: list[DiskStore] = []

    def open_store(**options: object) -> DiskStore:
        defaults: dict[str, object] = {"capacity_bytes": pages(100), "min_free_bytes": 0}
        opened.append(DiskStore(where, **(defaults | options)))  # type: ignore[arg-type]
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()
