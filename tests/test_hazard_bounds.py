"""What the learned policy remembers: bounded, and of the right things, whatever comes."""

from __future__ import annotations

import random

import pytest

from llamakeep.policy import Hazard, guard, hazard
from llamakeep.stores.memory import MemoryStore
from llamakeep.tree import PrefixTree
from tests.test_eviction import Time
from tests.test_hazard import WAITS, check_notes, request, serve
from tests.test_policy_watching import Cache
from tests.test_tree import PLAIN, array, keep, random_tokens


@pytest.fixture
def learns_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazard, "_LEARN_AFTER", 8)


def test_what_is_remembered_is_bounded(learns_soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazard, "_GHOSTS", 30)
    monkeypatch.setattr(guard, "SAMPLE", 16)
    monkeypatch.setattr(hazard, "_CASES", 64)
    rng = random.Random(3)
    clock = Time()
    tree = PrefixTree(MemoryStore(200), PLAIN, segment_tokens=4, policy=Hazard(), clock=clock)
    policy = tree.policy
    assert isinstance(policy, Hazard)
    for turn in range(1500):
        clock.now += rng.choice(WAITS)
        tree.namespace = bytes([turn % 2])
        ids = [rng.choice([1, 2, 3])] * 9
        ids += [rng.randrange(250) for _ in range(rng.randrange(1, 9))]
        serve(tree, ids[: rng.randrange(1, len(ids) + 1)])
        n_kept = sum(1 for node in tree._nodes() for _ in node.states())
        n_notes = n_kept + len(policy._ghosts)
        assert len(policy._ghosts) <= max(30, 2 * n_kept)
        assert len(policy._runs) <= n_notes
        assert len(policy._given_up) <= n_notes + 4 * (policy._events + 8)
        assert len(policy._ended) + len(policy._runs_now) <= n_notes
        assert len(policy._cases) <= 64
        for shadow in (policy._guard.learned, policy._guard.recent):
            assert len(shadow) <= max(n_notes, shadow.capacity_bytes)
            assert shadow.used_bytes == sum(it.n_bytes for it in shadow._items.values())
            assert len(shadow._queue._heap) <= 3 * len(shadow) + 80
    assert policy._guard.mask > 0  # a sample
    assert all(
        not item.of.draw & policy._guard.mask for item in policy._guard.learned._items.values()
    )
    assert policy._guard.learned.capacity_bytes == 200 // (policy._guard.mask + 1)
    check_notes(policy, tree)


def test_a_ghost_whose_name_a_grown_tail_takes_is_forgotten(learns_soon: None) -> None:
    """It would be waiting for ever."""
    clock = Time()
    tree = PrefixTree(MemoryStore(12), PLAIN, segment_tokens=8, policy=Hazard(), clock=clock)
    policy = tree.policy
    assert isinstance(policy, Hazard)
    for turn in range(40):
        tokens = random_tokens(6, 1)
        for each in (tokens[:3], tokens, random_tokens(8, 2 + turn % 2)):
            clock.now += 5
            keep(tree, each)
            check_notes(policy, tree)
    assert len(policy._runs) <= len(tree) + len(policy._ghosts)


def test_a_clock_that_is_put_back_costs_nothing(learns_soon: None) -> None:
    """Until it has come as far again all is one moment: nothing waits, nothing piles up."""
    clock = Time(1e6)
    tree = PrefixTree(MemoryStore(60), PLAIN, segment_tokens=4, policy=Hazard(), clock=clock)
    policy = tree.policy
    assert isinstance(policy, Hazard)
    rng = random.Random(5)
    for _ in range(100):
        clock.now += 1
        serve(tree, request(rng))
    clock.now -= 5e5
    used = array(0, 0, 0, 0, 0, 0)
    for _ in range(500):
        clock.now += 1
        serve(tree, used.tolist())
        check_notes(policy, tree)
    for turn in range(300):
        clock.now += 1
        keep(tree, random_tokens(8, turn))
        check_notes(policy, tree)
    assert policy._now == 1e6 + 100
    clock.now += 1e6
    serve(tree, used.tolist())
    assert policy._now == clock.now
    check_notes(policy, tree)


def test_what_leaves_twice_leaves_once() -> None:
    policy = Hazard()
    cache = Cache(policy, 10)
    thing = cache.put("a")
    cache.put("b")
    cache.evict()
    policy.leaves(thing, cache.clock.now, evicted=False)
    policy.leaves(thing, cache.clock.now, evicted=True)
    assert policy._n_kept == 1
    assert [note.name for note in policy._ghosts.values()] == [thing.name]


def test_what_is_lost_is_known_when_it_comes_back_as_what_went_is() -> None:
    policy = Hazard()
    cache = Cache(policy, 10)
    cache.put("a")
    cache.use("a", "a")
    cache.evict()
    assert cache.put("a").memo.turns == 4
    cache.lose("a")
    assert cache.put("a").memo.turns == 5


def test_things_of_no_bytes_are_no_matter_of_the_shadows(learns_soon: None) -> None:
    policy = Hazard()
    cache = Cache(policy, 4)
    for turn in range(200):
        cache.put(f"n{turn}", 0)
        cache.put(f"a{turn}", 1)
        if turn % 7 == 6:
            cache.use(f"n{turn}", f"a{turn - 1}")
    assert policy._n_kept == len(cache.kept)
    assert len(policy._guard.recent) == 4
    assert {item.n_bytes for item in policy._guard.recent._items.values()} == {1}


@pytest.mark.parametrize("capacity_bytes", [0, 5])
def test_states_that_can_never_be_kept(capacity_bytes: int, learns_soon: None) -> None:
    clock = Time()
    tree = PrefixTree(
        MemoryStore(capacity_bytes), PLAIN, segment_tokens=8, policy=Hazard(), clock=clock
    )
    policy = tree.policy
    assert isinstance(policy, Hazard)
    for turn in range(200):
        clock.now += 1
        tokens = random_tokens(8, turn % 40)
        assert keep(tree, tokens).refused
    assert (tree.store.used_bytes, len(tree), policy._n_kept) == (0, 0, 0)
    assert len(policy._ghosts) == 40
    assert len(policy._guard.recent) == len(policy._guard.learned) == 0
    check_notes(policy, tree)


def test_namespaces_are_told_apart_and_share_the_room() -> None:
    clock = Time()
    tree = PrefixTree(MemoryStore(20), PLAIN, segment_tokens=8, policy=Hazard(), clock=clock)
    policy = tree.policy
    assert isinstance(policy, Hazard)
    tokens = random_tokens(8, 1)
    for namespace in (b"a", b"b", b"a"):
        clock.now += 4
        tree.namespace = namespace
        tree.touch(tokens, tree.match_prefix(tokens).n_tokens)
        keep(tree, tokens)
    notes = [node.segment.memo for node in tree._nodes() if node.segment is not None]
    assert sorted((note.turns, note.gap_s) for note in notes) == [(1, -1.0), (2, 8.0)]
