"""Every policy behind the lazy queue: what goes is what an exhaustive search would let go.

The queue by itself first, then the tree's and the disk's use of it.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llamakeep
from llamakeep.policy import (
    Hazard,
    Kept,
    Policy,
    get_policy,
    hazard,
    policy_names,
    rerank_seconds,
)
from llamakeep.policy.queue import EvictionQueue
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.states import CheckpointRef
from llamakeep.stores.disk import DiskStore, rows
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import IntArray, PathNames, Place
from llamakeep.tree import PrefixTree
from tests.disk_tools import BLOCK_TOKENS, NAMESPACE, ROLLING, Unflushed, pages, path, put
from tests.test_keeper import answer, tokens_of
from tests.test_tree import NO_ROWS, PLAIN, byte_tree, depth, keep, keep_checkpoint, random_tokens
from tests.test_tree import ROLLING as HYBRID

HALF_LIFE = 6 * 3600.0
DECAYING = ["marginal", "tokens-per-byte"]


@dataclass(eq=False)
class Thing:
    created: float
    last_used: float
    sequence: int
    hits: int = 0
    n_bytes: int = 1
    n_tokens: int = 1
    marginal_tokens: int = 1
    queued: int = 0
    kept: bool = True
    held: bool = False


class Time:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def queue_of(policy: Policy, clock: Callable[[], float]) -> EvictionQueue[Thing]:
    return EvictionQueue(policy, clock, lambda thing: thing.kept)


# -- the queue against an exhaustive search --------------------------------------------------------

PASSED = [0.0, 1.0, 60.0, 400.0, 3600.0, HALF_LIFE, 6.7 * HALF_LIFE, 4e7, -1.0, -400.0, -1e6]
KINDS = ["add", "use", "drop", "hold", "release", "evict", "wait", "less", "more"]
OFTEN = ["add", "use", "evict"]
steps = st.lists(st.tuples(st.sampled_from(KINDS + OFTEN), st.integers(0, 30)), max_size=80)


class Against:
    """A queue, and a list of everything in it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.clock = Time()
        self.queue = queue_of(policy, self.clock)
        self.things: list[Thing] = []

    @property
    def free(self) -> list[Thing]:
        return [thing for thing in self.things if thing.kept and not thing.held]

    def evict(self) -> None:
        victim = self.queue.pop(lambda thing: not thing.held)
        now = self.clock.now
        least = min(self.free, key=lambda thing: self.policy.rank(thing, now), default=None)
        assert victim is least
        if victim is not None:
            victim.kept = False

    def step(self, step: str, index: int) -> None:
        now = self.clock.now
        if step == "add":
            if len(self.free) < 32:  # the queue compares no more
                thing = Thing(now, now, len(self.things), 0, 1 + index % 3, 1 + index % 7)
                thing.marginal_tokens = 1 + index % 5
                self.things.append(thing)
                self.queue.push(thing)
        elif step == "evict":
            self.evict()
        elif step == "wait":
            self.clock.now += PASSED[index % len(PASSED)]
        elif self.things:
            thing = self.things[index % len(self.things)]
            if step == "use":
                thing.last_used, thing.hits = max(now, thing.last_used), thing.hits + 1
            elif step == "drop":
                thing.kept = False
            elif step == "less":
                thing.marginal_tokens = 1
                if thing.kept:
                    self.queue.look_again(thing)
            elif step == "more":
                thing.marginal_tokens += index
            else:
                thing.held = step == "hold"
                if not thing.held and thing.kept:
                    self.queue.push(thing)


@pytest.mark.parametrize("name", policy_names("disk"))
@given(steps=steps)
def test_the_victim_is_the_brute_force_minimum(name: str, steps: list[tuple[str, int]]) -> None:
    against = Against(get_policy(name))
    for step, index in steps:
        against.step(step, index)
        assert len(set(map(id, against.queue))) == len(list(against.queue)) == len(against.queue)
    while against.free:
        against.evict()
    assert against.queue.pop(lambda thing: not thing.held) is None


def close_things(n: int, rng: random.Random, spread: float, now: float) -> list[Thing]:
    """Return things about as old as it takes for hits to be forgotten: their order changes."""
    things = []
    for number in range(n):
        hits = rng.randint(0, 3)
        age = HALF_LIFE * (np.log2(max(1, hits) / 0.01) + spread * rng.uniform(-1, 1))
        thing = Thing(0.0, now - age, number, hits, n_tokens=1000 + rng.randint(0, 5))
        thing.marginal_tokens = 100 + rng.randint(0, 3)
        things.append(thing)
    return things


