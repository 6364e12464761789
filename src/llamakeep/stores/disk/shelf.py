"""The files of a directory of states: one for each, immutable, in the form of `envelope.py`.

A file is written under a temporary name, flushed, and renamed. What has its final name is therefore
whole; what has not is nobody's.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from llamakeep.errors import BlobRejected, StoreError
from llamakeep.modelfile import ABANDONED_SECONDS, abandoned
from llamakeep.states import Buffer, frozen
from llamakeep.stores.disk.files import Files, on_disk
from llamakeep.stores.disk.pool import BufferPool
from llamakeep.stores.envelope import (
    Envelope,
    SealCheck,
    check_secret,
    header_bytes,
    parse,
    seal_key,
    total_bytes,
    verify,
    wrap,
)
from llamakeep.tokens import NAME_BYTES, Place

T = TypeVar("T")

BLOBS, TEMPORARY = "blobs", "tmp"
SUFFIX, PARTIAL, UNREADY = ".state", ".part", ".new"
"""A state, one that is being written under a ticket, and a small file that is being written."""

_HEAD_BYTES = 4096
_TICKET = re.compile(r"[0-9A-Za-z_-]{1,200}")
_READ_BYTES = 1 << 30


class FileRejected(BlobRejected):
    """A file is not what was stored there.

    Attributes:
        identity: Which file it was: another may have its name by now.
    """

    def __init__(self, cause: BlobRejected, identity: tuple[int, int] | None) -> None:
        super().__init__(str(cause), reason=cause.reason)
        self.identity = identity


class Payload:
    """The payload of a state, read piece by piece. Nothing of it is true before `finish`.

    Args:
        file: The file.
        envelope: What its header says.
        key: From `seal_key`.
    """

    def __init__(self, file: io.FileIO, envelope: Envelope, key: bytes | None) -> None:
        self.left_bytes = envelope.payload_bytes
        self._file = file
        self._check = SealCheck(envelope, key)
        file.seek(envelope.header_bytes)

    def read(self, n_bytes: int) -> bytes:
        """Return the next bytes: read once, into the object that is returned.

        Raises:
            BlobRejected: When there are not so many.
        """
        if not 0 <= n_bytes <= self.left_bytes:
            raise BlobRejected(
                f"{n_bytes:,} bytes are to follow, {self.left_bytes:,} do", reason="corrupt"
            )
        data = self._file.read(n_bytes) or b""
        while len(data) < n_bytes:
            more = self._file.read(n_bytes - len(data))
            if not more:
                raise BlobRejected(f"ends {self.left_bytes:,} bytes early", reason="truncated")
            data += more
        self._check.update(data)
        self.left_bytes -= n_bytes
        return data

    def finish(self) -> None:
        """Compare what was read with the seal.

        Raises:
            BlobRejected: When it is not what was sealed, or not all was read.
        """
        if self.left_bytes:
            raise BlobRejected(f"{self.left_bytes:,} bytes too many follow", reason="corrupt")
        self._check.finish()


class Shelf:
    """Reads and writes the files of states below a directory. From any thread.

    Args:
        root: The directory.
        files: The file system.
        secret: Seals what is written; what was sealed otherwise is refused.
        pool_bytes: Idle memory to read into, at most.
    """

    def __init__(
        self, root: Path, files: Files, secret: str | bytes | None, pool_bytes: int
    ) -> None:
        self.root = root
        self.files = files
        self.pool = BufferPool(pool_bytes)
        self.key = seal_key(secret)
        self._flushed: set[str] = set()

    def path(self, name: bytes) -> Path:
        """Return where the file of a state is."""
        text = name.hex()
        return self.root / BLOBS / text[:2] / (text + SUFFIX)

    def partial(self, ticket: str) -> Path:
        """Return where a file is while it is written."""
        return self.root / TEMPORARY / (ticket + PARTIAL)

    def free_bytes(self) -> int:
        """Return the room that is left on the file system."""
        return self.files.free_bytes(self.root)

    # -- reading -----------------------------------------------------------------------------------

    def read(self, name: bytes) -> tuple[Envelope, Buffer]:
        """Return a state, verified and read-only, and what its header says.

        Costs a read and a hash of it; the memory is used again when nobody looks at it any more.

        Raises:
            FileRejected: When it is not what was stored there.
            OSError: When it cannot be read, or is not there.
        """
        return self._read(name, payload=True)

    def peek(self, name: bytes, *, anyone: bool = False) -> Envelope:
        """Return what the header of a state says, if the file's size and name agree with it.

        Raises:
            FileRejected: When they do not, or when it was sealed otherwise, unless by `anyone`.
            OSError: When it cannot be read, or is not there.
        """
        return self._read(name, payload=False, anyone=anyone)[0]

    def stat(self, name: bytes) -> os.stat_result | None:
        """Return what is under the name of a state, a link itself if it is one."""
        return self.files.stat(self.path(name))

    def parse(self, name: bytes, parse: Callable[[Payload], T]) -> T:
        """Return what `parse` makes of a state's payload, which it reads piece by piece.

        Nothing of it is true before this returns.

        Raises:
            FileRejected: When it is not what was stored there, or `parse` raises `BlobRejected`.
            OSError: When it cannot be read, or is not there.
        """
        with self._opened(name) as (file, envelope, _):
            payload = Payload(file, envelope, self.key)
            made = parse(payload)
            payload.finish()
            return made

    def _read(self, name: bytes, *, payload: bool, anyone: bool = False) -> tuple[Envelope, Buffer]:
        with self._opened(name, anyone=anyone) as (file, envelope, rest):
            if not payload:
                return envelope, _NOTHING
            data = self.pool.take(envelope.payload_bytes)
            read_payload(file, rest, data)
            verify(envelope, data, self.key)
            return envelope, frozen(data)

    @contextmanager
    def _opened(
        self, name: bytes, *, anyone: bool = False
    ) -> Iterator[tuple[io.FileIO, Envelope, bytes]]:
        """Lend the file of a state, what its header says, and what was read of the payload."""
        try:
            file, info = self.files.open(self.path(name))
        except BlobRejected as error:
            raise FileRejected(error, None) from None
        try:
            with file:
                envelope, rest = read_header(file)
                check_size(info.st_size, envelope)
                if envelope.name != name:
                    raise BlobRejected("is of another name", reason="name")
                if not anyone:
                    check_secret(envelope, self.key)
                yield file, envelope, rest
        except BlobRejected as error:
            raise FileRejected(error, (info.st_dev, info.st_ino)) from None

    def listing(self) -> Iterator[tuple[Path, bytes | None]]:
        """Yield every file below the directory of states, with the name it has.

        The name is None for what has no business there: other files, links, and directories.
        """
        blobs = self.root / BLOBS
        for shard, is_directory in self.entries(blobs):
            if not is_directory or len(shard) != 2:
                yield blobs / shard, None
                continue
            for file, _ in self.entries(blobs / shard):
                name = _name_of(file)
                right = name is not None and file.startswith(shard)
                yield blobs / shard / file, name if right else None

    def leftovers(self) -> list[str]:
        """Return the tickets of the files that are being written, or were when it ended."""
        return [
            file.removesuffix(PARTIAL)
            for file, _ in self.entries(self.root / TEMPORARY)
            if file.endswith(PARTIAL)
        ]

    def strangers(self) -> Iterator[Path]:
        """Yield what has no business among the files that are being written."""
        for file, _ in self.entries(self.root / TEMPORARY):
            if not file.endswith((PARTIAL, UNREADY)):
                yield self.root / TEMPORARY / file

    def abandoned(self, now: float) -> Iterator[Path]:
        """Yield small files that somebody who is gone was writing.

        Nobody notes who writes them: those count as abandoned that are old.
        """
        yield from abandoned(self.root, now)
        for file, _ in self.entries(self.root / TEMPORARY):
            info = self.files.stat(self.root / TEMPORARY / file) if file.endswith(UNREADY) else None
            if info is not None and now - info.st_mtime > ABANDONED_SECONDS:
                yield self.root / TEMPORARY / file

    def entries(self, directory: Path) -> list[tuple[str, bool]]:
        """Return what is in a directory. See `Files.listing`.

        Raises:
            StoreError: When a link leads there.
            OSError: When it cannot be read.
        """
        try:
            return self.files.listing(directory)
        except BlobRejected as error:
            raise StoreError(f"{error}; a cache may not lead elsewhere") from None

    # -- writing -----------------------------------------------------------------------------------

    def write(self, ticket: str, name: bytes, payload: Buffer, place: Place | None) -> None:
        """Write a file under its temporary name and flush it. Costs a hash and a write.

        Raises:
            OSError: When that fails; what was written so far is there.
        """
        header = wrap(name, payload, place, self.key)
        with self.files.create(self.partial(ticket)) as file:
            self.files.write(file, memoryview(header))
            self.files.write(file, payload.data)
            self.files.flush(file)

    def publish(self, ticket: str, name: bytes) -> None:
        """Give a written file its final name; for good only after `flush`.

        Raises:
            OSError: When that fails.
            BlobRejected: When a link is in the way.
        """
        path = self.path(name)
        found = self.files.stat(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise BlobRejected(f"{path} is a link or no file", reason="symlink")
        try:
            self.files.rename(self.partial(ticket), path)
        except FileNotFoundError:
            self.files.make_directory(path.parent)
            self.files.rename(self.partial(ticket), path)

    def flush(self, name: bytes) -> None:
        """Return when the name of a state's file is on the device.

        Raises:
            OSError: When that fails.
        """
        shard = self.path(name).parent
        self.files.flush_directory(shard)
        if shard.name not in self._flushed:  # whoever made it may not have come to this
            self.files.flush_directory(shard.parent)
            self._flushed.add(shard.name)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file of the directory as a whole, in place of the one that is there.

        Raises:
            BlobRejected: When a link is in the way.
            OSError: When that fails.
        """
        replace(self.files, self.root, path, data)

    def discard(self, ticket: str) -> None:
        """Remove a file that is under its temporary name, if it is there."""
        # It may come from an index that somebody forged: it must not lead elsewhere.
        if _TICKET.fullmatch(ticket):
            self.files.unlink(self.partial(ticket))

    def drop(self, name: bytes) -> None:
        """Remove the file of a state, if it is there."""
        self.files.unlink(self.path(name))


