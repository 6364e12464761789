"""A slot in a file: its tokens and the whole state of its sequence, sealed as every state is.

The payload of the envelope (see `stores/envelope.py`; its place is a snapshot of all tokens) is::

    number of segments (u32), bytes of the checkpoint (u64, 0 for none)
    for each segment: start (u64), end (u64), bytes (u64)
    the segments, then the checkpoint

All numbers are little-endian.
"""

from __future__ import annotations

import io
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamakeep.errors import BlobRejected, StoreError
from llamakeep.states import Buffer, Checkpoint, Segment, frozen
from llamakeep.stores import envelope
from llamakeep.stores.disk.files import Files
from llamakeep.tokens import IntArray, snapshot_name, snapshot_place
from llamakeep.wholes import Whole

_HEAD = struct.Struct("<IQ")
_SPAN = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file that was written or read.

    Attributes:
        n_tokens: Tokens of the slot.
        n_bytes: Bytes of the file.
        ms: Milliseconds that it took, the state's way from or to the context not included.
    """

    n_tokens: int
    n_bytes: int
    ms: float


def write_slot_file(
    path: Path,
    tokens: IntArray,
    whole: Whole,
    namespace: bytes,
    *,
    key: bytes | None = None,
    files: Files | None = None,
) -> SlotFile:
    """Write a slot to a file that only its owner can read; it is there whole or not at all.

    Args:
        path: The file; one that is there is replaced, a link is not followed.
        tokens: What the slot holds.
        whole: Its state.
        namespace: What makes it incompatible with others, 32 bytes.
        key: Seals it, see `envelope.seal_key`.
        files: The file system.

    Raises:
        StoreError: When it cannot be written, with the reason; what was there is unchanged.
    """
    begin, files = time.perf_counter(), files or Files()
    payload = _pack(whole)
    place = snapshot_place(namespace, tokens)
    header = envelope.wrap(place.name, payload, place, key)
    draft = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        files.make_directory(path.parent)
        file = files.create(draft)
        try:
            with file:
                files.write(file, memoryview(header))
                files.write(file, payload.data)
                files.flush(file)
            files.rename(draft, path)
            files.flush_directory(path.parent)
        except BaseException:
            files.unlink(draft)
            raise
    except OSError as error:
        raise StoreError(f"{path.name} cannot be written: {error.strerror or error}") from error
    ms = (time.perf_counter() - begin) * 1e3
    return SlotFile(int(tokens.size), len(header) + payload.nbytes, ms)


def read_slot_file(
    path: Path, namespace: bytes, *, key: bytes | None = None, files: Files | None = None
) -> tuple[SlotFile, IntArray, Whole]:
    """Read a slot's tokens and state.

    Args:
        path: The file; a link is not followed.
        namespace: What its states must be compatible with.
        key: Of `write_slot_file`.
        files: The file system.

    Raises:
        BlobRejected: For a file that is no slot's, of another version, damaged, not sealed with
            this key, or of another model, settings or tenant. Nothing of it was used.
        StoreError: When there is none, or it cannot be read.
    """
    begin, files = time.perf_counter(), files or Files()
    try:
        file, info = files.open(path)
        with file:
            head = _exactly(file, envelope.FIXED_BYTES)
            n_header, n_payload = envelope.total_bytes(head)
            if n_header + n_payload != info.st_size:
                raise BlobRejected(
                    f"{path.name} has {info.st_size:,} bytes, not the {n_header + n_payload:,} "
                    "that it speaks of",
                    reason="truncated",
                )
            found = envelope.parse(head + _exactly(file, n_header - len(head)))
            payload = np.frombuffer(_exactly(file, n_payload), np.uint8)
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from error
    place = found.place
    if place is None or place.kind != "snapshot" or place.origin or place.start:
        raise BlobRejected(f"{path.name} is no file of a slot", reason="foreign")
    envelope.verify(found, payload, key)
    if place.name != snapshot_name(namespace, place.tokens):
        raise BlobRejected(
            f"{path.name} is of another model, other settings, or another tenant", reason="foreign"
        )
    whole = _unpack(payload, int(place.tokens.size), path.name)
    ms = (time.perf_counter() - begin) * 1e3
    return SlotFile(int(place.tokens.size), info.st_size, ms), place.tokens, whole


def _pack(whole: Whole) -> Buffer:
    rolling = whole.checkpoint.data if whole.checkpoint is not None else np.empty(0, np.uint8)
    head = io.BytesIO()
    head.write(_HEAD.pack(len(whole.segments), rolling.nbytes))
    for segment in whole.segments:
        head.write(_SPAN.pack(segment.start, segment.end, segment.data.nbytes))
    spans = np.frombuffer(head.getvalue(), np.uint8)
    return np.concatenate([spans, *(segment.data for segment in whole.segments), rolling])


def _unpack(payload: Buffer, n_tokens: int, name: str) -> Whole:
    if payload.nbytes < _HEAD.size:
        raise BlobRejected(f"{name} has {payload.nbytes} bytes of state", reason="corrupt")
    n_segments, n_rolling = _HEAD.unpack_from(payload.data)
    at = _HEAD.size + n_segments * _SPAN.size
    if n_segments > n_tokens or at > payload.nbytes:
        raise BlobRejected(f"{name} speaks of {n_segments:,} segments", reason="corrupt")
    heads = range(_HEAD.size, at, _SPAN.size)
    spans = [_SPAN.unpack_from(payload.data, head) for head in heads]
    if at + sum(n_bytes for _, _, n_bytes in spans) + n_rolling != payload.nbytes:
        raise BlobRejected(f"{name} has parts of other sizes than it says", reason="corrupt")
    segments = []
    for start, end, n_bytes in spans:
        segments.append(Segment(start, end, frozen(payload[at : at + n_bytes])))
        at += n_bytes
    checkpoint = Checkpoint(n_tokens, frozen(payload[at:])) if n_rolling else None
    return Whole(n_tokens, tuple(segments), checkpoint)


def _exactly(file: io.FileIO, n_bytes: int) -> bytes:
    """Read so many bytes.

    Raises:
        BlobRejected: When the file ends before.
    """
    parts, left = [], n_bytes
    while left:
        part = file.read(min(left, 1 << 24))
        if not part:
            raise BlobRejected(f"ends {left:,} bytes too early", reason="truncated")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