close = given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.001, 0.01, 0.1, 1.0, 6.0]))


@pytest.mark.parametrize("name", DECAYING)
@close
@settings(max_examples=50, deadline=None)
def test_of_32_that_are_close_the_first_goes(name: str, seed: int, spread: float) -> None:
    rng = random.Random(seed)
    against = Against(get_policy(name))
    against.clock.now = 1e6
    against.things = close_things(32, rng, spread, 1e6)
    for thing in against.things:
        against.queue.push(thing)
    while against.free:
        against.clock.now += rng.choice([0.0, 1.0, 100.0, rerank_seconds(against.policy)])
        against.evict()


@pytest.mark.parametrize("name", DECAYING)
@close
@settings(max_examples=20, deadline=None)
def test_of_many_that_are_close_what_goes_would_go_first_a_little_later(
    name: str, seed: int, spread: float
) -> None:
    rng = random.Random(seed)
    policy = get_policy(name)
    clock = Time(1e6)
    queue = queue_of(policy, clock)
    things = close_things(200, rng, spread, clock.now)
    for thing in things:
        queue.push(thing)
    ahead = rerank_seconds(policy)
    assert ahead == HALF_LIFE / 64
    while things:
        clock.now += rng.choice([0.0, 1.0, ahead / 3])
        victim = queue.pop(lambda thing: True)
        assert victim is not None
        least = min(policy.rank(thing, clock.now) for thing in things)
        assert policy.rank(victim, clock.now + ahead) <= least
        if name == "tokens-per-byte":
            assert policy.rank(victim, clock.now)[0] <= least[0] * 1.011
        things.remove(victim)
        victim.kept = False


@pytest.mark.parametrize("name", ["lru", "marginal"])
def test_any_number_may_have_been_used_since(name: str) -> None:
    clock = Time()
    queue = queue_of(get_policy(name), clock)
    things = [Thing(0.0, 0.0, number) for number in range(500)]
    for thing in things:
        queue.push(thing)
    random.Random(1).shuffle(things)
    for thing in things:
        clock.now += 1.0
        thing.last_used, thing.hits = clock.now, 1
    assert [queue.pop(lambda thing: True) for _ in things] == things


@pytest.mark.parametrize("name", DECAYING)
def test_the_order_follows_the_time(name: str) -> None:
    """Hits of long ago count first and then no more, with nothing else happening."""
    clock = Time()
    used = Thing(0.0, 0.0, 1, hits=3, n_tokens=2, marginal_tokens=2)
    unused = Thing(0.0, 0.0, 2, n_tokens=5, marginal_tokens=5)
    queue = queue_of(get_policy(name), clock)
    queue.push(used)
    queue.push(unused)
    assert queue.pop(lambda thing: True) is unused
    queue.push(unused)
    clock.now = 9 * HALF_LIFE  # 3 / 512
    assert queue.pop(lambda thing: True) is used


def test_a_policy_of_anyones_may_fall_with_time_if_it_says_so() -> None:
    class Waning:
        name = "waning"
        rerank_seconds = 5.0

        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            return kept.n_tokens * 2.0 ** -(now - kept.last_used), kept.sequence

    against = Against(Waning())
    rng = random.Random(1)
    for _ in range(300):
        against.step(rng.choice(["add", "use", "evict", "wait"]), rng.choice([0, 1, 2, 3]))


# -- what it costs ---------------------------------------------------------------------------------


