"""Caches without bytes: what would have been reused under another rule, told from a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llamakeep.policy.queue import EvictionQueue, Rank


class Shadowed(Protocol):
    """What a shadow asks of what it would keep.

    Attributes:
        draw: A random number that stays the same: which things are in a sample.
        n_bytes: Its size.
    """

    draw: int
    n_bytes: int


class _Item:
    """A thing that a shadow would keep."""

    __slots__ = ("created", "hits", "last_used", "n_bytes", "of", "queued", "sequence")

    def __init__(self, of: Shadowed) -> None:
        self.of = of
        self.n_bytes = of.n_bytes  # as it is counted: what it stands for may grow
        self.created = self.last_used = 0.0
        self.hits = self.queued = self.sequence = 0

    @property
    def n_tokens(self) -> int:  # pragma: no cover - nobody's business here
        return 0

    @property
    def marginal_tokens(self) -> int:  # pragma: no cover
        return 0


class _Ranks:
    """Ranks items by what they stand for."""

    name = "shadow"
    looks_around = False

    def __init__(self, rank: Callable[[Shadowed], Rank]) -> None:
        self._rank = rank

    def rank(self, kept: Any, now: float) -> Rank:
        return self._rank(kept.of)


class Shadow:
    """A cache of things that have a size and nothing else, none depending on another.

    Args:
        rank: What goes first, at the present time.
        selective: Whether what ranks below all that could go for it is not kept.

    Attributes:
        capacity_bytes: What it may keep.
        used_bytes: What it keeps.
        saved_tokens: What it saved of late.
    """

    def __init__(self, rank: Callable[[Shadowed], Rank], *, selective: bool) -> None:
        self.capacity_bytes = self.used_bytes = 0
        self.saved_tokens = 0.0
        self._rank = rank
        self._selective = selective
        self._items: dict[int, _Item] = {}  # by draw
        self._queue = EvictionQueue[_Item](_Ranks(rank), lambda: 0.0, self._is_kept)

    def __len__(self) -> int:
        return len(self._items)

    def _is_kept(self, item: _Item) -> bool:
        return self._items.get(item.of.draw) is item

    def access(self, thing: Shadowed, *, fits: bool = True) -> bool:
        """Return whether a thing is there, and keep it if all fits. Costs O(log n), amortised.

        For what has grown there is made room when the next comes that is not there.
        """
        item = self._items.get(thing.draw)
        if item is not None:
            self.used_bytes += thing.n_bytes - item.n_bytes
            item.of, item.n_bytes = thing, thing.n_bytes
            self._queue.look_again(item)  # a use may let it fall
            return True
        if not fits or thing.n_bytes > self.capacity_bytes:
            return False  # nothing goes for what cannot be kept
        limit = self._rank(thing) if self._selective else None
        while self.used_bytes + thing.n_bytes > self.capacity_bytes:
            gone = self._queue.pop(_anything, below=limit)
            if gone is None:
                return False
            self._drop(gone)
        item = self._items[thing.draw] = _Item(thing)
        self.used_bytes += thing.n_bytes
        self._queue.push(item)
        return False

    def look_again(self, thing: Shadowed) -> None:
        """Rank a thing anew, if it is there."""
        item = self._items.get(thing.draw)
        if item is not None:
            self._queue.look_again(item)

    def look_at_all_again(self) -> None:
        """Rank everything anew."""
        for item in self._items.values():
            self._queue.look_again(item)

    def thin_out(self, mask: int) -> None:
        """Forget the things whose draw has one of these bits."""
        for item in [it for it in self._items.values() if it.of.draw & mask]:
            self._drop(item)

    def _drop(self, item: _Item) -> None:
        del self._items[item.of.draw]
        self.used_bytes -= item.n_bytes


def _anything(item: _Item) -> bool:
    return True
