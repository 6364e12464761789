"""Policies that watch: their orders by hand, their options, and one cache for each."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from llamakeep.errors import InvalidValue
from llamakeep.policy import (
    DEFAULT_POLICY,
    NOT_WATCHING,
    GreedyDualSizeFrequency,
    Hazard,
    LeastRecentlyUsed,
    Random,
    SegmentedLRU,
    get_policy,
    parse_policy,
    policy_below,
    watcher_of,
)
from llamakeep.policy.queue import EvictionQueue
from tests.test_eviction import Time
from tests.test_tree import byte_tree, keep, random_tokens

WATCHING = ["gdsf", "hazard", "random", "slru"]


class Thing:
    """A kept thing of a cache that tells its policy what happens to it."""

    def __init__(self, name: str, number: int, now: float, n_bytes: int, n_tokens: int) -> None:
        self.name = name.encode().ljust(8)
        self.created = self.last_used = now
        self.sequence = number
        self.n_bytes, self.n_tokens = n_bytes, n_tokens
        self.hits = self.queued = 0
        self.memo: Any = None
        self.is_checkpoint = False

    @property
    def marginal_tokens(self) -> int:
        return self.n_tokens


class Cache:
    """Things without neighbours, kept up to a number of bytes, as the tree does it."""

    def __init__(self, policy: Any, capacity_bytes: int) -> None:
        self.policy, self.capacity_bytes = policy, capacity_bytes
        self.clock = Time()
        self.kept: dict[str, Thing] = {}
        self.gone: list[str] = []
        self._numbers = itertools.count()
        self.queue = EvictionQueue[Thing](policy, self.clock, self._is_kept)
        policy.begin_watching(self.queue.look_again, lambda: self.capacity_bytes, may_refuse=True)

    def _is_kept(self, thing: Thing) -> bool:
        return thing in self.kept.values()

    @property
    def used_bytes(self) -> int:
        return sum(thing.n_bytes for thing in self.kept.values())

    def new(self, name: str, n_bytes: int = 1, n_tokens: int = 1) -> Thing:
        self.clock.now += 1
        thing = Thing(name, next(self._numbers), self.clock.now, n_bytes, n_tokens)
        self.policy.enters(thing, self.clock.now, None)
        return thing

    def put(self, name: str, n_bytes: int = 1, n_tokens: int = 1) -> Thing:
        thing = self.new(name, n_bytes, n_tokens)
        while self.used_bytes + n_bytes > self.capacity_bytes:
            assert self.evict()
        self.kept[name] = thing
        self.queue.push(thing)
        return thing

    def evict(self) -> str:
        thing = self.queue.pop(lambda _: True)
        if thing is None:
            return ""
        least = min(self.kept.values(), key=lambda it: self.policy.rank(it, self.clock.now))
        assert thing is least
        name = next(name for name, kept in self.kept.items() if kept is thing)
        del self.kept[name]
        self.policy.leaves(thing, self.clock.now, evicted=True)
        self.gone.append(name)
        return name

    def use(self, *names: str) -> None:
        for name in names:
            thing = self.kept[name]
            self.clock.now += 1
            thing.last_used, thing.hits = self.clock.now, thing.hits + 1
            self.policy.used(thing, self.clock.now)

    def lose(self, name: str) -> None:
        self.policy.leaves(self.kept.pop(name), self.clock.now, evicted=False)

    def grow(self, old: str, name: str, n_bytes: int) -> None:
        """Let a longer thing take the place of a shorter one."""
        shorter = self.kept.pop(old)
        thing = Thing(name, next(self._numbers), self.clock.now, n_bytes, n_bytes)
        thing.hits = shorter.hits
        self.policy.replaces(thing, shorter)
        self.kept[name] = thing
        self.queue.push(thing)

    def order(self) -> str:
        """Let everything go."""
        return "".join(iter(self.evict, ""))


# -- slru ------------------------------------------------------------------------------------------


def test_what_was_used_again_goes_after_what_was_not() -> None:
    cache = Cache(SegmentedLRU(), 5)
    for name in "abcde":
        cache.put(name)
    cache.use("b", "a")
    assert cache.order() == "cdeba"


def test_beyond_the_share_the_least_recently_used_goes_back_among_the_others() -> None:
    """As if it had just come: after what was there, before what comes."""
    cache = Cache(SegmentedLRU(0.5), 6)
    for name in "abcdef":
        cache.put(name)
    cache.use("a", "b", "c")  # half of 6
    assert cache.policy.rank(cache.kept["a"], 0.0)[0] == 1.0
    cache.use("d")
    assert cache.policy.rank(cache.kept["a"], 0.0)[0] == 0.0
    cache.evict()  # of e, f, a
    cache.put("g")
    assert cache.gone == ["e"]
    assert cache.order() == "fagbcd"


def test_a_use_protects_anew_what_had_gone_back() -> None:
    cache = Cache(SegmentedLRU(0.5), 4)
    for name in "abcd":
        cache.put(name)
    cache.use("a", "b", "c")  # a goes back
    cache.use("a")  # and b
    assert cache.order() == "dbca"


def test_bytes_count_not_things() -> None:
    cache = Cache(SegmentedLRU(0.5), 20)
    for name, n_bytes in (("a", 4), ("b", 4), ("c", 8), ("d", 1)):
        cache.put(name, n_bytes)
    cache.use("a", "b")  # 8 of 10
    cache.use("c")  # both go back: 8 are left
    assert cache.order() == "dabc"


def test_one_thing_is_protected_however_large_it_is() -> None:
    cache = Cache(SegmentedLRU(0.1), 10)
    for name, n_bytes in (("a", 9), ("b", 1)):
        cache.put(name, n_bytes)
    cache.use("a")
    assert cache.order() == "ba"


def test_the_share_is_of_what_can_be_kept_at_present() -> None:
    cache = Cache(SegmentedLRU(0.5), 100)
    for name in "abcd":
        cache.put(name)
    cache.use("a", "b", "c")
    cache.capacity_bytes = 4
    cache.use("d")  # two may stay
    assert cache.order() == "abcd"
    for name in "abcd":
        cache.put(name)
    cache.use("a", "b", "c")
    cache.put("e")
    assert cache.gone[-1] == "d"
    assert cache.order() == "aebc"


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    cache = Cache(SegmentedLRU(0.5), 20)
    cache.put("a", 4)
    cache.put("b", 4)
    cache.put("c", 1)
    cache.use("a", "b")
    cache.grow("a", "A", 6)  # as protected as before, in its place; 10 of 10
    assert cache.policy.rank(cache.kept["A"], 0.0) == (1.0, 4)
    cache.use("c")  # 11: A goes back
    assert cache.order() == "Abc"
    assert cache.policy._protected_bytes == 0


def test_what_leaves_takes_its_share_along() -> None:
    cache = Cache(SegmentedLRU(0.5), 6)
    for name in "abcdef":
        cache.put(name)
    cache.use("a", "b", "c")
    lost = cache.kept["b"]
    cache.lose("b")
    cache.policy.leaves(lost, 0.0, evicted=False)  # again: no matter
    cache.use("d")
    assert cache.order() == "efacd"
    assert (cache.policy._protected, cache.policy._protected_bytes) == ({}, 0)


# -- gdsf ------------------------------------------------------------------------------------------


def test_the_formula_to_the_last_digit() -> None:
    cache = Cache(GreedyDualSizeFrequency(), 100)
    thing = cache.put("a", 7, 3)
    assert cache.policy.rank(thing, 0.0) == (1 * (3 / 7), 0)
    cache.use("a", "a")
    assert cache.policy.rank(thing, 9.0) == (3 * (3 / 7), 0)
    cache.evict()
    other = cache.put("b", 11, 5)
    assert cache.policy.rank(other, 0.0) == (3 * (3 / 7) + 5 / 11, 1)
    cache.use("b")
    assert cache.policy.rank(other, 0.0) == (3 * (3 / 7) + 2 * (5 / 11), 1)


def test_newcomers_begin_where_the_last_one_went() -> None:
    cache = Cache(GreedyDualSizeFrequency(), 3)
    for name in "abc":
        cache.put(name)
    cache.use("a", "a")  # 3; the others 1
    for name in "defg":  # 1, for it came before b went, and 2, 2, 2
        cache.put(name)
    assert cache.gone == ["b", "c", "d", "e"]
    assert cache.order() == "fga"


def test_what_is_lost_or_refused_does_not_let_newcomers_begin_higher() -> None:
    cache = Cache(GreedyDualSizeFrequency(), 10)
    cache.put("a", 1, 9)
    cache.lose("a")
    cache.policy.refused(cache.new("b", 1, 8), 0.0)
    assert cache.policy.rank(cache.put("c", 1, 5), 0.0)[0] == 5.0
    cache.evict()
    assert cache.policy.rank(cache.put("d", 1, 5), 0.0)[0] == 10.0


def test_what_takes_no_room_goes_last_and_leaves_no_trace() -> None:
    cache = Cache(GreedyDualSizeFrequency(), 2)
    cache.put("n", 0, 4)
    cache.put("a", 1, 10**9)
    assert cache.order() == "an"
    assert cache.policy.rank(cache.put("b", 1, 1), 0.0)[0] == 10**9 + 1


def test_a_longer_tail_keeps_its_rank_until_it_is_used() -> None:
    cache = Cache(GreedyDualSizeFrequency(), 9)
    cache.put("a", 2, 4)
    cache.grow("a", "A", 3)
    assert cache.policy.rank(cache.kept["A"], 0.0)[0] == 2.0
    cache.use("A")
    assert cache.policy.rank(cache.kept["A"], 0.0)[0] == 2.0  # 2 * 3 / 3


# -- random ----------------------------------------------------------------------------------------

SEEDS = 2000


def within_five_sigma(counts: Counter[str], n: int, share: float) -> None:
    sigma = (n * share * (1 - share)) ** 0.5
    for name, count in counts.items():
        assert abs(count - n * share) <= 5 * sigma, (name, count)


def test_all_that_is_kept_is_as_likely_to_go() -> None:
    counts: Counter[str] = Counter(dict.fromkeys("abcde", 0))
    for seed in range(SEEDS):
        cache = Cache(Random(seed), 5)
        for name in "abcde":
            cache.put(name)
        cache.use("a", "a", "b")  # no matter
        counts[cache.evict()] += 1
    assert len(counts) == 5
    within_five_sigma(counts, SEEDS, 0.2)


def test_what_comes_later_is_as_likely_to_go_as_what_was_there() -> None:
    counts: Counter[str] = Counter(dict.fromkeys("abcd", 0))
    for seed in range(SEEDS):
        cache = Cache(Random(seed), 10)
        for name in ("x", "y", "z", "a", "b"):
            cache.put(name)
        for name in ("x", "y", "z"):  # what went before says nothing of who goes next
            if name in cache.kept:
                cache.lose(name)
        cache.put("w")
        cache.evict()
        for name in "abcd":
            if name not in cache.kept:
                cache.put(name)
        for name in cache.kept.keys() - set("abcd"):
            cache.lose(name)
        counts[cache.evict()] += 1
    within_five_sigma(counts, SEEDS, 0.25)


def test_what_is_refused_lets_no_time_pass() -> None:
    """A prompt that cannot be kept would else make all that is kept go before what comes."""
    counts: Counter[str] = Counter(dict.fromkeys("abcd", 0))
    for seed in range(SEEDS):
        cache = Cache(Random(seed), 10)
        cache.put("a")
        cache.put("b")
        for _ in range(20):
            cache.policy.refused(cache.new("r", 99), 0.0)
        cache.put("c")
        cache.put("d")
        counts[cache.evict()] += 1
    within_five_sigma(counts, SEEDS, 0.25)


def test_equal_seeds_equal_choices() -> None:
    def order(policy: Any) -> str:
        cache = Cache(policy, 20)
        for name in "abcdefghijklmnopqrst":
            cache.put(name)
        return cache.order()

    policy = Random(5)
    assert order(policy) == order(policy.fresh()) == order(Random(5)) == order(Random(5.0))
    assert len({order(Random(seed)) for seed in range(20)}) == 20
    assert order(Random()) == order(Random(0))


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slru", "SegmentedLRU(protected=0.8)"),
        ("slru:protected=0.25", "SegmentedLRU(protected=0.25)"),
        ("slru:protected=1", "SegmentedLRU(protected=1)"),
        ("gdsf", "GreedyDualSizeFrequency()"),
        ("random", "Random(seed=0)"),
        ("random:seed=7", "Random(seed=7)"),
        ("hazard", "Hazard(guard=1, regret=0.005)"),
        ("hazard:guard=0", "Hazard(guard=0, regret=0.005)"),
    ],
)
def test_options_that_are_good(text: str, said: str) -> None:
    policy: Any = parse_policy(text)
    assert repr(policy) == repr(policy.fresh()) == said
    assert policy.fresh() is not policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slru:protected=0", "protected must be above 0 and at most 1, not 0.0"),
        ("slru:protected=1.5", "protected must be above 0 and at most 1, not 1.5"),
        ("slru:protected=nan", "protected must be above 0 and at most 1, not nan"),
        ("slru:share=1", "policy 'slru' has no option 'share'; known: protected"),
        ("gdsf:seed=1", "policy 'gdsf' has no option 'seed'; known: it has none"),
        ("random:seed=-1", "seed must be 0 or more, not -1"),
        ("random:seed=0.5", "seed must be a whole number, not 0.5"),
        ("random:seed=nan", "seed must be a whole number, not nan"),
        ("random:seed=inf", "seed must be a whole number, not inf"),
        ("hazard:guard=2", "guard must be 0 or 1, not 2.0"),
        ("hazard:guard=nan", "guard must be 0 or 1, not nan"),
    ],
)
def test_options_that_are_bad(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_policy(text)


@pytest.mark.parametrize(
    ("policy", "value"), [(SegmentedLRU, "1"), (SegmentedLRU, None), (Random, "1"), (Hazard, "on")]
)
def test_arguments_that_are_no_numbers(policy: Any, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"not {value!r}"):
        policy(value)


# -- one cache for each ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WATCHING)
def test_one_policy_watches_one_cache(name: str) -> None:
    policy: Any = get_policy(name)
    policy.begin_watching(lambda kept: None, lambda: 1, may_refuse=True)
    with pytest.raises(InvalidValue, match=r"\) watches a cache already; each needs its own"):
        policy.begin_watching(lambda kept: None, lambda: 1, may_refuse=True)
    with pytest.raises(InvalidValue, match="watches a cache already"):
        watcher_of(policy, lambda kept: None, lambda: 1, may_refuse=True)
    assert (
        watcher_of(LeastRecentlyUsed(), lambda kept: None, lambda: 1, may_refuse=True)
        is NOT_WATCHING
    )


@pytest.mark.parametrize("name", WATCHING)
def test_an_object_given_to_two_trees_serves_neither(name: str) -> None:
    policy = get_policy(name)
    trees = [byte_tree(40, segment_tokens=8, policy=policy) for _ in range(2)]
    policies = {id(tree.policy) for tree in trees}
    assert len(policies | {id(policy)}) == 3
    assert {repr(tree.policy) for tree in trees} == {repr(policy)}
    for seed in range(20):
        for tree in trees:
            keep(tree, random_tokens(20, seed))
    assert list(trees[0].store) == list(trees[1].store)


def test_a_policy_of_anyones_that_watches_is_taken_as_it_is() -> None:
    class Own(SegmentedLRU):
        name = "own"

    class Alien:
        name = "alien"
        selective = False

        def __init__(self) -> None:
            self.heard: list[str] = []

        def begin_watching(self, look_again: Any, capacity_bytes: Any, *, may_refuse: bool) -> None:
            self.heard.append(f"begin {capacity_bytes()}")

        def __getattr__(self, name: str) -> Any:
            if name not in ("enters", "used", "leaves", "refused", "replaces"):
                raise AttributeError(name)
            return lambda *_, **__: self.heard.append(name)

        def rank(self, kept: Any, now: float) -> tuple[float, int]:
            return 0.0, kept.sequence

    assert isinstance(byte_tree(policy=Own()).policy, Own)
    alien = Alien()
    tree = byte_tree(40, segment_tokens=8, policy=alien)
    assert tree.policy is alien
    keep(tree, random_tokens(12, 1))
    keep(tree, random_tokens(30, 2))
    keep(tree, random_tokens(99, 3))  # does not fit: what is free is not enough for a span
    assert alien.heard[:5] == ["begin 40", "enters", "enters", "enters", "enters"]
    # Of what is evicted it hears twice.
    assert Counter(alien.heard) == {
        "begin 40": 1, "enters": 6 + 13, "leaves": 2, "refused": 13,
    }  # fmt: skip


@pytest.mark.parametrize("name", WATCHING)
def test_below_memory_recency_decides_where_one_watches(name: str) -> None:
    assert policy_below(name) == policy_below(get_policy(name)) == "lru"


def test_below_memory_the_others_decide_as_in_memory() -> None:
    lru = LeastRecentlyUsed()
    assert policy_below(lru) is lru
    for name in ("lru", "marginal", "oldest", "tokens-per-byte", "unknown"):
        assert policy_below(name) == name
    assert policy_below(DEFAULT_POLICY) == "lru"
