"""Reading traces of requests: once from a file, then as often as wanted from a compact copy.

A trace names the blocks of each prompt: one id a block, equal ids for equal prefixes. That is all
that a cache of prefixes needs to know, so tokens are made up: those of a block follow from its id,
and equal prefixes have equal tokens, others differ from the first token of the first block that
differs. A workload of token prompts has its own tokens; it is cut where prompts end or part, and
what lies between is its blocks.

The last block of a prompt is mostly a part of one. In a trace it has an id of its own, which the
next turn's prompt, grown, does not have. A cache replaces it by what it grew to; here it would lie
about for good. So such tails are left out of what can be kept, unless asked for: they are always
evaluated. (Where tokens are known there are no ids, and nothing is left out.)

What the requests of a trace are lies in temporary files that are mapped, 16 bytes a block. So a
trace of any length takes little memory, and each further replay costs no parsing.
"""

from __future__ import annotations

import mmap
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from llamakeep.errors import InvalidValue
from llamakeep.explain.record import read_log
from llamakeep.simulate.workload import Workload, is_workload, read_workload
from llamakeep.tokens import IntArray

Ids: TypeAlias = npt.NDArray[np.int64]

NEVER: Final = np.iinfo(np.int32).max
"""As a next use: there is none."""

_ID_BITS: Final = 62
_LOW: Final = (1 << 31) - 1
_BUCKET_BLOCKS: Final = 1 << 20
"""Blocks that are sorted at a time, at some 80 bytes each."""
_CHUNK: Final = 1 << 16
_MAX_BLOCK_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    Attributes:
        timestamp: When it came, in seconds.
        tokens: Its prompt.
        blocks: Ids of its blocks; equal ids mean equal prefixes.
        sizes: Tokens of each block.
        keep_tokens: How many of its tokens can be kept: all, or those of full blocks.
        next_uses: For each block the number of the next request that has it, or `NEVER`.
        session: A number for the session that the trace says it belongs to; 0 for none.
        known_tokens: How many of its tokens that can be kept were in requests before it: what is
            evaluated of them is evaluated again.
        user_starts: Positions where a user message starts, ascending; where a file says so.
    """

    timestamp: float
    tokens: IntArray
    blocks: Ids
    sizes: npt.NDArray[np.int32]
    keep_tokens: int
    next_uses: npt.NDArray[np.int32]
    session: int = 0
    known_tokens: int = 0
    user_starts: tuple[int, ...] = ()


class Trace:
    """The requests of a file, in its order. Close it, or use it as a context.

    Made by `open_trace`. One thread at a time.

    Attributes:
        name: Of the file.
        block_tokens: Tokens of a full block.
        n_requests: Requests.
        n_blocks: Blocks of all requests.
        n_tokens: Tokens of all prompts.
        longest_tokens: Tokens of the longest one.
        footprint_tokens: Tokens of all different blocks that can be kept: all that there is to
            keep.
        tails: Whether blocks that are not full can be kept too.
    """

    def __init__(self, name: str, block_tokens: int, *, tails: bool) -> None:
        self.name = name
        self.tails = tails
        self.block_tokens = block_tokens
        self.n_requests = self.n_blocks = self.n_tokens = 0
        self.longest_tokens = self.footprint_tokens = 0
        self._blocks = _Column(np.int64)
        self._sizes = _Column(np.int32)
        self._next = _Column(np.int32)
        self._times = _Column(np.float64)
        self._ends = _Column(np.int64)
        self._sessions = _Column(np.int64)
        self._known = _Column(np.int64)
        self._tokens: list[IntArray] | None = None
        self._user_starts: list[tuple[int, ...]] = []

    def __repr__(self) -> str:
        return f"Trace({self.name}: {self.n_requests:,} requests, {self.n_tokens:,} tokens)"

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the copy. Again: does nothing."""
        of_blocks = (self._blocks, self._sizes, self._next)
        of_requests = (self._times, self._ends, self._sessions, self._known)
        for column in (*of_blocks, *of_requests):
            column.close()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Costs a copy of their tokens and no parsing."""
        blocks, sizes, next_uses = self._blocks.data, self._sizes.data, self._next.data
        start = 0
        for index in range(self.n_requests):
            end = int(self._ends.data[index])
            ids, n_tokens = blocks[start:end], sizes[start:end]
            tokens = made_up(ids, n_tokens) if self._tokens is None else self._tokens[index]
            tail = 0 if self.tails else int(n_tokens[-1]) % self.block_tokens
            yield Request(
                float(self._times.data[index]),
                tokens,
                ids,
                n_tokens,
                int(tokens.size) - tail,
                next_uses[start:end],
                int(self._sessions.data[index]),
                int(self._known.data[index]),
                self._user_starts[index] if self._user_starts else (),
            )
            start = end

    # -- made by open_trace ------------------------------------------------------------------------

    def _add(self, timestamp: float, blocks: Any, sizes: Any, session: int = 0) -> None:
        self._blocks.extend(blocks)
        self._sizes.extend(sizes)
        self._times.extend((timestamp,))
        self._sessions.extend((session,))
        self.n_requests += 1
        self.n_blocks += len(blocks)
        n_tokens = sum(sizes)
        self.n_tokens += n_tokens
        self.longest_tokens = max(self.longest_tokens, n_tokens)
        self._ends.extend((self.n_blocks,))

    def _finish(self) -> None:
        """Look up the next use of each block, and prove that ids stand for prefixes.

        Raises:
            InvalidValue: For an id that follows different ones.
        """
        for column in (self._blocks, self._sizes, self._times, self._ends, self._sessions):
            column.map()
        self._next.resize(self.n_blocks)
        self._known.resize(self.n_requests)
        n_buckets = -(-self.n_blocks // _BUCKET_BLOCKS)
        for bucket in range(n_buckets):
            self._link(self._places_of(bucket, n_buckets))

    def _places_of(self, bucket: int, n_buckets: int) -> npt.NDArray[np.int64]:
        """Return where the blocks of one bucket of ids are, ascending."""
        if n_buckets == 1:
            return np.arange(self.n_blocks)
        step = _BUCKET_BLOCKS
        return np.concatenate(
            [
                start
                + np.flatnonzero(self._blocks.data[start : start + step] % n_buckets == bucket)
                for start in range(0, self.n_blocks, step)
            ]
        )

    def _link(self, places: npt.NDArray[np.int64]) -> None:
        """Note the next uses of blocks at these places, which have all uses of their ids."""
        self._next.data[places] = NEVER
        if not self.tails:
            places = places[self._sizes.data[places] == self.block_tokens]
        if not places.size:
            return
        ids, ends = self._blocks.data[places], self._ends.data
        order = np.argsort(ids, kind="stable")
        places, ids = places[order], ids[order]
        requests = np.searchsorted(ends, places, side="right")
        sizes = self._sizes.data[places]
        starts = np.where(requests > 0, ends[requests - 1], 0)
        before = np.where(places > starts, self._blocks.data[places - 1], -1)
        again = ids[1:] == ids[:-1]
        wrong = np.flatnonzero(again & (before[1:] != before[:-1]))
        if wrong.size:
            at = int(wrong[0])
            one, other = (int(before[it]) if before[it] >= 0 else "none" for it in (at, at + 1))
            raise InvalidValue(
                f"{self.name}: block {ids[at]} follows {one} in request {requests[at] + 1} and "
                f"{other} in request {requests[at + 1] + 1}; ids must stand for whole prefixes"
            )
        next_uses = np.full(ids.size, NEVER, np.int32)
        next_uses[:-1][again] = requests[1:][again]
        self._next.data[places] = next_uses
        is_first = np.concatenate(([True], ~again))
        # The last block of a prompt may be the beginning of a longer one with the same id.
        self.footprint_tokens += int(np.maximum.reduceat(sizes, np.flatnonzero(is_first)).sum())
        room = int(sizes.max()) + 1
        groups = np.cumsum(is_first, dtype=np.int64) * room
        longest = np.maximum.accumulate(groups + sizes) - groups  # of those up to each
        known = np.minimum(sizes[1:], longest[:-1])[again]
        np.add.at(self._known.data, requests[1:][again], known)


class _Column:
    """Numbers of one type: appended to a temporary file, then mapped."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._waiting = array(self._dtype.char)
        self.data: npt.NDArray[Any] = np.empty(0, dtype)

    def extend(self, values: Any) -> None:
        """Append numbers."""
        self._waiting.extend(values)
        if len(self._waiting) > _CHUNK:
            self._write()

    def _write(self) -> None:
        self._file.write(self._waiting)
        del self._waiting[:]

    def map(self) -> None:
        """Let `data` be what was appended."""
        self._write()
        self._file.flush()
        self._map()

    def resize(self, n: int) -> None:
        """Let `data` be `n` zeros, to be written to."""
        self._file.truncate(n * self._dtype.itemsize)
        self._map()

    def _map(self) -> None:
        if self._file.seek(0, 2):
            self.data = np.frombuffer(mmap.mmap(self._file.fileno(), 0), self._dtype)

    def close(self) -> None:
        """Delete the file."""
        self.data = np.empty(0, self._dtype)
        self._file.close()


