"""What tells one GGUF file from another: its header, and samples of its tensors' data.

llama.cpp loads the file; here it is only told apart from others, fast, and without trusting what
it claims. Values are stepped over, never built. A file is::

    "GGUF", u32 version, u64 n_tensors, u64 n_kv
    n_kv x (string key, u32 type, value)          a string is u64 n_bytes, bytes; an array is
                                                  u32 type, u64 n, n values
    n_tensors x (string name, u32 n_dims, n_dims x u64, u32 type, u64 offset)
    padding to a multiple of `general.alignment`, then the tensors' data

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's `gguf.cpp`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from llamakeep.errors import ModelError

_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_CHUNK_BYTES: Final = 1 << 20
_MOST_HEADER_BYTES: Final = 1 << 28
"""The largest headers, of models with 260,000 tokens and their merges, have some 16 MiB."""
_MOST_TENSORS: Final = 1 << 18
_MOST_DIMS: Final = 8
_MOST_NESTING: Final = 4

_INTEGERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
_VALUE_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING: Final = 8
_ARRAY: Final = 9
_LEAST_BYTES: Final = {_STRING: 8, _ARRAY: 12}
_ALIGNMENT: Final = "general.alignment"
_SPLIT_COUNT: Final = "split.count"

WHOLE_BYTES: Final = 1 << 26
"""Files up to this size are read whole."""
WINDOW_BYTES: Final = 4096
WINDOW_EVERY_BYTES: Final = 1 << 24

_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself.

    Attributes:
        file_bytes: Size of the file.
        n_bytes: Size of the header and its padding: the tensors' data starts here.
        n_parts: Files that the model is split into; 1 for a model in one file.
        tensors: Where each tensor's data starts in the file, by name.
    """

    file_bytes: int
    n_bytes: int
    n_parts: int
    tensors: Mapping[str, int]


