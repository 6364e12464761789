"""The learned policy: as `lru` until it has learned, the least rank from then on, and bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.policy import Hazard, LeastRecentlyUsed, guard, hazard, parse_policy
from llamakeep.policy.hazard import _FEW
from llamakeep.policy.survival import bucket_of
from llamakeep.runtime.base import Traits
from llamakeep.states import Saved
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.sized import SizedTier
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import IntArray
from llamakeep.tree import PrefixTree
from tests.test_eviction import Searched, Time
from tests.test_policy_watching import Cache, Thing
from tests.test_tree import NO_ROWS, PLAIN, ROLLING, array, keep, keep_checkpoint, random_tokens

TREES = [
    pytest.param(t, id=i) for t, i in ((PLAIN, "rows"), (ROLLING, "both"), (NO_ROWS, "rolling"))
]
WAITS = [0.0, 0.3, 2.0, 2.0, 15.0, 90.0, 1000.0]


@pytest.fixture
def learns_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazard, "_LEARN_AFTER", 8)


def request(rng: random.Random, longest: int = 20) -> list[int]:
    """Most come again: few different begins, and a long tail of others."""
    ids = [rng.choice([0, 0, 0, 1])]
    while len(ids) < longest and rng.random() < 0.9:
        ids.append(int(rng.random() < 0.1))
    return ids


def serve(tree: PrefixTree, ids: list[int], checkpoint_bytes: int = 3) -> int:
    """Restore what is there, and keep the rest, as a sequence does."""
    tokens = array(*ids)
    n_tokens = tree.match_prefix(tokens, limit=tokens.size - 1).n_tokens
    tree.touch(tokens, n_tokens)
    if not keep(tree, tokens).refused and tree.traits.rolling:
        keep_checkpoint(tree, tokens, checkpoint_bytes)
    return n_tokens


class Recorded(MemoryStore[Any]):
    """Remembers what went, in order."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.gone: list[bytes] = []

    def delete(self, name: bytes) -> bool:
        self.gone.append(name)
        return super().delete(name)


def check_notes(policy: Hazard, tree: PrefixTree) -> None:
    """Prove that notes, runs and ghosts are those of what is kept and of what went."""
    kept = [kept for node in tree._nodes() for kept in node.states()]
    notes = [kept.memo for kept in kept]
    assert all(note.kept is each for note, each in zip(notes, kept, strict=True))
    assert all(note.name == each.name for note, each in zip(notes, kept, strict=True))
    assert policy._n_kept == len(kept)
    assert all(note.kept is None and name == note.name for name, note in policy._ghosts.items())
    notes += policy._ghosts.values()
    runs: dict[int, int] = {}
    for note in notes:
        assert note.run is not None
        assert note in note.run.notes
        runs[note.run.number] = runs.get(note.run.number, 0) + 1
    assert runs == {number: run.n for number, run in policy._runs.items()}
    for run in policy._runs.values():
        assert run.n <= run.size
        assert len(run.notes) <= 2 * run.n + _FEW
    assert len(policy._due) <= 4 * (len(notes) + hazard._LEARN_AFTER) + policy._events


# -- before it has learned -------------------------------------------------------------------------


def mirrored(traits: Traits, seed: int, n: int, policy: str) -> tuple[PrefixTree, PrefixTree]:
    """Serve the same with `lru` and with another policy, and compare all that is decided."""
    rng = random.Random(seed)
    clock = Time()
    trees = [
        PrefixTree(
            Recorded(rng.choice([40, 60, 90]) if other else 0),
            traits,
            segment_tokens=4,
            max_checkpoints=5,
            policy=parse_policy(name),
            clock=clock,
        )
        for name, other in (("lru", True), (policy, False))
    ]
    one, other = (tree.store for tree in trees)
    assert isinstance(one, Recorded)
    assert isinstance(other, Recorded)
    other.resize(one.capacity_bytes)
    for _ in range(n):
        clock.now += rng.choice(WAITS)
        if rng.random() < 0.02:
            for tree in trees:
                tree.clear()
        ids = request(rng)
        assert serve(trees[0], ids) == serve(trees[1], ids)
        assert one.gone == other.gone
        assert list(one) == list(other)
    assert trees[0].counters == trees[1].counters
    assert trees[0].counters.evicted_segments + trees[0].counters.evicted_checkpoints
    return trees[0], trees[1]


