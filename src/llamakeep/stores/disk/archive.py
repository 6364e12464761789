"""States of a directory in one file, to take them elsewhere.

::

    0    magic "llmkeepx"                      12   bytes of the description (u32)
    8    format version (u16)                  16   number of states (u64)
    10   zero (u16)                            24   BLAKE3 of what is before it and after (32 bytes)
    56   the description, JSON: {"namespaces": {hex digest: description}}
    ...  the states, each an envelope (see `envelope.py`), what hangs off another behind it

Envelopes are sealed as they were where they came from, so that only who knows the secret can
import them. The hash of the description is keyed likewise.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from blake3 import blake3

from llamakeep.errors import BlobRejected, StoreError
from llamakeep.states import Buffer
from llamakeep.stores.base import Tier
from llamakeep.stores.descriptions import parse_description
from llamakeep.stores.disk.pool import BufferPool
from llamakeep.stores.disk.shelf import FileRejected, Shelf, read_header, read_payload
from llamakeep.stores.envelope import Envelope, verify
from llamakeep.tokens import NAME_BYTES

logger = logging.getLogger("llamakeep")

MAGIC = b"llmkeepx"
VERSION = 1

_HEAD = struct.Struct("<8sHHIQ")
_DIGEST_BYTES = 32
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}")
_MAX_DESCRIPTION_BYTES = 1 << 26

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many steps are done, and of how many."""
Target: TypeAlias = "str | os.PathLike[str] | io.BufferedIOBase | io.RawIOBase"
"""A path, or a binary file that can be positioned."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did.

    Attributes:
        n_states: States in the file.
        n_kept: How many of them the store has at the end: others did not fit, or had to go for
            those that came after them.
    """

    n_states: int
    n_kept: int


# -- writing -------------------------------------------------------------------------------------


def export(
    shelf: Shelf,
    names: Iterable[bytes],
    namespaces: Mapping[bytes, Mapping[str, Any]],
    target: Target,
    key: bytes | None,
    progress: Progress | None = None,
) -> int:
    """Write states into one file that only its owner can read. Each is verified before.

    Args:
        shelf: Where the states are.
        names: Which ones, what hangs off another behind it. One that is gone by now, or is not
            what was put, is left out and logged.
        namespaces: Descriptions to write with them.
        target: The file; replaced when all is written.
        key: Of the secret that the states are sealed with.
        progress: Called after each state.

    Returns:
        How many were written.

    Raises:
        BlobRejected: When not one could be read, and some because of the secret; no file is made.
        StoreError: When not one could be read, for another reason; no file is made.
        OSError: When the file cannot be written.
    """
    chosen = list(names)
    known = {digest.hex(): dict(parts) for digest, parts in namespaces.items()}
    text = json.dumps({"namespaces": known}, sort_keys=True).encode()
    n_written = 0
    left_out: Counter[str] = Counter()
    with _writing(target) as file:
        begin = file.tell()
        file.write(_head(0, text, key))
        for done, name in enumerate(chosen, 1):
            try:
                envelope, payload = shelf.read(name)
            except FileNotFoundError:
                left_out["missing"] += 1
            except FileRejected as error:
                left_out[error.reason] += 1
            else:
                _write_all(file, memoryview(envelope.header + envelope.seal))
                _write_all(file, payload.data)
                n_written += 1
                del payload
            if progress is not None:
                progress(done, len(chosen))
        if left_out and not n_written:
            raise _nothing_read(left_out)
        end = file.tell()
        file.seek(begin)
        file.write(_head(n_written, text, key))
        file.seek(end)
    if left_out:
        logger.warning("an export lacks states that could not be read: %s", _reasons(left_out))
    return n_written


def _nothing_read(left_out: Counter[str]) -> BlobRejected | StoreError:
    text = f"not one of {left_out.total():,} states could be read: {_reasons(left_out)}"
    return BlobRejected(text, reason="secret") if left_out["secret"] else StoreError(text)


def _reasons(left_out: Counter[str]) -> str:
    return ", ".join(
        f"{n:,} sealed with another secret, or with none (see LLAMAKEEP_SECRET)"
        if reason == "secret"
        else f"{n:,} {reason}"
        for reason, n in sorted(left_out.items())
    )


def _head(n_states: int, text: bytes, key: bytes | None) -> bytes:
    head = _HEAD.pack(MAGIC, VERSION, 0, len(text), n_states)
    return head + _digest(head, text, key) + text


def _digest(head: bytes, text: bytes, key: bytes | None) -> bytes:
    return (blake3(head, key=key) if key else blake3(head)).update(text).digest()


def _write_all(file: io.BufferedIOBase | io.RawIOBase, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done:]) or 0


