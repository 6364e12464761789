"""Eviction policies that cheat: they know the trace that they are replayed on.

Whatever a policy may know of the past and the future is a function of the requests alone, not of
what a cache happens to keep. So it is worked out once for a trace (`Future`), for each *use*: each
block of each request. Policies look it up, and are told of kept states by the product's own tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llamakeep.errors import InvalidValue
from llamakeep.policy.base import Watched
from llamakeep.policy.queue import Rank
from llamakeep.policy.survival import EDGES, N_BUCKETS
from llamakeep.policy.watching import WatchingPolicy
from llamakeep.simulate.replay import TraceClock
from llamakeep.simulate.trace import NEVER, Trace

if TYPE_CHECKING:
    from typing_extensions import Self

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Future:
    """All requests of a trace, as an oracle sees them: their full blocks, numbered from 0.

    Costs some 40 bytes a use.

    Args:
        trace: A trace of ids; its requests are read once.

    Attributes:
        block_tokens: Tokens of a block.
        n_requests: Requests.
        n_blocks: Different blocks.
        times: When each request comes, in seconds of a replay's clock.
        starts: Where each request's uses begin, and where the last ones end.
        blocks: The block of each use.
        depths: Blocks before it in its request.
        owners: The number of its request.
        next_uses: The number of the next request that has its block, or `NEVER`.
        depth_of: Of each block, how many are before it.

    Raises:
        InvalidValue: For a trace that keeps blocks that are not full: they have no fixed ids.
    """

    def __init__(self, trace: Trace) -> None:
        if trace.tails:
            raise InvalidValue(f"{trace.name} keeps tails; oracles know full blocks only")
        numbers: dict[int, int] = {}
        clock = TraceClock()
        times, sizes = [], []
        blocks: list[int] = []
        next_uses = [np.empty(0, np.int64)]
        for request in trace:
            clock.go_to(request.timestamp)
            times.append(clock())
            n_full = request.keep_tokens // trace.block_tokens
            sizes.append(n_full)
            blocks += [
                numbers.setdefault(i, len(numbers)) for i in request.blocks[:n_full].tolist()
            ]
            next_uses.append(request.next_uses[:n_full].astype(np.int64))
        self.block_tokens = trace.block_tokens
        self.n_requests = len(times)
        self.n_blocks = len(numbers)
        self.times: Floats = np.array(times)
        self.starts: Ints = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self.blocks: Ints = np.array(blocks, np.int64)
        self.owners: Ints = np.repeat(np.arange(self.n_requests), sizes)
        self.depths: Ints = np.arange(len(blocks)) - self.starts[self.owners]
        self.next_uses: Ints = np.concatenate(next_uses)
        of_blocks = np.empty(self.n_blocks, np.int64)
        of_blocks[self.blocks] = self.depths
        self.depth_of: list[int] = of_blocks.tolist()

    def uses_of(self, request: int) -> slice:
        """Return where the uses of a request are."""
        return slice(int(self.starts[request]), int(self.starts[request + 1]))


class Knowing(WatchingPolicy):
    """Knows which blocks are kept, and which request has come: what all oracles share.

    Args:
        future: Of the trace that it will be replayed on.
        selective: Whether a new state that ranks below all that could go for it is not kept.
    """

    def __init__(self, future: Future, *, selective: bool = False) -> None:
        super().__init__()
        self.selective = selective
        self._future = future
        self._request = -1
        self._path: list[int] = []
        self._states: dict[int, Watched] = {}
        self._last = [-1] * future.n_blocks
        self._next = [NEVER] * future.n_blocks

    def fresh(self) -> Self:
        """Return a new one with the same options."""
        return type(self)(self._future, selective=self.selective)

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Hear of a new state, and know which block it is of.

        Raises:
            RuntimeError: When it is not of a full block. That is no error of ours, which a cache
                would survive by keeping nothing.
        """
        self._go_to(now)
        if kept.n_tokens != self._future.block_tokens:
            raise RuntimeError(f"a state of {kept.n_tokens} tokens is of no full block")
        depth = 0 if after is None else self._future.depth_of[after.memo] + 1
        kept.memo = self._path[depth]
        self._states[kept.memo] = kept

    def used(self, kept: Watched, now: float) -> None:
        """Hear of a use."""
        self._go_to(now)

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Hear of a state that is not kept any more."""
        if self._states.get(kept.memo) is kept:
            del self._states[kept.memo]
        super().leaves(kept, now, evicted=evicted)

    def _go_to(self, now: float) -> None:
        """Let the requests come that have come by now."""
        times = self._future.times
        while self._request + 1 < times.size and times[self._request + 1] <= now:
            self._request += 1
            self._come(self._request)

    def _come(self, request: int) -> None:
        """Let a request use its blocks, whether or not they are kept."""
        uses = self._future.uses_of(request)
        self._path = self._future.blocks[uses].tolist()
        for block, next_use in zip(self._path, self._future.next_uses[uses].tolist(), strict=True):
            self._last[block], self._next[block] = request, next_use
            self._look_at(block)

    def _look_at(self, block: int) -> None:
        """Have a block ranked anew, if it is kept."""
        kept = self._states.get(block)
        if kept is not None and self._look_again is not None:
            self._look_again(kept)


class Dead(Knowing):
    """Evict what is never used again, then the least recently used: knows one bit of the future."""

    name = "dead"

    def rank(self, kept: Any, now: float) -> Rank:
        """Rank by whether it is used again, then by the last use."""
        return float(self._next[kept.memo] != NEVER), self._last[kept.memo]


class Soon(Knowing):
    """Evict what is used again last: Belady's rule, with what a tree cannot do."""

    name = "soon"

    def rank(self, kept: Any, now: float) -> Rank:
        """Rank by the next use; of blocks that are used again together, the last one goes first."""
        return -float(self._next[kept.memo]), -self._future.depth_of[kept.memo]