def replace(files: Files, root: Path, path: Path, data: bytes) -> None:
    """Write a small file below `root` as a whole. See `Shelf.replace`."""
    partial = root / TEMPORARY / f"{path.name}-{secrets.token_hex(8)}{UNREADY}"
    try:
        with files.create(partial) as file:
            files.write(file, memoryview(data))
            files.flush(file)
        files.rename(partial, path)
    except BaseException:
        with suppress(OSError, BlobRejected):
            files.unlink(partial)
        raise
    files.flush_directory(path.parent)


def counted_bytes(n_payload: int, place: Place | None) -> int:
    """Return what a state's file counts for, the same wherever it is counted.

    That is what it occupies, in whole pages. Only a snapshot counts for its payload alone: how
    large a cache of snapshots may be is said in bytes of states, as it is of one in memory.
    """
    if place is not None and place.kind == "snapshot":
        return n_payload
    return on_disk(header_bytes(place) + n_payload)


_NOTHING: Buffer = frozen(np.empty(0, np.uint8))


def read_header(file: io.BufferedIOBase | io.RawIOBase) -> tuple[Envelope, bytes]:
    """Return what a header says, and what was read of the payload behind it.

    Raises:
        BlobRejected: When it is none.
    """
    head = file.read(_HEAD_BYTES) or b""
    n_header, _ = total_bytes(head)
    while len(head) < n_header:
        more = file.read(n_header - len(head))
        if not more:
            break
        head += more
    return parse(head[:n_header]), head[n_header:]


def check_size(size: int, envelope: Envelope) -> None:
    """Compare a file's size with what its header says.

    Raises:
        BlobRejected: When they differ.
    """
    expected = envelope.header_bytes + envelope.payload_bytes
    if size != expected:
        raise BlobRejected(
            f"has {size:,} of {expected:,} bytes",
            reason="truncated" if size < expected else "corrupt",
        )


def read_payload(file: io.BufferedIOBase | io.RawIOBase, head: bytes, data: Buffer) -> None:
    """Fill `data` with the payload that begins with `head` and goes on in the file.

    Raises:
        BlobRejected: When the file ends before.
    """
    view = data.data
    head = head[: len(view)]
    view[: len(head)] = head
    done = len(head)
    while done < len(view):
        n = file.readinto(view[done : done + _READ_BYTES])
        if not n:
            raise BlobRejected(f"ends after {done:,} of {len(view):,} bytes", reason="truncated")
        done += n


def _name_of(file_name: str) -> bytes | None:
    text, dot, suffix = file_name.partition(".")
    if dot + suffix != SUFFIX or len(text) != 2 * NAME_BYTES or text != text.lower():
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None