def made_up(blocks: Ids, sizes: npt.NDArray[np.int32]) -> IntArray:
    """Return tokens for blocks: each block's follow from its id, from the first one on.

    Of two blocks whose ids differ by a multiple of 2^31 it is every other token that differs.
    """
    tokens = np.repeat((blocks & _LOW).astype(np.int32), sizes)
    high = blocks >> 31
    if high.any():
        tokens[1::2] = np.repeat(high.astype(np.int32), sizes)[1::2]
    return tokens


def open_trace(
    path: Path, *, tails: bool = False, on_progress: Callable[[int], None] | None = None
) -> Trace:
    """Read the requests of a file: a trace, a log of `llamakeep serve --record`, or a workload.

    A trace or a log has a JSON object a line, gzip or plain (the name of a packed one ends in
    `.gz`); see `Recorded`. Lines without a `block_size` are Mooncake's: blocks of 512 tokens, times
    in milliseconds. A workload is one JSON list of objects with `tokens`.

    Args:
        path: The file.
        tails: Whether the last block of a prompt can be kept where it is not full.
        on_progress: Called now and then with the number of requests that were read.

    Returns:
        The requests, to be closed. Costs one pass; a workload is held in memory.

    Raises:
        InvalidValue: For a file of none of these, with the line; for one without requests, or with
            ids that stand for different prefixes.
        StoreError: When it cannot be read.
    """
    trace = None
    try:
        if is_workload(path):
            trace = _of_workload(read_workload(path), path.name)
        else:
            trace = _of_lines(path, on_progress or _nobody, tails=tails)
        if not trace.n_tokens:
            raise InvalidValue(f"{path} has no requests with tokens")
        trace._finish()
    except BaseException:
        if trace is not None:
            trace.close()
        raise
    return trace


