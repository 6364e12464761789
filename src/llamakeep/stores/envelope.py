"""The form in which a state leaves this process: on disk, in a shared tier, in an export.

::

    0    magic "llmkeep" and a zero byte       64   namespace (32 bytes)
    8    format version (u16)                  96   block name (32 bytes)
    10   flags (u16): 1 sealed with a secret   128  origin of the block (u64)
    12   header bytes, seal included (u32)     136  start of the span (u64)
    16   payload bytes (u64)                   144  the block's tokens up to the end (i32 each)
    24   name (32 bytes)                       ...  seal (32 bytes)
    56   kind (u8), closes (u8), key (6 bytes) then the payload

How many tokens there are follows from the header's size.

The seal is BLAKE3 over the header before it and the payload, keyed when there is a secret. `key`
tells secrets apart (0 without one), so that what another secret sealed is not taken for corrupt
and removed: two secrets share one with a chance of 1 in 2**48. So what has our `key` but another
seal is corrupt.
All numbers are little-endian. A blob without a place has kind 0, no tokens, and zeros for the rest.
A header says all that an index needs, so an index can be made again from what it is of.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from llamakeep.errors import BlobRejected
from llamakeep.states import Buffer
from llamakeep.tokens import NAME_BYTES, Kind, Place

MAGIC = b"llmkeep\0"
VERSION = 1
SEAL_BYTES = 32
FIXED_BYTES = 144
MIN_HEADER_BYTES = FIXED_BYTES + SEAL_BYTES
"""Bytes of the header of a blob without a place; with one there are 4 more for each token."""
MAX_TOKENS = 1 << 20
"""No block has more tokens, and no snapshot."""
MAX_HEADER_BYTES = MIN_HEADER_BYTES + 4 * MAX_TOKENS

_FIXED = struct.Struct("<8sHHIQ32sBB6s32s32sQQ")
_MAX_POSITION = 1 << 62
_SEALED = 1
_KINDS: tuple[Kind | None, ...] = (None, "segment", "checkpoint", "snapshot")
_NOWHERE = bytes(NAME_BYTES)
_KEY_ID_BYTES = 6


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """What a header says.

    Attributes:
        name: The blob's name.
        payload_bytes: Its size.
        place: Where the state belongs; None for an opaque blob.
        header: The header's bytes, without the seal.
        seal: The seal.
        sealed: It was made with a secret.
        key_id: Which secret; 0 for none.
    """

    name: bytes
    payload_bytes: int
    place: Place | None
    header: bytes
    seal: bytes
    sealed: bool
    key_id: int = 0

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return len(self.header) + SEAL_BYTES


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the first `FIXED_BYTES` of a header say. They prove nothing.

    Attributes:
        name: The blob's name.
        closes: The block of the state ends with it.
        block: Name of that block; zeros for an opaque blob.
        origin: Where the block starts.
        start: Where the state's span starts.
        header_bytes: Size of the header.
        payload_bytes: Size of the blob.
    """

    name: bytes
    closes: bool
    block: bytes
    origin: int
    start: int
    header_bytes: int
    payload_bytes: int


def seal_key(secret: str | bytes | None) -> bytes | None:
    """Return the key that a secret gives, or None without one. An empty secret is none."""
    if not secret:
        return None
    material = secret.encode() if isinstance(secret, str) else secret
    return blake3(material, derive_key_context="llamakeep 2026 seal of kept states").digest()


def seal_id(secret: str | bytes | None) -> str:
    """Return what tells secrets apart without telling them; empty without one."""
    key = seal_key(secret)
    return blake3(key, derive_key_context="llamakeep 2026 which secret").hexdigest(8) if key else ""


def header_bytes(place: Place | None) -> int:
    """Return the bytes of the header of a state at `place`."""
    return MIN_HEADER_BYTES + (4 * int(place.tokens.size) if place is not None else 0)


def wrap(name: bytes, payload: Buffer, place: Place | None, key: bytes | None) -> bytes:
    """Return the header for a blob. Costs one hash of the payload.

    Args:
        name: The blob's name, 32 bytes.
        payload: The blob.
        place: Where the state belongs, or None.
        key: From `seal_key`.
    """
    header = _FIXED.pack(
        MAGIC,
        VERSION,
        _SEALED if key else 0,
        header_bytes(place),
        payload.nbytes,
        name,
        _KINDS.index(place.kind if place is not None else None),
        place is not None and place.closes,
        _key_id(key).to_bytes(_KEY_ID_BYTES, "little"),
        place.namespace if place is not None else _NOWHERE,
        place.block if place is not None else _NOWHERE,
        place.origin if place is not None else 0,
        place.start if place is not None else 0,
    )
    if place is not None:
        header += place.tokens.astype("<i4", copy=False).tobytes()
    return header + _seal(header, payload, key)


