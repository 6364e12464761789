"""Which of two orders has reused more of late: told by two caches without bytes, on a sample.

One goes by the order that is to be judged, the other by recency. While the order rules, it is
judged by what the cache itself reuses instead. Shadows know nothing of what hangs off what, but for
this: of things that rank alike the deeper goes first, and nothing is kept of a prompt that does not
fit. So what they say is near what the cache would do, and not that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llamakeep.policy.queue import Rank
from llamakeep.policy.shadow import Shadow, Shadowed

SAMPLE: Final = 512
"""Most things of which the shadows keep count: so many are enough for a few thousandths."""
_FADING: Final = 1 / 8192
"""How fast is forgotten what they saved, for each thing in the sample: some 16 times its size."""
_PATIENCE: Final = 1024
"""How much of the sample has to be served before the order may rule again that lost; doubled each
time, and halved each time that it ruled for longer."""
_LEAD: Final = 0.001
"""By what share of all tokens the order has to be ahead before it rules. Above chance, below what
it is worth."""


class Guard:
    """Judges an order of things against recency.

    Args:
        worth: The order, at the present time.
        recency: By the last use.
        selective: Whether what is new and ranks below all that could go for it is not kept, in
            that order.
        regret: What share of all tokens it may save less than recency before it rules no more.

    Attributes:
        learned: The shadow that goes by the order.
        recent: The one that goes by recency.
        mask: Things whose draw has none of these bits are the sample.
        served_tokens: Tokens of late.
    """

    def __init__(
        self,
        worth: Callable[[Shadowed], Rank],
        recency: Callable[[Shadowed], Rank],
        *,
        selective: bool,
        regret: float,
    ) -> None:
        self.learned = Shadow(worth, selective=selective)
        self.recent = Shadow(recency, selective=False)
        self.mask = 0
        self.served_tokens = 0.0
        self._regret = regret
        self._n_served = self._since = 0
        self._patience = _PATIENCE

    def serve(self, thing: Shadowed, n_tokens: int, *, fits: bool, there: bool | None) -> None:
        """Let both serve a thing, if it is in the sample.

        Args:
            thing: The thing.
            n_tokens: What it saves if it is there.
            fits: Whether all of its prompt can be kept.
            there: While the order rules, whether the cache itself had it, which counts then.
        """
        if thing.draw & self.mask or thing.n_bytes <= 0:
            return
        self._n_served += 1
        self.served_tokens += n_tokens - self.served_tokens * _FADING
        for shadow in (self.learned, self.recent):
            had = shadow.access(thing, fits=fits)
            if shadow is self.learned and there is not None:
                had = there
            shadow.saved_tokens += n_tokens * had - shadow.saved_tokens * _FADING

    def look_again(self, thing: Shadowed) -> None:
        """Rank a thing anew, whose worth has fallen."""
        if not thing.draw & self.mask:
            self.learned.look_again(thing)

    def fit(self, n_things: int, capacity_bytes: int) -> None:
        """Keep the sample as large as it should be, of a cache of so many things and bytes."""
        while n_things > SAMPLE * (self.mask + 1):
            self.mask = 2 * self.mask + 1
            self.learned.thin_out(self.mask)
            self.recent.thin_out(self.mask)
        if self.mask and 4 * n_things < SAMPLE * (self.mask + 1):
            self.mask >>= 1
        for shadow in (self.learned, self.recent):
            shadow.capacity_bytes = capacity_bytes // (self.mask + 1)

    def approves(self, *, rules: bool) -> bool:
        """Return whether the order should rule from now on; `rules` says whether it does.

        Each change costs what the cache has by one order and would have by the other. Who loses
        has to wait, twice as long each time: so of n things served there are O(log n) changes.
        """
        ruled = self._n_served - self._since
        ahead = self.learned.saved_tokens - self.recent.saved_tokens
        if rules:
            if ruled > self._patience > _PATIENCE:
                self._since, self._patience = self._n_served, self._patience // 2
            if ahead >= -self._regret * self.served_tokens:
                return True
            self._since, self._patience = self._n_served, 2 * self._patience
            return False
        if ahead <= _LEAD * self.served_tokens:
            return False
        if self._patience > _PATIENCE and ruled < self._patience:
            return False  # it lost before
        self._since = self._n_served
        # What it would have saved before is no credit for what it loses now.
        self.learned.saved_tokens = self.recent.saved_tokens + _LEAD * self.served_tokens
        return True
