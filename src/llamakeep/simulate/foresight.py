"""Which checkpoint of a slot to drop, for one who knows what comes: a reference, and no bound.

`clairvoyant` chooses where checkpoints are, too. This one takes them where the product does, and
knows only which of them will be used: what is between the two is the price of where they are taken,
and what is between this one and a policy is the price of which it drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from llamakeep.checkpoints import MIN_EVALUATED, deepest_resume
from llamakeep.policy import Neighbored
from llamakeep.simulate.trace import Trace
from llamakeep.tokens import IntArray, common_prefix

AHEAD: Final = 200
"""Requests that it looks ahead."""


class Foresight:
    """Evicts the checkpoint whose next use saves the fewest tokens, for each request until then.

    A checkpoint is used by a request that has its tokens, does not go on from the end of what was
    served before, and leaves that before the next checkpoint. Whether the slot will still hold it
    is not looked at. A policy for checkpoints in a list; `begin` must be called before each
    request. Greedy: to drop another one might be better in the end. Holds the tokens of all
    prompts; a rank costs a look at each request ahead.

    Args:
        requests: The prompts, in order, or their trace.
        exact: A checkpoint is used only where the request leaves what was served.
    """

    name = "foresight"
    looks_around = True

    def __init__(self, requests: Trace | Sequence[IntArray], *, exact: bool = False) -> None:
        if isinstance(requests, Trace):
            requests = [request.tokens for request in requests]
        self._prompts = requests
        self._exact = exact
        self._index = 0
        self._shared = lru_cache(maxsize=1 << 18)(self._common)

    def begin(self, index: int) -> None:
        """Note which request is served now."""
        self._index = index

    def rank(self, kept: Neighbored, now: float) -> tuple[float, int]:
        """Rank by the tokens that the next use saves, and how long that is to wait."""
        position, end = kept.n_tokens, kept.n_tokens + kept.gap_after
        held = self._index
        for index in range(held + 1, min(held + 1 + AHEAD, len(self._prompts))):
            if self._shared(self._index, index) < position:
                continue
            most = deepest_resume(int(self._prompts[index].size), 1, MIN_EVALUATED)
            leaves = min(self._shared(held, index), most)
            goes_on = leaves == self._prompts[held].size
            held = index
            if not goes_on and (
                leaves == position or (position < leaves < end and not self._exact)
            ):
                return kept.gap_before / (index - self._index), kept.sequence
        return 0.0, kept.sequence

    def _common(self, one: int, other: int) -> int:
        return common_prefix(self._prompts[one], self._prompts[other])