def total_bytes(fixed: bytes) -> tuple[int, int]:
    """Return the header's and the payload's bytes, from the first `FIXED_BYTES` of an envelope.

    Raises:
        BlobRejected: When they are not the beginning of an envelope.
    """
    if len(fixed) < FIXED_BYTES:
        raise BlobRejected(f"{len(fixed)} bytes are no envelope", reason="truncated")
    magic, version, _, n_header, n_payload, *_ = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise BlobRejected(f"begins with {magic!r}, not {MAGIC!r}", reason="foreign")
    if version != VERSION:
        raise BlobRejected(f"has format version {version}, not {VERSION}", reason="version")
    if not MIN_HEADER_BYTES <= n_header <= MAX_HEADER_BYTES:
        raise BlobRejected(f"claims a header of {n_header:,} bytes", reason="corrupt")
    return n_header, n_payload


def begins(fixed: bytes) -> Beginning:
    """Return what the first `FIXED_BYTES` of an envelope say.

    Raises:
        BlobRejected: When they are not the beginning of an envelope.
    """
    n_header, n_payload = total_bytes(fixed)
    *_, name, _, closes, _, _, block, origin, start = _FIXED.unpack_from(fixed)
    return Beginning(name, bool(closes), block, origin, start, n_header, n_payload)


def parse(header: bytes) -> Envelope:
    """Return what a whole header says. The seal is not compared: see `verify`.

    Raises:
        BlobRejected: When it contradicts itself; `reason` says in a word why.
    """
    n_header, n_payload = total_bytes(header[:FIXED_BYTES])
    if len(header) != n_header:
        raise BlobRejected(f"header has {len(header):,} of {n_header:,} bytes", reason="truncated")
    _, _, flags, _, _, name, kind, closes, key_id, namespace, block, origin, start = (
        _FIXED.unpack_from(header)
    )
    body, seal = header[:-SEAL_BYTES], header[-SEAL_BYTES:]
    n_tokens, rest = divmod(n_header - MIN_HEADER_BYTES, 4)
    if rest or kind >= len(_KINDS) or (n_tokens > 0) != (kind > 0):
        raise BlobRejected(
            f"header of {n_header:,} bytes claims kind {kind}, {n_tokens:,} tokens",
            reason="corrupt",
        )
    place = None
    which = _KINDS[kind]
    if which is not None:
        tokens = np.frombuffer(body, "<i4", n_tokens, FIXED_BYTES).astype(np.int32, copy=False)
        place = Place(which, namespace, block, origin, start, tokens, bool(closes))
        if not origin <= start < place.end <= _MAX_POSITION:
            raise BlobRejected(
                f"claims tokens {start} to {place.end} of a block at {origin}", reason="corrupt"
            )
        if place.name != name:
            raise BlobRejected("its name is not that of its tokens", reason="name")
    secret = int.from_bytes(key_id, "little")
    return Envelope(name, n_payload, place, body, seal, bool(flags & _SEALED), secret)


def check_secret(envelope: Envelope, key: bytes | None) -> None:
    """Compare whose envelope it is, before its payload is read.

    Raises:
        BlobRejected: When there is no secret to tell, or another one, or when there is one and the
            blob was made without.
    """
    if envelope.sealed == bool(key) and envelope.key_id == _key_id(key):
        return
    if not envelope.sealed:
        problem = "was made without the secret"
    elif key:
        problem = "was sealed with another secret"
    else:
        problem = "was sealed with a secret, and none is given"
    raise BlobRejected(problem, reason="secret")


def verify(envelope: Envelope, payload: Buffer, key: bytes | None) -> None:
    """Compare the seal. Costs one hash of the payload.

    Raises:
        BlobRejected: When header or payload are not what was sealed, or were not with this secret.
    """
    if payload.nbytes != envelope.payload_bytes:
        raise BlobRejected(
            f"payload has {payload.nbytes:,} of {envelope.payload_bytes:,} bytes",
            reason="truncated",
        )
    check_secret(envelope, key)
    if not hmac.compare_digest(_seal(envelope.header, payload, key), envelope.seal):
        raise BlobRejected("is not what was sealed", reason="corrupt")


class SealCheck:
    """Compares a seal piece by piece, for a payload that is read that way.

    Args:
        envelope: What the header says.
        key: From `seal_key`.
    """

    def __init__(self, envelope: Envelope, key: bytes | None) -> None:
        self._seal = envelope.seal
        self._hasher = blake3(envelope.header, key=key) if key else blake3(envelope.header)

    def update(self, piece: bytes) -> None:
        """Add the next piece of the payload."""
        self._hasher.update(piece)

    def finish(self) -> None:
        """Compare.

        Raises:
            BlobRejected: When header or payload are not what was sealed.
        """
        if not hmac.compare_digest(self._hasher.digest(), self._seal):
            raise BlobRejected("is not what was sealed", reason="corrupt")


def _key_id(key: bytes | None) -> int:
    return int.from_bytes(blake3(key).digest(_KEY_ID_BYTES), "little") if key else 0


def _seal(header: bytes, payload: Buffer, key: bytes | None) -> bytes:
    hasher = blake3(header, key=key) if key else blake3(header)
    return hasher.update(payload.data).digest()
