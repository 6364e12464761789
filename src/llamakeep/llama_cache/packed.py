"""A snapshot as bytes: what `LlamaDiskCache` has as the payload of a file.

::

    0    version of this form (u32)
    4    bytes of the head (u32)
    8    the head: JSON, a list of [attribute, what it is, ...]
    ...  raw bytes and arrays, in the order of the head

What an attribute is: ``plain`` with its value; ``raw`` with its size; ``array`` with type, shape
and, if it was cut, the full length; ``zeros`` with type and number of columns. All numbers are
little-endian. The file around it says which tokens the state is of, and carries a checksum of all
this (see `stores.envelope`). Nothing here names a class or a function, and nothing is ever run.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from llamakeep.errors import BlobRejected
from llamakeep.llama_cache.snapshots import Array, Snapshot, Zeros
from llamakeep.states import Buffer
from llamakeep.tally import Refused

VERSION = 1

_FIXED = struct.Struct("<II")
_TYPES = {
    name: np.dtype(name)
    for name in ("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
}
_MAX_HEAD_BYTES = 1 << 20
_MAX_DIMENSIONS = 8
_MAX_MADE_UP = 1 << 26  # items that are not in the file


class Packed:
    """The bytes of a snapshot: counted before they are put together.

    Args:
        snapshot: The snapshot.

    Attributes:
        n_bytes: How many there are.

    Raises:
        Refused: When something in it is neither number, text, bytes nor an array of numbers.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        fields: list[list[Any]] = []
        self._pieces: list[memoryview] = []
        for name in snapshot.other:
            raise Refused(
                "unsupported",
                f"{name or 'a state'} of type {type(snapshot.other[name]).__name__} has no plain "
                "form, so it is not written to disk",
            )
        for name in (*snapshot.plain, *snapshot.raw, *snapshot.arrays, *snapshot.zeros):
            if not _is_attribute(name):
                raise Refused("unsupported", f"no file can say that an attribute is {name!r:.60}")
        for name, value in snapshot.plain.items():
            fields.append([name, "plain", value])
        for name, data in snapshot.raw.items():
            fields.append([name, "raw", len(data)])
            self._pieces.append(memoryview(data))
        for name, array in snapshot.arrays.items():
            plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            field = [name, "array", _type_of(name, array), list(array.shape)]
            full = snapshot.full_length.get(name)
            fields.append(field if full is None else [*field, full])
            self._pieces.append(plain.reshape(-1).view(np.uint8).data)
        for name, zeros in snapshot.zeros.items():
            fields.append([name, "zeros", _type_of(name, zeros), zeros.n_columns])
        try:
            head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        except ValueError as error:
            raise Refused("unsupported", f"a state has no plain form: {error}") from None
        if len(head) > _MAX_HEAD_BYTES:
            raise Refused("unsupported", f"what describes a state has {len(head):,} bytes")
        self._pieces.insert(0, memoryview(_FIXED.pack(VERSION, len(head)) + head))
        self.n_bytes = sum(piece.nbytes for piece in self._pieces)

    def bytes(self) -> Buffer:
        """Return all of them. Costs a copy."""
        data = np.empty(self.n_bytes, np.uint8)
        at = 0
        for piece in self._pieces:
            data[at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
            at += piece.nbytes
        return data


def _is_attribute(name: str) -> bool:
    # One with a meaning to Python could be code.
    return name.isidentifier() and not name.startswith("__")


def _type_of(name: str, array: Array | Zeros) -> str:
    kind = str(array.dtype.newbyteorder("<").str).replace("|", "<")
    if kind not in _TYPES:
        raise Refused("unsupported", f"{name} is of type {array.dtype}, which has no plain form")
    return kind


def unpack(read: Callable[[int], bytes], n_bytes: int, make: type) -> Snapshot:
    """Return the snapshot that was packed.

    Args:
        read: Returns the next so many bytes.
        n_bytes: How many there are in all: what the snapshot counts for.
        make: Class of the state.

    Raises:
        BlobRejected: When they are something else, or of another version.
    """
    version, n_head = _FIXED.unpack(read(_FIXED.size))
    if version != VERSION:
        raise BlobRejected(f"has state version {version}, not {VERSION}", reason="version")
    if n_head > _MAX_HEAD_BYTES:
        raise BlobRejected(f"claims a head of {n_head:,} bytes", reason="corrupt")
    reading = _Reading(read)
    try:
        for name, what, *said in json.loads(read(n_head)):
            reading.field(name, what, *said)
    except (ValueError, TypeError, RecursionError) as error:
        raise BlobRejected(f"is no state: {error!r:.200}", reason="corrupt") from None
    return Snapshot(
        make,
        n_bytes,
        reading.plain,
        reading.raw,
        reading.arrays,
        reading.full_length,
        reading.zeros,
    )


class _Reading:
    """The attributes of a snapshot, as they are read. Raises ValueError or TypeError for nonsense.

    Args:
        read: Returns the next so many bytes.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.plain: dict[str, int | float | str | None] = {}
        self.raw: dict[str, bytes] = {}
        self.arrays: dict[str, Array] = {}
        self.full_length: dict[str, int] = {}
        self.zeros: dict[str, Zeros] = {}

    def field(self, name: object, what: str, *said: Any) -> None:
        """Read one attribute."""
        if not isinstance(name, str) or not _is_attribute(name):
            raise ValueError(f"no attribute is called {name!r:.60}")
        if what == "plain":
            self._read_plain(name, *said)
        elif what == "raw":
            self.raw[name] = self._read(_count(*said))
        elif what == "array":
            self._read_array(name, *said)
        elif what == "zeros":
            self._read_zeros(name, *said)
        else:
            raise ValueError(f"{what!r:.60} is unknown")

    def _read_plain(self, name: str, value: object) -> None:
        if value is not None and not isinstance(value, (int, float, str)):
            raise ValueError(f"{name} is no plain value")
        self.plain[name] = value

    def _read_array(self, name: str, kind: str, shape: list[int], full: int | None = None) -> None:
        if len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {len(shape)} dimensions")
        n_items = math.prod(map(_count, shape))
        data = self._read(n_items * _dtype(kind).itemsize)
        array = np.frombuffer(data, _dtype(kind)).reshape(shape)
        self.arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        if full is not None:
            if len(shape) != 1 or not shape[0] <= _count(full) <= _MAX_MADE_UP:
                raise ValueError(f"{name} of shape {shape!r:.60} was not cut from {full}")
            self.full_length[name] = full

    def _read_zeros(self, name: str, kind: str, n_columns: int) -> None:
        if _count(n_columns) > _MAX_MADE_UP:
            raise ValueError(f"{name} claims {n_columns} columns")
        self.zeros[name] = Zeros(n_columns, _dtype(kind).newbyteorder("="))


def _dtype(kind: str) -> np.dtype[Any]:
    if kind not in _TYPES:
        raise ValueError(f"{kind!r:.60} is no type of numbers")
    return _TYPES[kind]


def _count(n: object) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 1 << 48:
        raise ValueError(f"{n!r:.60} is no count")
    return n
