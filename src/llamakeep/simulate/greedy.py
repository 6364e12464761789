"""What a clairvoyant could save where states need checkpoints. Not a bound: a greedy guess.

A prompt of a family with a rolling part goes on only from a checkpoint, which costs its bytes
wherever it is, and is of use only with the rows before it. To choose among such things is not
solved by Belady's rule, nor by any fast one. So this knows where each request will part from all
that came before it, takes checkpoints there and nowhere else, and when there are too many gives up
what is worth least: tokens saved at its next use, for each byte that it alone needs and each
request until then. Something better may exist; what it saves can be saved.

Checkpoints may be limited by themselves, too, as caches limit them: their number along one prompt,
and the bytes of all of them. What is worth least of those goes then, whatever room is left.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np

from llamakeep.errors import InvalidValue
from llamakeep.runtime.base import Family
from llamakeep.simulate.replay import Model, Outcome
from llamakeep.simulate.trace import NEVER, Ids, Request, Trace

_REPORT_EVERY: Final = 64


class _Point:
    """A checkpoint: the blocks up to it, and the tokens up to the end of each."""

    __slots__ = ("blocks", "ends", "next_use")

    def __init__(self, blocks: Ids, ends: Ids, next_use: int) -> None:
        self.blocks: list[int] = blocks.tolist()
        self.ends: list[int] = ends.tolist()
        self.next_use = next_use

    @property
    def block(self) -> int:
        """The block that it is at the end of."""
        return self.blocks[-1]


def partings(trace: Trace) -> dict[int, list[int]]:
    """Return at the ends of which blocks requests part from all before them: their numbers.

    Costs a pass, and the memory of the blocks that will be used again.
    """
    wanted: dict[int, list[int]] = {}
    known: set[int] = set()  # used before, and again
    for index, request in enumerate(trace):
        last = -1
        for block, next_use in zip(
            request.blocks.tolist(), request.next_uses.tolist(), strict=True
        ):
            if block in known:
                last = block
            if next_use == NEVER:
                known.discard(block)
            else:
                known.add(block)
        if last >= 0:
            wanted.setdefault(last, []).append(index)
    return wanted


class Clairvoyant:
    """Keeps the checkpoints that will be worth most, and the rows before them.

    Args:
        capacity_bytes: What it can keep.
        model: What states occupy.
        wanted: What `partings` returned.
        limit: Most checkpoints along one prompt; None for no limit.
        limit_bytes: What all checkpoints may occupy; None for no limit of their own.

    Attributes:
        used_bytes: What is kept.
        evicted_bytes: What was kept after a request and is not any more, though it is wanted.
    """

    def __init__(
        self,
        capacity_bytes: int,
        model: Model,
        wanted: dict[int, list[int]],
        *,
        limit: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._row_bytes = 0 if model.family is Family.RECURRENT else model.bytes_per_token
        self._point_bytes = model.checkpoint_bytes
        self._wanted = wanted
        self._most_along = sys.maxsize if limit is None else limit
        self._most = sys.maxsize if limit_bytes is None else limit_bytes // self._point_bytes
        self._points: dict[int, _Point] = {}
        self._users: dict[int, int] = {}  # checkpoints that need the rows of a block
        self.used_bytes = self.evicted_bytes = 0

    def serve(self, index: int, request: Request) -> int:
        """Serve a request and return how many of its tokens were there."""
        blocks = request.blocks.tolist()
        ends = np.cumsum(request.sizes, dtype=np.int64)
        found = next((i for i in reversed(range(len(blocks))) if blocks[i] in self._points), -1)
        for block in blocks[: found + 1]:
            point = self._points.get(block)
            if point is not None:
                point.next_use = self._next_use(block, index)
                if point.next_use == NEVER:
                    self._drop(point)
        for i in range(found + 1, len(blocks)):
            next_use = self._next_use(blocks[i], index)
            if next_use != NEVER:
                self._add(_Point(request.blocks[: i + 1], ends[: i + 1], next_use))
        along = [self._points[block] for block in blocks if block in self._points]
        if len(along) > self._most_along:
            self._thin(along, len(along) - self._most_along, index)
        if len(self._points) > self._most:
            self._thin(list(self._points.values()), len(self._points) - self._most, index)
        if self.used_bytes > self._capacity_bytes:
            self._shrink(index)
        return int(ends[found]) if found >= 0 else 0

    def _next_use(self, block: int, index: int) -> int:
        times = self._wanted.get(block, [])
        at = bisect_right(times, index)
        return times[at] if at < len(times) else NEVER

    def _add(self, point: _Point) -> None:
        self._points[point.block] = point
        self.used_bytes += self._point_bytes
        before = 0
        for block, end in zip(point.blocks, point.ends, strict=True):
            users = self._users.get(block, 0)
            self._users[block] = users + 1
            if not users:
                self.used_bytes += (end - before) * self._row_bytes
            before = end

    def _drop(self, point: _Point) -> None:
        del self._points[point.block]
        self.used_bytes -= self._point_bytes
        before = 0
        for block, end in zip(point.blocks, point.ends, strict=True):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self.used_bytes -= (end - before) * self._row_bytes
            before = end

    def _worth(self, point: _Point, index: int) -> float:
        """Return the tokens that it saves, a byte that it alone needs and a request to wait."""
        resumed = 0  # without it
        for block, end in zip(reversed(point.blocks[:-1]), reversed(point.ends[:-1]), strict=True):
            if block in self._points:
                resumed = end
                break
        n_bytes = self._point_bytes + self._rows_alone(point)
        return (point.ends[-1] - resumed) / (n_bytes * (point.next_use - index))

    def _rows_alone(self, point: _Point) -> int:
        """Return the bytes of the rows that no other checkpoint needs."""
        at = len(point.blocks)
        while at and self._users[point.blocks[at - 1]] == 1:
            at -= 1
        shared = point.ends[at - 1] if at else 0
        return (point.ends[-1] - shared) * self._row_bytes

    def _thin(self, points: list[_Point], n: int, index: int) -> None:
        """Give up `n` of these, each time the one that is worth least without those before."""
        before = self.used_bytes
        for _ in range(n):
            worst = min(points, key=lambda point: self._worth(point, index))
            points.remove(worst)
            self._drop(worst)
        self.evicted_bytes += before - self.used_bytes

    def _shrink(self, index: int) -> None:
        """Give up what is worth least, until the rest fits."""
        ranked = sorted(self._points.values(), key=lambda point: self._worth(point, index))
        before = self.used_bytes
        for point in ranked:
            if self.used_bytes <= self._capacity_bytes:
                break
            self._drop(point)
        self.evicted_bytes += before - self.used_bytes


def clairvoyant(
    trace: Trace,
    *,
    capacity_bytes: int,
    model: Model,
    limit: int | None = None,
    limit_bytes: int | None = None,
    warmup: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Return what a greedy clairvoyant saves in a family with checkpoints. No bound.

    Args:
        trace: The requests.
        capacity_bytes: What it may keep, in bytes.
        model: What states occupy.
        limit: Most checkpoints along one prompt; None for no limit.
        limit_bytes: What all checkpoints may occupy; None for no limit of their own.
        warmup: Requests at the begin that are not counted.
        on_progress: Called now and then with the requests that are served, and all of them.

    Raises:
        InvalidValue: For a family without checkpoints, which has a bound, and for a warm-up that
            is no number of requests of the trace.
    """
    if not model.checkpoint_bytes:
        raise InvalidValue(f"the {model.family.value} family needs no checkpoints: it has a bound")
    if not 0 <= warmup < trace.n_requests:
        raise InvalidValue(f"warmup must be 0 to {trace.n_requests - 1} requests, not {warmup}")
    greedy = Clairvoyant(
        capacity_bytes, model, partings(trace), limit=limit, limit_bytes=limit_bytes
    )
    hits = input_tokens = reused_tokens = again = evicted = 0
    for index, request in enumerate(trace):
        if index == warmup:
            evicted = greedy.evicted_bytes
        reused = greedy.serve(index, request)
        if index >= warmup:
            hits += bool(reused)
            input_tokens += int(request.tokens.size)
            reused_tokens += reused
            again += max(0, request.known_tokens - reused)
        if on_progress is not None and index % _REPORT_EVERY == 0:
            on_progress(index, trace.n_requests)
    row_bytes = 0 if model.family is Family.RECURRENT else model.bytes_per_token
    return Outcome(
        "clairvoyant",
        "greedy",
        capacity_bytes,
        trace.n_requests - warmup,
        hits,
        input_tokens,
        reused_tokens,
        greedy.evicted_bytes - evicted,
        {"ram": reused_tokens * row_bytes + hits * model.checkpoint_bytes},
        again,
    )
