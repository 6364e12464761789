"""The guard: who rules is who saves more, and who was wrong has to wait."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from llamakeep.policy import guard
from llamakeep.policy.guard import Guard
from llamakeep.policy.queue import Rank
from llamakeep.policy.shadow import Shadowed


@dataclass
class Thing:
    """A thing that is worth something, or nothing, and was used at some time."""

    draw: int
    worth: float = 0.0
    last: float = 0.0
    n_bytes: int = 1


def by_worth(thing: Shadowed) -> Rank:
    assert isinstance(thing, Thing)
    return thing.worth, 0


def by_use(thing: Shadowed) -> Rank:
    assert isinstance(thing, Thing)
    return thing.last, 0


class Traffic:
    """Four things that come again after as many others as `lru` forgets them over."""

    def __init__(self, regret: float = 0.005) -> None:
        self.guard = Guard(by_worth, by_use, selective=True, regret=regret)
        self.guard.fit(8, 8)
        self.good = [Thing(draw, worth=1.0) for draw in range(4)]
        self.rules = False
        self.changes: list[int] = []
        self._draws = itertools.count(100)
        self.n = 0

    def serve(self, n: int, *, there: bool) -> None:
        """Serve `n` things; while the order rules the cache has the good ones, or has nothing."""
        for _ in range(n):
            self.n += 1
            at = self.n % 16
            thing = self.good[at] if at < 4 else Thing(next(self._draws))
            thing.last = self.n
            was_there = (there and at < 4) if self.rules else None
            self.guard.serve(thing, 10, fits=True, there=was_there)
            if self.guard.approves(rules=self.rules) != self.rules:
                self.rules = not self.rules
                self.changes.append(self.n)


def test_the_order_rules_once_its_shadow_is_ahead() -> None:
    traffic = Traffic()
    traffic.serve(300, there=True)
    assert traffic.rules
    assert len(traffic.changes) == 1
    traffic.serve(5000, there=True)
    assert traffic.rules
    assert traffic.guard.learned.saved_tokens > traffic.guard.recent.saved_tokens


def test_it_rules_no_more_when_the_cache_itself_falls_behind() -> None:
    """The shadow says that all is well; what counts is what is reused."""
    traffic = Traffic()
    traffic.guard.recent.capacity_bytes = 40  # so that recency saves as much
    traffic.serve(40, there=True)
    traffic.rules = True
    traffic.serve(3000, there=False)
    assert not traffic.rules


@pytest.mark.parametrize("n", [20_000, 80_000])
def test_who_was_wrong_waits_twice_as_long_each_time(n: int) -> None:
    traffic = Traffic(regret=0.0)
    traffic.serve(50, there=True)
    # Both would have the good ones from now on, and the cache has nothing while the order rules.
    traffic.guard.recent.capacity_bytes = 8
    for _ in range(n // 100):
        lead = traffic.guard.learned.saved_tokens - traffic.guard.recent.saved_tokens
        if not traffic.rules:  # the shadow of the order is let win, whatever was before
            traffic.guard.recent.saved_tokens -= max(0.0, 50.0 - lead)
        else:
            traffic.guard.recent.saved_tokens += 500.0
        traffic.serve(100, there=False)
    began = traffic.changes[::2]
    waits = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert 3 <= len(waits) <= 2 + (n // guard._PATIENCE).bit_length()
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(waits[1:]))


def test_the_sample_is_as_large_as_the_cache_lets_it_be() -> None:
    each = Guard(by_worth, by_use, selective=True, regret=0.0)
    each.fit(100, 1000)
    assert (each.mask, each.recent.capacity_bytes) == (0, 1000)
    for draw in range(64):
        each.serve(Thing(draw), 1, fits=True, there=None)
    each.fit(8 * guard.SAMPLE, 1000)
    assert (each.mask, each.recent.capacity_bytes) == (7, 125)
    assert len(each.recent) == len(each.learned) == 8
    each.serve(Thing(3), 1, fits=True, there=None)
    assert len(each.recent) == 8  # is not in the sample
    for _ in range(3):
        each.fit(10, 1000)
    assert (each.mask, each.recent.capacity_bytes) == (0, 1000)


def test_nothing_is_kept_of_a_prompt_that_does_not_fit() -> None:
    each = Guard(by_worth, by_use, selective=False, regret=0.0)
    each.fit(4, 4)
    each.serve(Thing(1), 10, fits=True, there=None)
    for draw in range(2, 9):
        each.serve(Thing(draw), 10, fits=False, there=None)
    assert len(each.recent) == len(each.learned) == 1
    each.serve(Thing(1), 10, fits=True, there=None)
    assert each.recent.saved_tokens == each.learned.saved_tokens == 10
    assert each.served_tokens == pytest.approx(90, rel=0.01)