class Counting:
    """Counts what a policy is asked."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.name = policy.name
        self.rerank_seconds = rerank_seconds(policy)
        self.n_asked = 0

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        self.n_asked += 1
        rank: tuple[float, int] = self.policy.rank(kept, now)
        return rank


@pytest.mark.parametrize(("name", "each"), [("lru", 1), ("marginal", 2), ("tokens-per-byte", 64)])
def test_what_goes_costs_the_same_of_few_and_of_many(name: str, each: int) -> None:
    """All of one size, hit once, within an hour: as close as things are."""
    policy = Counting(get_policy(name))
    clock = Time()
    queue = queue_of(policy, clock)
    rng = random.Random(1)
    for number in range(5000):
        queue.push(Thing(0.0, rng.uniform(0, 3600), number, hits=1))
    clock.now = 3600.0
    queue.pop(lambda thing: True)
    policy.n_asked = 0
    for _ in range(1000):
        assert queue.pop(lambda thing: True) is not None
    assert policy.n_asked <= 1000 * each


def test_everything_is_ranked_anew_once_in_a_64th_of_a_half_life() -> None:
    policy = Counting(get_policy("marginal"))
    clock = Time()
    queue = queue_of(policy, clock)
    for number in range(1000):
        queue.push(Thing(0.0, 0.0, number))
    policy.n_asked = 0
    for _ in range(640):
        clock.now += HALF_LIFE / 640
        queue.pop(lambda thing: False)
    assert policy.n_asked <= 999 * 64  # what may not go leaves, and is not ranked
    kept = Thing(0.0, 0.0, 1001)
    queue.push(kept)
    policy.n_asked = 0
    for _ in range(640):
        clock.now += HALF_LIFE / 640
        queue.push(kept)
        assert queue.pop(lambda thing: True) is kept
        queue.push(kept)
    assert policy.n_asked <= 640 * 3 + 65


def test_what_is_gone_does_not_pile_up() -> None:
    queue = queue_of(get_policy("lru"), Time())
    for number in range(10_000):
        thing = Thing(0, 0, number)
        queue.push(thing)
        queue.push(thing)
        thing.kept = False
    assert len(queue) <= 65
    queue.clear()
    assert len(queue) == 0


def test_places_that_were_left_do_not_pile_up() -> None:
    queue = queue_of(get_policy("marginal"), Time())
    things = [Thing(0, 0, number, marginal_tokens=9) for number in range(10)]
    for thing in things:
        queue.push(thing)
    for number in range(10_000):
        queue.look_again(things[number % 10])
    assert len(queue) == len(list(queue)) == 10
    assert len(queue._heap) <= 65
    queue.look_again(Thing(0, 0, 11))  # it stands in no queue
    assert [queue.pop(lambda thing: True) for _ in range(11)] == [*things, None]


@pytest.mark.parametrize("name", policy_names("disk"))
def test_what_fails_to_be_ranked_stays(name: str) -> None:
    class Fails(Counting):
        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            if self.n_asked == self.fails_at:
                self.n_asked += 1
                raise ZeroDivisionError
            return super().rank(kept, now)

        fails_at = -1

    policy = Fails(get_policy(name))
    clock = Time()
    queue = queue_of(policy, clock)
    things = [Thing(0.0, 0.0, number, hits=1) for number in range(50)]
    for thing in things:
        queue.push(thing)
    for wait in (0.0, HALF_LIFE):
        clock.now += wait
        n_asked = policy.n_asked
        policy.fails_at = n_asked + 1
        with pytest.raises(ZeroDivisionError):
            [queue.pop(lambda thing: True) for _ in range(3)]
        policy.fails_at = -1
        gone = [thing for thing in things if not thing.queued]
        assert len(gone) <= 2
        for thing in gone:
            queue.push(thing)
        assert len(queue) == 50


# -- in the tree -----------------------------------------------------------------------------------


class Searched(PrefixTree):
    """Compares what goes with a search of everything that may go."""

    n_compared = 0

    def _evict_one(self, below: Any = None) -> bool:
        now = self._clock()
        free = [kept for node in self._nodes() for kept in node.states() if self._can_go(kept)]
        least = min(free, key=lambda kept: self.policy.rank(kept, now), default=None)
        pop = self._queue.pop

        def compared(can_go: Any, *, below: Any) -> Any:
            kept = pop(can_go, below=below)
            if below is None or least is None or self.policy.rank(least, now) < below:
                assert kept is least
            else:
                assert kept is None  # what is new is worth less than anything
            self.n_compared += 1
            return kept

        self._queue.pop = compared  # type: ignore[method-assign]
        try:
            return super()._evict_one(below)
        finally:
            del self._queue.pop


TREES = [
    pytest.param(t, id=i) for t, i in ((PLAIN, "rows"), (HYBRID, "both"), (NO_ROWS, "rolling"))
]
prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=20),
        st.lists(st.integers(1, 20), max_size=3),  # checkpoints, in any order
        st.sampled_from(["save", "save", "use"]),
        st.sampled_from([0.0, 60.0, 1000.0, 6.8 * HALF_LIFE]),
    ),
    max_size=25,
)


@pytest.mark.parametrize("traits", TREES)
@pytest.mark.parametrize("name", policy_names())
@given(asked=prompts)
@settings(max_examples=40, deadline=None)
def test_the_tree_lets_go_what_the_policy_ranks_first(
    traits: Any, name: str, asked: list[tuple[list[int], list[int], str, float]]
) -> None:
    clock = Time()
    tree = Searched(
        MemoryStore(60), traits, segment_tokens=4, policy=name, max_checkpoints=5, clock=clock
    )
    for ids, marks, what, wait in asked:
        clock.now += wait
        tokens = np.array(ids, np.int32)
        if what == "use":
            depth(tree, tokens)
            continue
        if not traits.rolling:
            keep(tree, tokens)
            continue
        for mark in marks:
            if mark <= tokens.size and not keep(tree, tokens[:mark]).refused:
                keep_checkpoint(tree, tokens[:mark], 3)
        for node in tree._nodes():
            for kept in node.states():
                assert kept.marginal_tokens == marginal(tree, kept)


def marginal(tree: PrefixTree, kept: Any) -> int:
    """Return what losing a state costs, by its definition."""
    nodes, node = [], kept.node
    while node is not None:
        nodes.append(node)
        node = node.parent
    path: IntArray = np.empty(0, np.int32)
    for node in reversed(nodes):
        path = np.concatenate((path[: node.start], node.tokens))
    marks = tree.checkpoint_positions(path)
    if isinstance(kept.ref, CheckpointRef):
        position = kept.ref.position
        return position - max((at for at in marks if at < position), default=0)
    inside = [at for at in marks if at > kept.node.start]
    if not inside:
        return int(kept.node.tokens.size)
    return max(inside) - max((at for at in marks if at <= kept.node.start), default=0)


def test_a_checkpoint_costs_less_to_lose_when_one_comes_before_it_and_more_when_that_goes() -> None:
    tree = byte_tree(traits=HYBRID, policy="marginal", clock=Time())
    tokens = random_tokens(60, 1)
    keep(tree, tokens[:50])
    assert keep_checkpoint(tree, tokens[:50])

    def cost() -> int:
        return int(next(k for k in tree._queue if k.n_tokens == 50).marginal_tokens)

    assert cost() == 50
    assert keep_checkpoint(tree, tokens[:20])
    assert keep_checkpoint(tree, tokens[:35])
    assert cost() == 15
    tree._drop_checkpoint(tree._checkpoints_along(tree._path(tokens))[35])
    assert cost() == 30


def test_a_segment_that_takes_less_along_than_it_did_goes_sooner() -> None:
    store: MemoryStore = MemoryStore(1000)
    tree = Searched(store, HYBRID, segment_tokens=64, policy="marginal", clock=Time())
    tokens, other = random_tokens(40, 1), random_tokens(20, 2)
    keep(tree, tokens)
    assert keep_checkpoint(tree, tokens[:5], 1)
    assert keep_checkpoint(tree, tokens, 1)  # the segment is worth 40 tokens for 40 bytes
    keep(tree, other)
    assert keep_checkpoint(tree, other, 100)  # 20 tokens for 100 bytes
    tree._drop_checkpoint(tree._checkpoints_along(tree._path(tokens))[40])  # now 5 for 40
    store.resize(store.used_bytes)
    keep(tree, random_tokens(10, 3))
    assert tree.n_compared == 1
    assert [tree.match_prefix(each).n_tokens for each in (tokens, other)] == [0, 20]


def test_a_new_checkpoint_above_many_conversations_is_noticed_below() -> None:
    """Without being told, the queue would go on believing that the others cost 40 tokens each."""
    clock = Time()
    tree = Searched(MemoryStore(400), HYBRID, segment_tokens=64, policy="marginal", clock=clock)
    common = random_tokens(30, 1)
    prompts = [np.concatenate((common, random_tokens(10, seed))) for seed in range(2, 6)]
    for tokens in prompts:
        keep(tree, tokens)
        assert keep_checkpoint(tree, tokens, 50)
    alone = random_tokens(20, 7)
    keep(tree, alone)
    assert keep_checkpoint(tree, alone, 50)  # 20 tokens: the least so far
    assert keep_checkpoint(tree, common, 50)  # those with more to do behind it cost 10 each now
    keep(tree, random_tokens(30, 8))
    assert tree.n_compared
    assert tree.match_prefix(alone).n_tokens == 20


# What stands in faults.md, in the tree.


@pytest.mark.parametrize(
    ("name", "survives"), [("marginal", 60), ("tokens-per-byte", 60), ("lru", 0), ("oldest", 0)]
)
def test_fault_19_what_is_used_often_survives_in_the_tree(name: str, survives: int) -> None:
    """By recency alone it survives only as long as it goes on being used: see below."""
    tree = byte_tree(100, segment_tokens=64, policy=name)
    used = random_tokens(60, 1)
    keep(tree, used)
    for _ in range(5):
        assert depth(tree, used) == 60
    for seed in (2, 3, 4):
        keep(tree, random_tokens(20, seed))
    assert tree.match_prefix(used).n_tokens == survives


@pytest.mark.parametrize(
    ("name", "survives"), [("marginal", 60), ("tokens-per-byte", 60), ("lru", 60), ("oldest", 0)]
)
def test_fault_19_what_is_used_meanwhile_survives_in_the_tree(name: str, survives: int) -> None:
    tree = byte_tree(100, segment_tokens=64, policy=name)
    used = random_tokens(60, 1)
    keep(tree, used)
    for seed in (2, 3, 4):
        depth(tree, used)
        keep(tree, random_tokens(20, seed))
    assert tree.match_prefix(used).n_tokens == survives


def crowded(positions: Sequence[int], n_to_go: int) -> tuple[Searched, IntArray]:
    """Return a tree in which so many of a prompt's checkpoints made room for another's."""
    clock = Time()
    tokens = random_tokens(300, 1)
    store: MemoryStore = MemoryStore(10_000)
    tree = Searched(store, HYBRID, segment_tokens=512, policy="marginal", clock=clock)
    for position in positions:
        clock.now += 1
        keep(tree, tokens[:position])
        assert keep_checkpoint(tree, tokens[:position], 50)
    assert tree.checkpoint_positions(tokens) == list(positions)
    store.resize(store.used_bytes)
    clock.now += 1
    other = random_tokens(50, 2)
    keep(tree, other)
    assert keep_checkpoint(tree, other, 50 * n_to_go - 50)
    assert tree.n_compared == n_to_go
    return tree, tokens


def test_fault_21_an_early_checkpoint_survives_turns_close_together() -> None:
    tree, tokens = crowded([30, *range(80, 100, 2)], 7)
    assert tree.checkpoint_positions(tokens) == [30, 80, 88, 96]
    assert tree.match_prefix(tokens, limit=35).n_tokens == 30


def test_fault_23_checkpoints_that_are_left_cover_the_prompt() -> None:
    tree, tokens = crowded(range(10, 90, 10), 4)
    assert tree.checkpoint_positions(tokens) == [20, 40, 60, 80]
    assert tree.match_prefix(tokens, limit=25).n_tokens == 20


def test_fault_24_the_end_of_a_prompt_survives_its_long_answer() -> None:
    tree, tokens = crowded([100, *range(105, 205, 5)], 15)
    assert tree.match_prefix(tokens[:100]).n_tokens == 100


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("name", DECAYING)
def test_hits_are_recorded_when_states_are_restored(name: str, family: Family) -> None:
    runtime = FakeRuntime(family, n_seqs=1)
    tree = PrefixTree(MemoryStore(1 << 20), runtime.traits, segment_tokens=64, policy=name)
    sequence = KeptSequence(runtime, tree)
    prompt, other = random_tokens(100, 1), random_tokens(100, 2)
    for tokens in (prompt, other, prompt, other, prompt):
        reuse = sequence.resume(tokens)
        sequence.advance(tokens[reuse.reused_tokens :])
        sequence.save()
    assert reuse.reused_tokens == 96
    path = tree._path(prompt[:96])
    assert [node.segment.hits for node, _ in path.nodes if node.segment] == [2, 2]
    if runtime.traits.rolling:
        assert path.nodes[-1][0].checkpoints[96].hits == 2
    assert tree.entries()[0].hits == 2


@pytest.mark.parametrize("family", ["attention", "swa", "hybrid", "recurrent"])
@pytest.mark.parametrize("policy", policy_names())
def test_a_model_answers_the_same_under_every_policy(
    tiny_llama: Callable[..., Any], family: str, policy: str
) -> None:
    capacity = {"attention": 700_000, "swa": 700_000, "recurrent": 150_000, "hybrid": 400_000}
    plain, llm = tiny_llama(family), tiny_llama(family)
    keeper = llamakeep.attach(llm, capacity_bytes=capacity[family], policy=policy)
    assert keeper.stats()["policy"] == policy
    for seed in (2, 3, 4, 2, 5, 2):
        prompt = tokens_of(150, 1) + tokens_of(150 + 31 * seed, seed)
        plain.reset()
        assert answer(llm, prompt, 4) == answer(plain, prompt, 4)
        keeper.check()
        assert keeper.stats()["used_bytes"] <= capacity[family]


@pytest.mark.parametrize("family", ["attention", "swa", "hybrid", "recurrent"])
def test_a_model_answers_the_same_while_what_was_learned_rules(
    tiny_llama: Callable[..., Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes and what is refused is another matter than what is answered."""
    monkeypatch.setattr(hazard, "_LEARN_AFTER", 4)
    capacity = {"attention": 700_000, "swa": 700_000, "recurrent": 150_000, "hybrid": 400_000}
    plain, llm = tiny_llama(family), tiny_llama(family)
    keeper = llamakeep.attach(llm, capacity_bytes=capacity[family], policy="hazard:guard=0")
    for seed in (2, 3, 4, 2, 5, 2, 6, 3, 2, 7):
        prompt = tokens_of(150, 1) + tokens_of(150 + 31 * seed, seed)
        plain.reset()
        assert answer(llm, prompt, 4) == answer(plain, prompt, 4)
        keeper.check()
    tree = keeper._tree
    assert isinstance(tree.policy, Hazard)
    assert tree.policy.rules
    assert tree.counters.evicted_segments + tree.counters.refused_segments