class _Run:
    """Blocks of one class that one request used.

    Attributes:
        klass: Their class.
        scale: Seconds for them to count as one.
        request: Which used them.
        bucket: How long they have waited.
        blocks: They, and some that were used since.
    """

    __slots__ = ("blocks", "bucket", "klass", "request", "scale")

    def __init__(self, klass: int, scale: float, request: int) -> None:
        self.klass = klass
        self.scale = scale
        self.request = request
        self.bucket = 0
        self.blocks: list[int] = []


class Worth(Knowing):
    """Evict what is worth least for how long it has waited, by tables that were made before.

    An event costs O(log n); the blocks of a request that are of one class wait together.

    Args:
        future: Of the trace that it will be replayed on.
        klasses: The class of each use.
        scales: Seconds that count as one, for each use.
        worths: For each class and bucket of time what it is worth to keep a block.
        selective: Whether a new state that ranks below all that could go for it is not kept.
    """

    name = "worth"

    def __init__(
        self,
        future: Future,
        klasses: Ints,
        scales: Floats,
        worths: Sequence[Sequence[float]],
        *,
        selective: bool = True,
    ) -> None:
        super().__init__(future, selective=selective)
        self._klasses = klasses
        self._scales = scales
        self._worths = worths
        self._runs: dict[int, _Run] = {}  # by block
        self._due: list[tuple[float, int, _Run]] = []  # when runs come into another bucket
        self._n_runs = 0

    def fresh(self) -> Self:
        """Return a new one with the same options."""
        return type(self)(
            self._future, self._klasses, self._scales, self._worths, selective=self.selective
        )

    def rank(self, kept: Any, now: float) -> Rank:
        """Rank by what it is worth, then by the last use."""
        run = self._runs[kept.memo]
        return self._worth(run), run.request

    def _worth(self, run: _Run) -> float:
        return self._worths[run.klass][run.bucket] / run.scale

    def _go_to(self, now: float) -> None:
        super()._go_to(now)
        while self._due and self._due[0][0] <= now:
            run = heapq.heappop(self._due)[2]
            run.blocks = [block for block in run.blocks if self._runs[block] is run]
            if not run.blocks:
                continue
            before = self._worth(run)
            run.bucket += 1
            self._expect(run)
            if self._worth(run) < before:
                for block in run.blocks:
                    self._look_at(block)

    def _come(self, request: int) -> None:
        super()._come(request)
        uses = self._future.uses_of(request)
        runs: dict[tuple[int, float], _Run] = {}
        of_uses: list[Any] = [self._klasses[uses].tolist(), self._scales[uses].tolist()]
        for block, klass, scale in zip(self._path, *of_uses, strict=True):
            run = runs.get((klass, scale))
            if run is None:
                run = runs[klass, scale] = _Run(klass, scale, request)
                self._expect(run)
            run.blocks.append(block)
            self._runs[block] = run

    def _expect(self, run: _Run) -> None:
        if run.bucket + 1 < N_BUCKETS:
            self._n_runs += 1
            due = self._future.times[run.request] + EDGES[run.bucket + 1] * run.scale
            heapq.heappush(self._due, (due, self._n_runs, run))