def _nobody(n_requests: int) -> None:
    """Hear nothing."""


def _of_lines(path: Path, on_progress: Callable[[int], None], *, tails: bool) -> Trace:
    trace = Trace(path.name, 0, tails=tails)
    try:
        for line in read_log(path, mooncake=True):
            if line.block_size > _MAX_BLOCK_TOKENS:
                raise InvalidValue(
                    f"{path}: request {line.id} has blocks of {line.block_size} tokens; "
                    f"{_MAX_BLOCK_TOKENS:,} are the most"
                )
            if not trace.block_tokens:
                trace.block_tokens = line.block_size
            elif line.block_size != trace.block_tokens:
                raise InvalidValue(
                    f"{path}: request {line.id} has blocks of {line.block_size} tokens, "
                    f"those before have {trace.block_tokens}"
                )
            if not line.input_length:
                continue
            if not tails and any(n < line.block_size for n in line.block_tokens[:-1]):
                raise InvalidValue(
                    f"{path}: request {line.id} has a block before its last that is not full"
                )
            trace._add(
                line.timestamp,
                [_short(id_) for id_ in line.hash_ids],
                line.block_tokens,
                _digest(line.session_id) if line.session_id else 0,
            )
            if trace.n_requests % 1024 == 0:
                on_progress(trace.n_requests)
    except BaseException:
        trace.close()
        raise
    return trace


def _short(block: int) -> int:
    """Return an id that fits into a column: itself, or for one that does not, a digest."""
    return block if 0 <= block < 1 << _ID_BITS else _digest(str(block))


def _digest(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(8), "little") >> (64 - _ID_BITS)


def trace_of(workload: Workload, name: str) -> Trace:
    """Return the requests of a workload that is in memory, a second between them.

    Raises:
        InvalidValue: For one without tokens.
    """
    trace = _of_workload(workload, name)
    try:
        if not trace.n_tokens:
            raise InvalidValue(f"{name} has no requests with tokens")
        trace._finish()
    except BaseException:
        trace.close()
        raise
    return trace


def _of_workload(workload: Workload, name: str) -> Trace:
    trace = Trace(name, workload.block_tokens, tails=True)
    try:
        for number, (blocks, sizes) in enumerate(workload.cut()):
            trace._add(float(number), blocks, sizes)
    except BaseException:
        trace.close()
        raise
    trace._tokens, trace._user_starts = workload.prompts, workload.user_starts
    return trace