# -- on disk ---------------------------------------------------------------------------------------

saves = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=13),
        st.sets(st.integers(1, 13), max_size=3),  # further cuts
        st.sets(st.integers(1, 13), max_size=3),  # checkpoints
        st.integers(1, 3),  # pages
    ),
    min_size=1,
    max_size=6,
)


def fill(
    store: DiskStore, saves: list[tuple[list[int], set[int], set[int], int]], namespace: bytes
) -> dict[bytes, tuple[Place, list[int]]]:
    """Put prompts; return the places of their states and the prompts up to their ends."""
    found = {}
    for ids, cuts, marks, size in saves:
        names = path(ids, namespace)
        ends = {*range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS), *cuts, len(ids)}
        start = 0
        for end in sorted(end for end in ends if end <= len(ids)):
            places = [names.segment(start, end)]
            places += [names.checkpoint(start, at) for at in sorted(marks) if start < at <= end]
            for place in places:
                assert put(store, place, pages(size) - 500)
                found[place.name] = place, ids[: place.end]
            start = end
    return found


@given(saves=saves)
@settings(max_examples=40, deadline=None)
def test_the_disk_knows_what_comes_before_a_checkpoint(
    saves: list[tuple[list[int], set[int], set[int], int]],
) -> None:
    with (
        tempfile.TemporaryDirectory() as where,
        DiskStore(Path(where) / "c", pages(1000), min_free_bytes=0, files=Unflushed()) as store,
    ):
        places = fill(store, saves, ROLLING)
        known: dict[bytes | None, int] = {}
        with store._index.reading() as sql:
            for name, (place, _) in places.items():
                row = rows.get(sql, name)
                assert row is not None
                if place.kind == "checkpoint":
                    row.before = rows.restorable_before(sql, row)
                    assert row.before == rows.restorable_before(sql, row, known)
                assert row.marginal_tokens == on_disk(places, name)


