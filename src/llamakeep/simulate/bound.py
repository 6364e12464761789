"""The most that any cache could have saved, knowing the future.

Belady's rule, on the blocks of a trace: what is used again last goes first. A block is used with
all that it follows, so it is never used again before what it follows is; of two that are used again
at the same time, the later block goes first. So what is kept is always whole prefixes (leaf by
leaf), as a tree has to keep them.

All tokens are of one size here, and a block can be kept in part, from its begin on. For things of
one size Belady's rule is optimal, also for a cache that may leave out what it has just read, so
this is a bound on every cache of these blocks with that capacity, whatever it evicts. Sizes that
do not grow with tokens (headers, checkpoints) only make things worse.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.simulate.replay import Model, Outcome
from llamakeep.simulate.trace import NEVER, Request, Trace

_SMALL: Final = 1024
_REPORT_EVERY: Final = 64


class Belady:
    """Keeps of the blocks that were read what is used again soonest.

    Args:
        capacity_tokens: Tokens that can be kept.

    Attributes:
        evicted_tokens: Tokens that were kept after a request and are not any more, though they
            are used again.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = whole_number("capacity_tokens", capacity_tokens, 0)
        self._kept: dict[int, tuple[int, int]] = {}  # tokens and next use, by block
        self._heap: list[tuple[int, int, int]] = []  # -next use, -depth, block; some are outdated
        self._used_tokens = 0
        self.evicted_tokens = 0

    @property
    def used_tokens(self) -> int:
        """Tokens that are kept."""
        return self._used_tokens

    def serve(self, request: Request) -> int:
        """Serve a request and return how many of its tokens were there.

        Costs O(log n) a block, amortised.
        """
        reused = 0
        for depth, (block, size, next_use) in enumerate(
            zip(
                request.blocks.tolist(),
                request.sizes.tolist(),
                request.next_uses.tolist(),
                strict=True,
            )
        ):
            kept, _ = self._kept.pop(block, (0, 0))
            reused += min(kept, size)
            self._used_tokens -= kept
            if next_use != NEVER:
                size = max(kept, size)
                self._kept[block] = size, next_use
                self._used_tokens += size
                heapq.heappush(self._heap, (-next_use, -depth, block))
        while self._used_tokens > self._capacity_tokens:
            self._evict(self._used_tokens - self._capacity_tokens)
        if len(self._heap) > _SMALL + 2 * len(self._kept):
            self._heap = [each for each in self._heap if self._is_current(each)]
            heapq.heapify(self._heap)
        return reused

    def _is_current(self, place: tuple[int, int, int]) -> bool:
        return self._kept.get(place[2], (0, 0))[1] == -place[0]

    def _evict(self, n_tokens: int) -> None:
        """Evict up to `n_tokens` of the block that is used again last, from its end."""
        place = self._heap[0]
        if not self._is_current(place):
            heapq.heappop(self._heap)
            return
        kept, next_use = self._kept[place[2]]
        evicted = min(kept, n_tokens)
        if evicted < kept:
            self._kept[place[2]] = kept - evicted, next_use
        else:
            del self._kept[place[2]]
            heapq.heappop(self._heap)
        self._used_tokens -= evicted
        self.evicted_tokens += evicted


def bound(
    trace: Trace,
    *,
    capacity_bytes: int,
    model: Model | None = None,
    warmup: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Return what a cache that knows the future saves at most.

    Args:
        trace: The requests.
        capacity_bytes: What it may keep, in bytes.
        model: What states occupy; of its rows alone is this a bound, see the module.
        warmup: Requests at the begin that are not counted.
        on_progress: Called now and then with the requests that are served, and all of them.

    Raises:
        InvalidValue: For a warm-up that is no number of requests of the trace.
    """
    if not 0 <= warmup < trace.n_requests:
        raise InvalidValue(f"warmup must be 0 to {trace.n_requests - 1} requests, not {warmup}")
    bytes_per_token = (model or Model()).bytes_per_token
    belady = Belady(capacity_bytes // bytes_per_token)
    hits = input_tokens = reused_tokens = again = evicted = 0
    for index, request in enumerate(trace):
        if index == warmup:
            evicted = belady.evicted_tokens
        reused = belady.serve(request)
        if index >= warmup:
            hits += bool(reused)
            input_tokens += int(request.tokens.size)
            reused_tokens += reused
            again += max(0, request.known_tokens - reused)
        if on_progress is not None and index % _REPORT_EVERY == 0:
            on_progress(index, trace.n_requests)
    return Outcome(
        "bound",
        "belady",
        capacity_bytes,
        trace.n_requests - warmup,
        hits,
        input_tokens,
        reused_tokens,
        (belady.evicted_tokens - evicted) * bytes_per_token,
        {"ram": reused_tokens * bytes_per_token},
        again,
    )
