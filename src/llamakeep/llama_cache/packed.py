"""A snapshot as bytes: what `LlamaDiskCache` has as the payload of a file.

::

    0    version of this form (u32)
    4    bytes of the head (u32)
    8    the head: JSON, a list of [attribute, what it is, ...]
    ...  raw bytes and arrays, in the order of the head

What an attribute is: ``plain`` with its value; ``raw`` with its size; ``array`` with type, shape
and, for ids, the length that they had; ``zeros`` with type and number of columns; in this order.
All numbers are little-endian. The file around it says which tokens the state is of, and carries a
checksum of all this (see `stores.envelope`). Nothing here names a class or a function, and nothing
is ever run.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable

import numpy as np

from llamakeep.errors import BlobRejected
from llamakeep.llama_cache.snapshots import (
    TYPES,
    Array,
    Dense,
    Ids,
    Part,
    Plain,
    Raw,
    Snapshot,
    Zeros,
)
from llamakeep.states import Buffer
from llamakeep.tally import Refused

VERSION = 1

_FIXED = struct.Struct("<II")
_ORDER = ("plain", "raw", "array", "zeros")
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
        forms = [(name, *part.form(name)) for name, part in snapshot.parts.items()]
        forms.sort(key=lambda form: _ORDER.index(form[1][0]))
        for name, _, _ in forms:
            if not _is_attribute(name):
                raise Refused("unsupported", f"no file can say that an attribute is {name!r:.60}")
        fields = [[name, *said] for name, said, _ in forms]
        try:
            head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        except ValueError as error:
            raise Refused("unsupported", f"a state has no plain form: {error}") from None
        if len(head) > _MAX_HEAD_BYTES:
            raise Refused("unsupported", f"what describes a state has {len(head):,} bytes")
        self._pieces = [_FIXED.pack(VERSION, len(head)), head, *(data for _, _, data in forms)]
        self.n_bytes = sum(map(len, self._pieces))

    def bytes(self) -> Buffer:
        """Return all of them. Costs a copy."""
        return np.concatenate([np.frombuffer(piece, np.uint8) for piece in self._pieces])


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
    try:
        parts = dict(_part(field, read) for field in json.loads(read(n_head)))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise BlobRejected(f"is no state: {error!r:.200}", reason="corrupt") from None
    return Snapshot(make, n_bytes, parts)


def _part(field: object, read: Callable[[int], bytes]) -> tuple[str, Part]:
    """Return an attribute and its name. Raises ValueError or LookupError for nonsense."""
    match field:
        case [str(name), *_] if not _is_attribute(name):
            raise ValueError(f"no attribute is called {name!r:.60}")
        case [str(name), "plain", None | int() | float() | str() as value]:
            return name, Plain(value)
        case [str(name), "raw", n_bytes]:
            return name, Raw(read(_count(n_bytes)))
        case [str(name), "array", str(kind), [n_tokens], n_ids]:
            ids = _array(kind, [n_tokens], read)
            return name, Ids(ids, _count(n_ids, len(ids), _MAX_MADE_UP))
        case [str(name), "array", str(kind), list(shape)] if len(shape) <= _MAX_DIMENSIONS:
            return name, Dense(_array(kind, shape, read))
        case [str(name), "zeros", str(kind), n_columns]:
            return name, Zeros(TYPES[kind].newbyteorder("="), _count(n_columns, 0, _MAX_MADE_UP))
    raise ValueError(f"{field!r:.60} is no attribute")


def _array(kind: str, shape: list[object], read: Callable[[int], bytes]) -> Array:
    dtype, counts = TYPES[kind], [_count(each) for each in shape]
    array = np.frombuffer(read(math.prod(counts) * dtype.itemsize), dtype).reshape(counts)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _count(n: object, least: int = 0, most: int = 1 << 48) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not least <= n <= most:
        raise ValueError(f"{n!r:.60} is no count from {least} to {most}")
    return n


def _is_attribute(name: str) -> bool:
    # One with a meaning to Python could be code.
    return name.isidentifier() and not name.startswith("__")