def on_disk(places: dict[bytes, tuple[Place, list[int]]], name: bytes) -> int:
    """Return what losing a state costs, by its definition."""
    place, ids = places[name]
    if place.kind == "segment":
        return place.end - place.start
    before = [
        len(other)
        for at, other in places.values()
        if at.kind == "checkpoint" and len(other) < len(ids) and other == ids[: len(other)]
    ]
    return place.end - max(before, default=0)


@dataclass
class Row:
    """What an exhaustive search knows of a state on disk."""

    created: float
    last_used: float
    sequence: int
    hits: int
    n_bytes: int
    n_tokens: int
    marginal_tokens: int


@pytest.mark.parametrize("namespace", [NAMESPACE, ROLLING], ids=["rows", "both"])
@pytest.mark.parametrize("name", policy_names("disk"))
@given(saves=saves, used=st.lists(st.integers(0, 40), max_size=10), waits=st.randoms())
@settings(max_examples=25, deadline=None)
def test_the_disk_drops_what_the_policy_ranks_first(
    name: str,
    namespace: bytes,
    saves: list[tuple[list[int], set[int], set[int], int]],
    used: list[int],
    waits: random.Random,
) -> None:
    clock = Time(1e9)
    policy = get_policy(name)
    with (
        tempfile.TemporaryDirectory() as where,
        DiskStore(
            Path(where) / "c",
            pages(1000),
            policy=name,
            min_free_bytes=0,
            files=Unflushed(),
            clock=clock,
        ) as store,
    ):
        places = fill(store, saves, namespace)
        if namespace == NAMESPACE:  # without checkpoints, as in a family that has none
            for each in [n for n, (place, _) in places.items() if place.kind == "checkpoint"]:
                store.delete(each)
                del places[each]
        for index in used:
            clock.now += waits.choice([0.0, 100.0, HALF_LIFE])
            store.touch([sorted(places)[index % len(places)]])
        while places:
            clock.now += waits.choice([0.0, 100.0, 3 * HALF_LIFE])
            with store._index.reading() as sql:
                found = [row for row in rows.placed(sql) if not rows.hangs_off(sql, row)]
            free = [
                Row(
                    row.created,
                    row.last_used,
                    row.sequence,
                    row.hits,
                    row.n_bytes,
                    places[row.name][0].end - (row.start if row.kind == rows.SEGMENT else 0),
                    on_disk(places, row.name),
                )
                for row in found
            ]
            expected = min(range(len(free)), key=lambda at: policy.rank(free[at], clock.now))
            assert store.trim(store.used_bytes - 1) == 1
            gone = places.keys() - set(store)
            assert gone == {found[expected].name}
            del places[found[expected].name]
        store.check()