class _Reader:
    """Steps through a header that is read as far as it is needed."""

    def __init__(self, file: BinaryIO, size: int, path: str | Path) -> None:
        self._file = file
        self._path = path
        self._limit = min(size, _MOST_HEADER_BYTES)
        self._buffer = bytearray()
        self._at = 0
        self._order = "<"

    def malformed(self, what: str) -> ModelError:
        return ModelError(
            f"{self._path} is not a GGUF file that can be read: {what} (at byte {self._at:,})"
        )

    def _fill(self, end: int) -> None:
        """Have the bytes before `end` in the buffer."""
        if end > self._limit:
            raise self.malformed(f"its header reaches {end:,}, past the end at {self._limit:,}")
        while len(self._buffer) < end:
            wanted = max(_CHUNK_BYTES, len(self._buffer), end - len(self._buffer))
            chunk = self._file.read(wanted)
            if not chunk:
                raise self.malformed(f"it ended at {len(self._buffer):,} while it was read")
            self._buffer += chunk

    def _claim(self, n: int, least_bytes: int, what: str) -> int:
        """Check that so many things have room in the file, before any of them is looked at."""
        if n * least_bytes > self._limit - self._at:
            raise self.malformed(f"it claims {n:,} {what}")
        return n

    def _skip(self, n_bytes: int) -> int:
        """Step over bytes; return where they began."""
        at = self._at
        self._fill(at + n_bytes)
        self._at = at + n_bytes
        return at

    def _number(self, kind: str) -> int:
        code = struct.Struct(self._order + kind)
        number: int = code.unpack_from(self._buffer, self._skip(code.size))[0]
        return number

    def _string(self) -> str:
        size = self._claim(self._number("Q"), 1, "bytes of text")
        at = self._skip(size)
        return self._buffer[at : at + size].decode("utf-8", "backslashreplace")

    def _skip_strings(self, n: int) -> None:
        # The vocabulary: hundreds of thousands of them, so this loop does as little as it can.
        at, unpack, buffer = self._at, struct.Struct(self._order + "Q").unpack_from, self._buffer
        filled = len(buffer)
        for _ in range(n):
            if at + 8 > filled:
                self._fill(at + 8)
                filled = len(buffer)
            at += 8 + unpack(buffer, at)[0]
        self._fill(at)
        self._at = at

    def _skip_array(self, depth: int) -> None:
        kind = self._number("I")
        least = _VALUE_BYTES.get(kind) or _LEAST_BYTES.get(kind)
        if least is None:
            raise self.malformed(f"an array has elements of unknown type {kind}")
        n = self._claim(self._number("Q"), least, "array elements")
        if kind == _STRING:
            self._skip_strings(n)
        elif kind == _ARRAY:
            if depth == _MOST_NESTING:
                raise self.malformed(f"arrays are nested more than {_MOST_NESTING} deep")
            for _ in range(n):
                self._skip_array(depth + 1)
        else:
            self._skip(n * least)

    def _value(self) -> int | None:
        """Step over a metadata value; return it if it is a whole number."""
        kind = self._number("I")
        if kind in _INTEGERS:
            return self._number(_INTEGERS[kind])
        if kind == _STRING:
            self._skip_strings(1)
        elif kind == _ARRAY:
            self._skip_array(1)
        elif kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        else:
            raise self.malformed(f"a value has unknown type {kind}")
        return None

    def _version(self) -> None:
        self._fill(min(4, self._limit))
        magic = bytes(self._buffer[:4])
        if magic != b"GGUF":
            raise self.malformed(f"it begins with {magic!r}")
        self._at = 4
        version = self._number("I")
        if not version & 0xFFFF:  # written on a machine of the other byte order
            self._order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise self.malformed(f"its version is {version}; known are 2 and 3")

    def _tensor(self) -> tuple[str, int]:
        name = self._string()
        n_dims = self._number("I")
        if n_dims > _MOST_DIMS:
            raise self.malformed(f"tensor {name[:64]!r} has {n_dims:,} dimensions")
        self._skip(8 * n_dims + 4)
        return name, self._number("Q")

    def header(self, size: int) -> Header:
        self._version()
        n_tensors = self._number("Q")
        n_kv = self._number("Q")
        wanted = {_ALIGNMENT: _DEFAULT_ALIGNMENT, _SPLIT_COUNT: 1}
        for _ in range(self._claim(n_kv, 13, "metadata values")):
            key, value = self._string(), self._value()
            if value is not None and key in wanted:
                wanted[key] = value
        alignment = wanted[_ALIGNMENT]
        if alignment < 1 or alignment & (alignment - 1):
            raise self.malformed(f"its alignment is {alignment}")
        if n_tensors > _MOST_TENSORS:
            raise self.malformed(f"it claims {n_tensors:,} tensors")
        tensors = dict(self._tensor() for _ in range(self._claim(n_tensors, 24, "tensors")))
        n_bytes = min(-(-self._at // alignment) * alignment, size)
        for name, offset in tensors.items():
            if n_bytes + offset > size:
                raise self.malformed(
                    f"tensor {name[:64]!r} starts at {n_bytes + offset:,} of {size:,} bytes"
                )
            tensors[name] = n_bytes + offset
        return Header(size, n_bytes, max(1, wanted[_SPLIT_COUNT]), tensors)


def read_header(file: BinaryIO, size: int, path: str | Path) -> Header:
    """Read the header of a GGUF file, version 2 or 3, either byte order.

    Costs a read of the header, and some 100 ns for each string in it. Memory and time are bounded
    by the file's size and by 256 MiB, whatever the file claims.

    Args:
        file: Opened for reading bytes, at its start.
        size: Of the file, in bytes.
        path: What to call it in messages.

    Raises:
        ModelError: For what is no such file, with the path and what is wrong where.
        OSError: When it cannot be read.
    """
    return _Reader(file, size, path).header(size)


def sampled_spans(header: Header) -> list[tuple[int, int]]:
    """Return which bytes [start, end) of a file stand for all of it, ascending and disjoint.

    A file up to 64 MiB stands for itself. Of a larger one: the header, and of each tensor 4 KiB at
    its start, middle and end, and at least every 16 MiB. So a tensor that is replaced as a whole
    shows; a few changed rows inside a large one may not.
    """
    size = header.file_bytes
    if size <= WHOLE_BYTES:
        return [(0, size)]
    spans = [(0, header.n_bytes)]
    starts = sorted({header.n_bytes, *header.tensors.values()})
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        room = max(0, end - start - WINDOW_BYTES)
        gaps = max(2, -(-room // WINDOW_EVERY_BYTES))
        for index in range(gaps + 1):
            at = start + room * index // gaps
            if at <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], min(end, at + WINDOW_BYTES)))
            else:
                spans.append((at, min(end, at + WINDOW_BYTES)))
    return spans


def read_spans(
    file: BinaryIO, spans: list[tuple[int, int]], path: str | Path
) -> Iterator[memoryview]:
    """Yield the bytes of each span, in pieces that are good until the next.

    Raises:
        ModelError: When the file ends before a span does.
        OSError: When it cannot be read.
    """
    piece = memoryview(bytearray(_CHUNK_BYTES))
    for start, end in spans:
        file.seek(start)
        while start < end:
            got = file.readinto(piece[: end - start])  # type: ignore[attr-defined]
            if not got:
                raise ModelError(f"{path} ended at {start:,} while it was read")
            yield piece[:got]
            start += got


def split_parts(path: str | Path) -> list[Path]:
    """Return the paths of all parts of a model that is split, by its name.

    ``name-00001-of-00003.gguf`` has three; a file of another name is the only one. Whether they
    exist is not looked at, and whether the model is split at all is known from `split.count` only.
    """
    path = Path(path)
    found = _PART.fullmatch(path.name)
    count = int(found["count"]) if found else 0
    if not found or not 1 <= int(found["number"]) <= count:
        return [path]
    return [
        path.with_name(f"{found['prefix']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def has_rope_factors(header: Header) -> bool:
    """Whether the model has rope factors that llama.cpp chooses by the size of the context."""
    return any("rope_factors_" in name for name in header.tensors)