@contextmanager
def _writing(target: Target) -> Iterator[io.BufferedIOBase | io.RawIOBase]:
    if isinstance(target, (io.BufferedIOBase, io.RawIOBase)):
        yield target
        return
    path = Path(target)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(unfinished, flags, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


# -- reading -------------------------------------------------------------------------------------


def import_(
    store: Tier, source: Target, key: bytes | None, progress: Progress | None = None
) -> Imported:
    """Put the states of a file into a store, after all of it was verified. Reads it twice.

    Args:
        store: Where they go; it may evict others for them.
        source: The file.
        key: Of the secret that the states must be sealed with.
        progress: Called after each state, both times.

    Raises:
        BlobRejected: When something in it is not what was exported; nothing is put then. The
            message says which state it is.
        OSError: When the file cannot be read.
    """
    with _reading(source) as file:
        archive = _Archive(file, key)
        n_states = archive.n_states
        steps = 2 * n_states
        for done, _ in enumerate(archive.states(), 1):
            if progress is not None:
                progress(done, steps)
        for digest, description in archive.namespaces.items():
            store.introduce(digest, description)
        came: list[bytes] = []
        for done, (envelope, payload) in enumerate(archive.states(), n_states + 1):
            give = partial(_same, payload)
            if store.put(envelope.name, payload.nbytes, give, envelope.place):
                came.append(envelope.name)
            del payload, give
            if progress is not None:
                progress(done, steps)
        n_kept = sum(name in store for name in came)  # those after them may have taken their room
    return Imported(n_states, n_kept)


def _same(data: Buffer) -> Buffer:
    return data


class _Archive:
    """An archive that is being read.

    Raises:
        BlobRejected: When it does not begin like one.
    """

    def __init__(self, file: io.BufferedIOBase | io.RawIOBase, key: bytes | None) -> None:
        self._file = file
        self._key = key
        self._pool = BufferPool(64 << 20)
        begin = file.tell()
        self._size = file.seek(0, os.SEEK_END)
        file.seek(begin)
        if self._size <= begin:
            raise BlobRejected("is empty", reason="truncated")
        head = self._exactly(_HEAD.size, "its head")
        magic, version, _, n_text, self.n_states = _HEAD.unpack(head)
        if magic != MAGIC:
            raise BlobRejected("is no archive of states", reason="foreign")
        if version != VERSION:
            raise BlobRejected(f"has version {version}, not {VERSION}", reason="version")
        if n_text > _MAX_DESCRIPTION_BYTES:
            raise BlobRejected("its head is corrupt", reason="corrupt")
        digest = self._exactly(_DIGEST_BYTES, "its head")
        text = self._exactly(n_text, "its description")
        if not hmac.compare_digest(_digest(head, text, key), digest):
            raise BlobRejected("its head is corrupt, or of another secret", reason="corrupt")
        self.namespaces = _namespaces(text)
        self._first = file.tell()

    def states(self) -> Iterator[tuple[Envelope, Buffer]]:
        """Yield each state, verified. The memory of one is used again for the next.

        Raises:
            BlobRejected: With which of them is not what was exported.
        """
        offset = self._first
        for number in range(1, self.n_states + 1):
            try:
                envelope, data = self._state(offset)
            except BlobRejected as error:
                raise BlobRejected(
                    f"state {number:,} of {self.n_states:,} {error}", reason=error.reason
                ) from None
            offset += envelope.header_bytes + envelope.payload_bytes
            yield envelope, data
            del data
        if offset != self._size:
            raise BlobRejected(
                f"goes on after its {self.n_states:,} states, for {self._size - offset:,} bytes",
                reason="corrupt",
            )

    def _state(self, offset: int) -> tuple[Envelope, Buffer]:
        self._file.seek(offset)
        envelope, _ = read_header(self._file)
        offset += envelope.header_bytes
        if offset + envelope.payload_bytes > self._size:
            raise BlobRejected("ends early", reason="truncated")
        self._file.seek(offset)
        data = self._pool.take(envelope.payload_bytes)
        read_payload(self._file, b"", data)
        verify(envelope, data, self._key)
        return envelope, data

    def _exactly(self, n_bytes: int, what: str) -> bytes:
        data = self._file.read(n_bytes) or b""
        if len(data) < n_bytes:
            raise BlobRejected(f"ends in {what}", reason="truncated")
        return data


def _namespaces(text: bytes) -> dict[bytes, dict[str, Any]]:
    found = (parse_description(text, max_bytes=_MAX_DESCRIPTION_BYTES) or {}).get("namespaces")
    known: dict[bytes, dict[str, Any]] = {}
    for digest, parts in found.items() if isinstance(found, dict) else ():
        if not isinstance(parts, dict) or not _DIGEST.fullmatch(digest):
            found = None
            break
        known[bytes.fromhex(digest)] = parts
    if not isinstance(found, dict):
        raise BlobRejected("its description is corrupt", reason="corrupt")
    return known


@contextmanager
def _reading(source: Target) -> Iterator[io.BufferedIOBase | io.RawIOBase]:
    if isinstance(source, (io.BufferedIOBase, io.RawIOBase)):
        if not source.seekable():
            raise StoreError("an archive is read twice, and this file cannot be")
        yield source
        return
    with Path(source).open("rb", buffering=0) as file:
        yield file