@pytest.mark.parametrize("name", DECAYING)
def test_hits_on_disk_count_and_fade(tmp_path: Path, name: str) -> None:
    clock = Time(1e9)
    places = [path([n]).segment(0, 1) for n in range(4)]
    with DiskStore(
        tmp_path / "c", pages(2), policy=name, min_free_bytes=0, clock=clock, files=Unflushed()
    ) as store:
        assert put(store, places[0])
        store.touch([places[0].name])
        assert put(store, places[1])
        assert put(store, places[2])  # the first was used and stays
        assert set(store) == {places[0].name, places[2].name}
        clock.now += 8 * HALF_LIFE
        assert put(store, places[3])  # that is forgotten by now
        assert set(store) == {places[2].name, places[3].name}
        assert [entry.hits for entry in store.entries()] == [0, 0]


def test_a_checkpoint_that_comes_between_is_noticed_by_the_next_scan(tmp_path: Path) -> None:
    """Until then, for 64 evictions or a sixteenth of the states, it may count for too much."""
    names = PathNames(ROLLING, np.arange(40, dtype=np.int32), 4)
    with DiskStore(
        tmp_path / "c", pages(100), policy="marginal", min_free_bytes=0, files=Unflushed()
    ) as store:
        for start in range(0, 40, 4):
            assert put(store, names.segment(start, start + 4))
        late, early = names.checkpoint(36, 40), names.checkpoint(16, 18)
        assert put(store, late)
        with store._index.reading() as sql:
            row = rows.get(sql, late.name)
            assert row is not None
            assert rows.restorable_before(sql, row) == 0
        assert put(store, early)
        with store._index.reading() as sql:
            assert rows.restorable_before(sql, row) == 18


def test_blocks_that_lead_in_a_circle_are_left(tmp_path: Path) -> None:
    """Nothing seals an index: it may say anything."""
    names = PathNames(ROLLING, np.arange(8, dtype=np.int32), 4)
    with DiskStore(tmp_path / "c", pages(9), min_free_bytes=0, files=Unflushed()) as store:
        assert put(store, names.segment(0, 4))
        assert put(store, names.segment(4, 8))
        assert put(store, names.checkpoint(4, 8))
        with store._index.writing() as sql:
            sql.execute("UPDATE states SET next_block = block, origin = 4")
            row = rows.get(sql, names.checkpoint(4, 8).name)
            assert row is not None
            assert rows.restorable_before(sql, row) == 0