@pytest.mark.parametrize("traits", TREES)
@pytest.mark.parametrize("seed", range(3))
def test_it_decides_as_lru_before_it_has_learned(traits: Traits, seed: int) -> None:
    tree = mirrored(traits, seed, 60, "hazard")[1]
    policy = tree.policy
    assert isinstance(policy, Hazard)
    assert policy._taught is None
    check_notes(policy, tree)


@pytest.mark.parametrize("traits", TREES)
@pytest.mark.parametrize("seed", range(3))
def test_it_decides_as_lru_wherever_it_does_not_rule(
    traits: Traits, seed: int, learns_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_LEAD", 1e9)
    tree = mirrored(traits, seed, 120, "hazard")[1]
    policy = tree.policy
    assert isinstance(policy, Hazard)
    assert policy._taught is not None
    assert not policy.rules
    assert not policy.selective
    check_notes(policy, tree)


def test_the_rank_of_what_it_knows_nothing_of_is_that_of_lru() -> None:
    policy = Hazard(guard=0)
    policy.rules = True
    thing = Thing("a", 7, 3.0, 1, 1)
    assert policy.rank(thing, 9.0) == LeastRecentlyUsed().rank(thing, 9.0)
    policy.used(thing, 4.0)  # of which it never heard
    policy.replaces(Thing("b", 8, 3.0, 1, 1), thing)
    policy.leaves(thing, 4.0, evicted=True)
    assert (policy._n_kept, policy._ghosts) == (0, {})


# -- while it rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("traits", TREES)
@pytest.mark.parametrize("policy", ["hazard:guard=0", "hazard:regret=0.5"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_what_goes_has_the_least_rank(traits: Traits, policy: str, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hazard, "_LEARN_AFTER", 8)
        patch.setattr(guard, "_LEAD", -0.5)  # rules soon, also where it is no better
        patch.setattr(hazard, "_GHOSTS", 20)
        for _ in ruling(traits, policy, seed):
            pass


def ruling(traits: Traits, text: str, seed: int) -> Iterator[Searched]:
    rng = random.Random(seed)
    clock = Time()
    tree = Searched(
        MemoryStore(rng.choice([40, 60, 90])),
        traits,
        segment_tokens=4,
        max_checkpoints=5,
        policy=parse_policy(text),
        clock=clock,
    )
    policy = tree.policy
    assert isinstance(policy, Hazard)
    for _ in range(120):
        clock.now += rng.choice(WAITS)
        if rng.random() < 0.01:
            tree.clear()
        if rng.random() < 0.1:
            tree.touch(array(*request(rng)), 4)
        if rng.random() < 0.1:
            serve(tree, [5, *(rng.randrange(9) for _ in range(9))])
        tree.namespace = rng.choice([b"", b"", b"other"])
        serve(tree, request(rng))
        check_notes(policy, tree)
        yield tree
    assert policy.rules or policy._guarded
    assert tree.n_compared


def test_all_of_it_happens_while_it_rules(learns_soon: None) -> None:
    """Buckets change, ghosts come back, newcomers are refused, tails are replaced."""
    buckets, back, refused, grown, compared = set(), 0, 0, 0, 0
    for seed in range(4):
        for tree in ruling(PLAIN, "hazard:guard=0", seed):
            policy = tree.policy
            assert isinstance(policy, Hazard)
            if not policy.rules:
                continue
            buckets |= {run.bucket for run in policy._runs.values()}
            kept = [kept for node in tree._nodes() for kept in node.states()]
            back += sum(each.memo.turns > each.hits + 1 for each in kept)
            grown += sum(int.from_bytes(k.name[:4], "little") != k.memo.draw for k in kept)
            refused += tree.counters.refused_segments
            compared += tree.n_compared
    assert len(buckets) > 8
    assert min(back, refused, grown, compared) > 100


def test_a_use_that_lets_a_rank_fall_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come back soon is worth less than what has just come, where that is so."""
    policy = Hazard(guard=0)
    cache = Cache(policy, 100)
    monkeypatch.setattr(hazard, "learn", _worth_by_turns)
    for name in ("a", "b", "c"):
        cache.put(name)
    cache.clock.now += 1
    policy._go_to(cache.clock.now)
    policy._learn()
    assert policy.rules
    cache.queue.pop(lambda thing: False, below=(-1.0, 0))  # all are ranked
    for name in "abc":
        cache.queue.push(cache.kept[name])
    cache.evict()
    assert cache.gone == ["a"]  # of equals, the oldest
    cache.use("c")
    assert cache.order() == "cb"


def _worth_by_turns(groups: Any, waits: Any) -> Any:
    from llamakeep.policy.survival import N_BUCKETS, Learned

    worths = [[10.0 / (1 + klass % 5)] * N_BUCKETS for klass in range(20)]
    return Learned(0.0, worths)


def test_of_equal_worth_the_oldest_use_goes_first() -> None:
    policy = Hazard(guard=0)
    cache = Cache(policy, 100)
    for name in "abcd":
        cache.put(name)
    policy._go_to(cache.clock.now + 1)
    policy._learn()
    assert policy.rules
    assert cache.order() == "abcd"


def test_what_takes_no_room_goes_last() -> None:
    policy = Hazard(guard=0)
    cache = Cache(policy, 100)
    cache.put("n", 0)
    for name in "abc":
        cache.put(name)
    policy._go_to(cache.clock.now + 1)
    policy._learn()
    assert cache.order() == "abcn"


# -- what is refused -------------------------------------------------------------------------------


def with_refusals(tree: PrefixTree, clock: Time) -> tuple[IntArray, Saved]:
    """Teach that a few prompts come again and others never, and offer one of the latter."""
    used = [random_tokens(16, seed) for seed in range(4)]
    for turn in range(60):
        clock.now += 2
        serve(tree, used[turn % 4].tolist())
        if turn % 3 == 0:
            clock.now += 2
            keep(tree, random_tokens(8, 100 + turn))
    policy = tree.policy
    assert isinstance(policy, Hazard)
    assert policy.rules
    clock.now += 2
    for each in used:
        serve(tree, each.tolist())
    clock.now += 2
    offered = random_tokens(20, 999)
    return offered, keep(tree, offered)


def test_a_newcomer_that_is_refused_evicts_nothing(learns_soon: None) -> None:
    clock = Time()
    store = Recorded(66)
    tree = Searched(store, PLAIN, segment_tokens=8, policy=Hazard(guard=0), clock=clock)
    policy = tree.policy
    assert isinstance(policy, Hazard)
    offered, saved = with_refusals(tree, clock)
    assert saved.refused == ""  # nothing went wrong
    assert saved.n_tokens == tree.match_prefix(offered).n_tokens < 20
    gone, before = list(store.gone), list(store)
    n_refused = tree.counters.refused_segments
    clock.now += 1
    assert keep(tree, offered).n_tokens == saved.n_tokens
    assert tree.counters.refused_segments == n_refused + 1
    assert (store.gone, list(store)) == (gone, before)
    # All of its spans are known, none is kept.
    spans = [(0, 8), (8, 16), (16, 20)]
    names = tree._names_along(offered)
    for start, end in spans[saved.n_tokens // 8 :]:
        name = names.segment(start, end).name
        assert name not in store
        ghost = policy._ghosts[name]
        assert (ghost.turns, ghost.gap_s) == (2, 1.0)  # known again when it came back
        assert ghost.n_bytes == end - start
    check_notes(policy, tree)


def test_the_reason_of_what_does_not_fit_is_that(learns_soon: None) -> None:
    clock = Time()
    tree = PrefixTree(MemoryStore(66), PLAIN, segment_tokens=8, policy=Hazard(guard=0), clock=clock)
    with_refusals(tree, clock)
    clock.now += 2
    assert "100 bytes of tokens 0 to 100 do not fit" in keep(tree, random_tokens(100, 77)).refused


def test_what_is_refused_goes_into_the_tier_below(learns_soon: None) -> None:
    clock = Time()
    store: Any = TieredStore(MemoryStore(66), SizedTier(10_000, clock=clock))
    tree = PrefixTree(store, PLAIN, segment_tokens=8, policy=Hazard(guard=0), clock=clock)
    policy = tree.policy
    assert isinstance(policy, Hazard)
    try:
        offered, saved = with_refusals(tree, clock)
        store.flush()
        assert saved.n_tokens == 20
        path = tree._path(offered)
        tiers = [node.segment.tier for node, _ in path.nodes if node.segment is not None]
        assert tiers[-1] == "disk"
        assert store.used_bytes <= 66
        assert tree.match_prefix(offered).n_tokens == 20
        tree.check()
        check_notes(policy, tree)
    finally:
        store.close()


def test_nothing_is_refused_where_states_need_checkpoints(learns_soon: None) -> None:
    clock = Time()
    tree = PrefixTree(
        MemoryStore(90), ROLLING, segment_tokens=8, policy=Hazard(guard=0), clock=clock
    )
    rng = random.Random(1)
    for turn in range(100):
        clock.now += 2
        ids = [turn % 3] * 12 if rng.random() < 0.6 else [rng.randrange(250) for _ in range(12)]
        serve(tree, ids)
    assert isinstance(tree.policy, Hazard)
    assert tree.policy.rules
    assert tree.counters.refused_segments == 0
    assert tree.counters.evicted_segments > 10


# -- classes and runs ------------------------------------------------------------------------------


def test_classes_say_what_parts_and_how_many_turns_there_were() -> None:
    clock = Time()
    tree = PrefixTree(MemoryStore(1000), ROLLING, segment_tokens=4, policy=Hazard(), clock=clock)
    begin, one, two = array(1, 1, 1, 1), [2] * 4, [3] * 4
    for turn in range(10):
        clock.now += 1
        serve(tree, [*begin.tolist(), *one])
        if turn == 5:
            serve(tree, [*begin.tolist(), *two])
    first, second = (node for node, _ in tree._path(array(*begin, *one)).nodes[1:])
    assert first.segment is not None
    assert second.segment is not None
    assert first.segment.memo.shared
    assert not second.segment.memo.shared
    assert first.segment.memo.klass == 5 + 0
    assert second.checkpoints[8].memo.is_checkpoint
    assert second.checkpoints[8].memo.klass >= 10
    assert second.checkpoints[8].memo.after is second.segment.memo


def test_what_is_used_together_waits_together() -> None:
    policy = Hazard()
    cache = Cache(policy, 100)
    cache.clock.now = 10.0
    things = []
    for number in range(5):
        thing = Thing(f"t{number}", number, 10.0, 1, 1)
        policy.enters(thing, 10.0, None)
        things.append(thing)
    assert len(policy._runs) == 1
    for thing in things[:2]:
        policy.used(thing, 30.0)
    policy.used(things[0], 30.0)  # again, at one time: no matter
    assert {thing.memo.gap_s for thing in things[:2]} == {20.0}
    assert [run.n for run in policy._runs.values()] == [3, 2]
    policy._go_to(31.0)
    (wait,) = [wait for run in policy._cases for wait in run.over]
    assert (wait.seconds, wait.weight, wait.used) == (20.0, 2 / 5, True)
    run = things[2].memo.run
    assert run.bucket == bucket_of(31.0 - 10.0)
    policy.used(things[2], 1e9)
    assert np.isclose(things[2].memo.gap_s, 1e9 - 10)


def test_a_turn_that_goes_on_inherits_what_the_conversation_was() -> None:
    policy = Hazard()
    cache = Cache(policy, 100)
    first = cache.put("a")
    cache.clock.now = 50.0
    cache.use("a")
    policy.enters(second := Thing("b", 9, 51.0, 1, 1), 51.0, first)
    assert (second.memo.turns, second.memo.gap_s, second.memo.depth) == (2, 50.0, 1)
    policy.enters(third := Thing("c", 10, 52.0, 1, 1), 52.0, first)  # parts from it
    assert (third.memo.turns, third.memo.gap_s) == (1, -1.0)
    assert first.memo.shared
