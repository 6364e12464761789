"""A slot in a file: its tokens and the whole state of its sequence, sealed as every state is.

The payload of the envelope (see `stores/envelope.py`; its place is a snapshot of all tokens) is::

    number of segments (u32), number of checkpoints (u32)
    for each segment, then for each checkpoint: start (u64), end (u64), bytes (u64)
    the segments, then the checkpoints

A checkpoint starts and ends at its position; one at the end is part of the whole state, the others
are where prompts can go on that leave these tokens before. All numbers are little-endian.
"""

from __future__ import annotations

import io
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamakeep.errors import BlobRejected, InvalidValue, StoreError
from llamakeep.states import Buffer, Checkpoint, Segment, frozen
from llamakeep.stores import envelope
from llamakeep.stores.disk.files import Files
from llamakeep.tokens import IntArray, snapshot_name, snapshot_place
from llamakeep.wholes import Whole

_HEAD = struct.Struct("<II")
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


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """What a slot holds.

    Attributes:
        tokens: Its tokens.
        whole: The state of its sequence.
        checkpoints: Those before its end, in families that have any.
    """

    tokens: IntArray
    whole: Whole
    checkpoints: tuple[Checkpoint, ...] = ()


def write_slot_file(
    path: Path,
    content: SlotContent,
    namespace: bytes,
    *,
    key: bytes | None = None,
    files: Files | None = None,
) -> SlotFile:
    """Write a slot to a file that only its owner can read; it is there whole or not at all.

    Args:
        path: The file; one that is there is replaced, a link is not followed.
        content: What the slot holds.
        namespace: What makes it incompatible with others, 32 bytes.
        key: Seals it, see `envelope.seal_key`.
        files: The file system.

    Raises:
        InvalidValue: When there is a directory of that name.
        StoreError: When it cannot be written, with the reason; what was there is unchanged.
    """
    begin, files = time.perf_counter(), files or Files()
    payload = _pack(content)
    place = snapshot_place(namespace, content.tokens)
    header = envelope.wrap(place.name, payload, place, key)
    draft = path.with_name(f".slot-{secrets.token_hex(16)}")
    if path.is_dir() and not path.is_symlink():
        raise InvalidValue(f"{path.name} is a directory")
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
    return SlotFile(int(content.tokens.size), len(header) + payload.nbytes, ms)


def read_slot_file(
    path: Path, namespace: bytes, *, key: bytes | None = None, files: Files | None = None
) -> tuple[SlotFile, SlotContent]:
    """Read what a slot held.

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
    except IsADirectoryError:
        raise BlobRejected(f"{path.name} is a directory", reason="foreign") from None
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
    content = _unpack(payload, place.tokens, path.name)
    ms = (time.perf_counter() - begin) * 1e3
    return SlotFile(int(place.tokens.size), info.st_size, ms), content


def _pack(content: SlotContent) -> Buffer:
    whole = content.whole
    checkpoints = [*content.checkpoints, *([whole.checkpoint] if whole.checkpoint else [])]
    head = io.BytesIO()
    head.write(_HEAD.pack(len(whole.segments), len(checkpoints)))
    for segment in whole.segments:
        head.write(_SPAN.pack(segment.start, segment.end, segment.data.nbytes))
    for each in checkpoints:
        head.write(_SPAN.pack(each.position, each.position, each.data.nbytes))
    states = [*(segment.data for segment in whole.segments), *(each.data for each in checkpoints)]
    return np.concatenate([np.frombuffer(head.getvalue(), np.uint8), *states])


def _unpack(payload: Buffer, tokens: IntArray, name: str) -> SlotContent:
    if payload.nbytes < _HEAD.size:
        raise BlobRejected(f"{name} has {payload.nbytes} bytes of state", reason="corrupt")
    n_segments, n_checkpoints = _HEAD.unpack_from(payload.data)
    n_parts, n_tokens = n_segments + n_checkpoints, int(tokens.size)
    at = _HEAD.size + n_parts * _SPAN.size
    if at > payload.nbytes:
        raise BlobRejected(f"{name} speaks of {n_parts:,} states", reason="corrupt")
    spans = [_SPAN.unpack_from(payload.data, at) for at in range(_HEAD.size, at, _SPAN.size)]
    if at + sum(n_bytes for _, _, n_bytes in spans) != payload.nbytes:
        raise BlobRejected(f"{name} has parts of other sizes than it says", reason="corrupt")
    if any(not 0 <= start <= end <= n_tokens for start, end, _ in spans):
        raise BlobRejected(f"{name} has states beyond its {n_tokens} tokens", reason="corrupt")
    states = []
    for _, _, n_bytes in spans:
        states.append(frozen(payload[at : at + n_bytes]))
        at += n_bytes
    segments = tuple(
        Segment(start, end, data)
        for (start, end, _), data in zip(spans[:n_segments], states[:n_segments], strict=True)
    )
    checkpoints = [
        Checkpoint(position, data)
        for (position, _, _), data in zip(spans[n_segments:], states[n_segments:], strict=True)
    ]
    last = checkpoints.pop() if checkpoints and checkpoints[-1].position == n_tokens else None
    return SlotContent(tokens, Whole(n_tokens, segments, last), tuple(checkpoints))


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
