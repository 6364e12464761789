"""What the disk store drops, in which order, and never too late: against a brute-force model."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamakeep.errors import InvalidValue
from llamakeep.policy import Kept
from llamakeep.states import Block
from llamakeep.stores.disk import DiskStore
from llamakeep.tokens import PathNames, Place
from tests.disk_tools import (
    BLOCK_TOKENS,
    NAMESPACE,
    ROLLING,
    Failing,
    Unflushed,
    blocks,
    content,
    du,
    is_right,
    pages,
    path,
    put,
)


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files() -> Failing:
    return Failing()


@pytest.fixture
def store(tmp_path: Path, clock: Clock, files: Failing) -> Iterator[DiskStore]:
    """A store with room for five pages."""
    with DiskStore(
        tmp_path / "cache", pages(5), min_free_bytes=0, clock=clock, files=files
    ) as made:
        yield made


def test_what_was_not_used_for_longest_goes_first(store: DiskStore) -> None:
    places = [path([n]).segment(0, 1) for n in range(6)]
    for place in places[:5]:
        assert put(store, place)
    store.touch([places[0].name])
    assert put(store, places[5])
    assert [place.name in store for place in places] == [True, False, True, True, True, True]
    assert store.counters["evicted"] == 1
    store.check()


def test_the_policy_decides(tmp_path: Path) -> None:
    class Largest:
        name = "largest"

        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            return -kept.n_bytes, kept.sequence

    places = [path([n]).segment(0, 1) for n in range(4)]
    with DiskStore(tmp_path / "cache", pages(5), policy=Largest(), min_free_bytes=0) as store:
        put(store, places[0])
        put(store, places[1], 2 * 4096)  # three pages
        put(store, places[2])
        put(store, places[3])
        assert [place.name in store for place in places] == [True, False, True, True]


def test_a_segment_stays_while_something_hangs_off_it(store: DiskStore) -> None:
    long, other = path(range(10)), path([0, 1, 99])
    chain = [long.segment(0, 4), long.segment(4, 8), long.segment(8, 10), other.segment(2, 3)]
    for place in chain:
        assert put(store, place)
    store.touch([chain[2].name, chain[3].name])  # the leaves were used last
    assert put(store, path([50]).segment(0, 1))
    assert put(store, path([51]).segment(0, 1))  # the first leaf goes, not the root
    assert [place.name in store for place in chain] == [True, True, False, True]
    for n in range(60, 64):
        assert put(store, path([n]).segment(0, 1))
    assert not any(place.name in store for place in chain)
    store.check()


def test_a_checkpoint_may_go_from_the_middle(store: DiskStore) -> None:
    names = path(range(10))
    places = [names.segment(0, 4), names.checkpoint(0, 3), names.segment(4, 8)]
    for place in places:
        assert put(store, place)
    store.touch([places[2].name])
    for n in range(50, 53):
        assert put(store, path([n]).segment(0, 1))
    assert [place.name in store for place in places] == [True, False, True]


def test_a_segment_without_a_checkpoint_below_goes_at_once_where_it_is_of_no_use(
    store: DiskStore,
) -> None:
    store.introduce(ROLLING, {"rolling": True})
    names = path(range(10), ROLLING)
    places = [names.segment(0, 4), names.segment(4, 8), names.checkpoint(4, 8)]
    for place in places:
        assert put(store, place)
    other = path([50, 51]).segment(0, 2)
    assert put(store, other)
    assert put(store, path([52]).segment(0, 1))
    store.touch([names.segment(0, 4).name, names.segment(4, 8).name, other.name])
    assert put(store, path([53]).segment(0, 1))
    assert not any(place.name in store for place in places)
    assert store.counters["evicted"] == 3
    assert other.name in store
    store.check()


def test_what_cannot_fit_evicts_nothing(store: DiskStore) -> None:
    for n in range(5):
        assert put(store, path([n]).segment(0, 1))
    place = path([9]).segment(0, 1)
    assert store.put(place.name, pages(5), lambda: np.empty(0, np.uint8), place) is False
    assert len(store) == 5
    assert store.counters["refused_too_large"] == 1


def test_what_has_no_place_makes_nothing_go_and_goes_for_nothing(store: DiskStore) -> None:
    for n in range(5):
        assert put(store, path([n]).segment(0, 1))
    name = content(b"x" * 32, 32).tobytes()
    assert store.put(name, 10, lambda: content(name, 10)) is False
    assert (len(store), store.counters["refused_no_room"]) == (5, 1)
    store.clear()
    for n in range(4):
        each = bytes([n]) * 32
        assert store.put(each, 10, lambda each=each: content(each, 10))
    assert put(store, path([1]).segment(0, 1))
    assert put(store, path([2]).segment(0, 1))
    place = path([3]).segment(0, 1)
    assert put(store, place, pages(1)) is False  # two pages; only one of them could be had
    assert all(bytes([n]) * 32 in store for n in range(4))
    assert path([2]).segment(0, 1).name in store


def test_what_is_put_does_not_evict_what_it_hangs_off(store: DiskStore) -> None:
    names = path(range(24))
    spans = [names.segment(at, at + 4) for at in range(0, 24, 4)]
    for place in spans[:5]:
        assert put(store, place)
    assert put(store, spans[5]) is False  # all there is is above it
    assert [place.name in store for place in spans] == [True] * 5 + [False]
    assert "evicted" not in store.counters


def test_what_is_being_written_holds_what_it_hangs_off(store: DiskStore) -> None:
    names = path(range(8))
    above, below = names.segment(0, 4), names.segment(4, 8)
    assert put(store, above)
    store.touch([])

    def produce() -> np.ndarray:  # type: ignore[type-arg]
        for n in range(50, 56):  # somebody else fills the store meanwhile
            put(store, path([n]).segment(0, 1))
        return content(below.name, 1000)

    assert store.put(below.name, 1000, produce, below)
    assert above.name in store
    assert below.name in store
    assert store.used_bytes == store.capacity_bytes == du(store.path)
    store.check()


def test_a_clock_that_goes_back_does_not_turn_the_order_round(
    store: DiskStore, clock: Clock
) -> None:
    places = [path([n]).segment(0, 1) for n in range(6)]
    for place in places[:5]:
        assert put(store, place)
        clock.now -= 100
    store.touch([places[0].name])
    clock.now = 0
    assert put(store, places[5])
    assert [place.name in store for place in places] == [True, False, True, True, True, True]


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    places = [path([n]).segment(0, 1) for n in range(5)]
    with DiskStore(tmp_path / "cache", pages(5), min_free_bytes=0) as store:
        for place in places:
            assert put(store, place)
    with DiskStore(tmp_path / "cache", pages(2), min_free_bytes=0) as store:
        assert set(store) == {place.name for place in places[3:]}
        assert store.used_bytes == du(store.path) == pages(2)
        store.check()


def test_opening_without_a_limit_drops_nothing(tmp_path: Path, files: Failing) -> None:
    with DiskStore(tmp_path / "cache", pages(5), min_free_bytes=0) as store:
        for n in range(5):
            assert put(store, path([n]).segment(0, 1))
    files.free = pages(7)
    with DiskStore(tmp_path / "cache", min_free_bytes=0, files=files) as store:
        assert store.capacity_bytes == pages(3)  # a quarter of what is free and what it has
        assert len(store) == 5
        assert put(store, path([7]).segment(0, 1))
        assert store.used_bytes == pages(3)


def test_trim_drops_by_policy(store: DiskStore) -> None:
    places = [path([n]).segment(0, 1) for n in range(5)]
    for place in places:
        assert put(store, place)
    assert store.trim(pages(3) + 1) == 2
    assert set(store) == {place.name for place in places[2:]}
    assert store.trim(pages(3)) == 0
    assert store.trim(0) == 3
    with pytest.raises(InvalidValue, match="max_bytes"):
        store.trim(-1)
    store.check()


def test_room_is_left_to_others(tmp_path: Path) -> None:
    files = Failing()
    places = [path([n]).segment(0, 1) for n in range(6)]
    with DiskStore(tmp_path / "cache", pages(50), min_free_bytes=pages(10), files=files) as store:
        files.free = pages(20)
        for place in places[:3]:
            assert put(store, place)

        class Freed(Failing):
            """Says that there is more room after each file that goes."""

            def unlink(self, path: Path) -> None:
                super().unlink(path)
                if path.suffix == ".state":
                    files.free = (files.free or 0) + pages(1)

        files.__class__ = Freed
        files.free = pages(9)
        assert put(store, places[3])  # two have to go for it
        assert set(store) == {places[2].name, places[3].name}
        files.__class__ = Failing
        files.free = pages(9)
        assert put(store, places[4]) is False  # what was dropped did not make room
        assert store.counters["refused_disk_full"] == 1
        files.free = pages(2)
        n_kept = len(store)
        assert put(store, places[5]) is False  # all of it would not be enough: nothing goes
        assert len(store) == n_kept
        assert store.counters["refused_disk_full"] == 2
        assert store.put(b"o" * 32, 10, lambda: content(b"o" * 32, 10)) is False
        store.check()


def test_the_default_limit_is_a_quarter_of_what_is_free(tmp_path: Path) -> None:
    files = Failing()
    files.free = pages(400)
    with DiskStore(tmp_path / "cache", files=files) as store:
        assert store.capacity_bytes == pages(100)


def test_a_longer_tail_takes_the_place_of_a_shorter_one(store: DiskStore) -> None:
    names, other = path(range(4)), path([0, 1, 9])
    tail, longer = names.segment(0, 3), names.segment(0, 4)
    for place in (tail, names.checkpoint(0, 2), other.segment(2, 3), longer):
        assert put(store, place)
    store.supersede(tail.name, longer.name)
    assert tail.name not in store
    assert store.get(tail.name) is None
    assert len(store) == 3
    store.check()
    for n in range(50, 53):  # what hung off the old hangs off the new
        assert put(store, path([n]).segment(0, 1))
    assert longer.name in store
    assert other.segment(2, 3).name in store
    store.check()


def test_nothing_is_superseded_by_what_is_not_there(store: DiskStore) -> None:
    names = path(range(4))
    tail, longer = names.segment(0, 3), names.segment(0, 4)
    put(store, tail)
    store.supersede(tail.name, longer.name)
    store.supersede(tail.name, tail.name)
    store.supersede(longer.name, tail.name)
    assert list(store) == [tail.name]


def test_what_comes_before_what_it_hangs_off_hangs_off_it_then(store: DiskStore) -> None:
    names = path([0, 1, 2, 3])
    below, mark, above = names.segment(2, 4), names.checkpoint(0, 1), names.segment(0, 2)
    for place in (below, mark, above):
        assert put(store, place)
    store.check()
    store.touch([mark.name, below.name])
    for n in range(50, 53):
        assert put(store, path([n]).segment(0, 1))
    assert above.name in store


# -- against a model -------------------------------------------------------------------------------


@dataclass(eq=False)
class Item:
    """What the model keeps of a state."""

    place: Place
    cost: int
    n_bytes: int
    sequence: int
    used: int
    parent: bytes | None = field(default=None)

    @property
    def name(self) -> bytes:
        return self.place.name

    @property
    def is_segment(self) -> bool:
        return self.place.kind == "segment"

    @property
    def at_origin(self) -> bool:
        return self.is_segment and self.place.start == self.place.origin

    @property
    def upto(self) -> int:
        return self.place.start if self.is_segment else self.place.end


class Model:
    """Keeps states as the store should, by looking at all of them each time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.kept: dict[bytes, Item] = {}
        self.numbers = itertools.count()
        self.times = itertools.count()

    @property
    def used_bytes(self) -> int:
        return sum(item.cost for item in self.kept.values())

    def fits(self, parent: Item, item: Item) -> bool:
        shared = item.upto - item.place.origin
        return (
            parent.is_segment
            and parent.place.block == item.place.block
            and parent.place.start < item.upto <= parent.place.end
            and np.array_equal(parent.place.tokens[:shared], item.place.tokens[:shared])
        )

    def parent_of(self, item: Item) -> bytes | None:
        found = [each for each in self.kept.values() if self.fits(each, item)]
        if not found:
            return None
        best = min(found, key=lambda each: (-each.place.start, -each.place.end, each.name))
        return best.name

    def directly_above(self, item: Item) -> list[Item]:
        if item.parent is not None:
            return [self.kept[item.parent]]
        if not item.at_origin:
            return []
        return [
            each
            for each in self.kept.values()
            if each.is_segment and each.place.next_block == item.place.block
        ]

    def above(self, item: Item) -> dict[bytes, Item]:
        found: dict[bytes, Item] = {}
        pending = self.directly_above(item)
        while pending:
            each = pending.pop()
            found[each.name] = each
            pending += [more for more in self.directly_above(each) if more.name not in found]
        return found

    def is_leaf(self, item: Item) -> bool:
        after = item.place.next_block if item.is_segment else b""
        return not any(
            each.parent == item.name or (after and each.place.block == after)
            for each in self.kept.values()
        )

    def remove(self, item: Item) -> None:
        del self.kept[item.name]
        for each in self.kept.values():
            if each.parent == item.name:
                each.parent = None

    def evict(self, held: dict[bytes, Item]) -> bool:
        free = [item for item in self.kept.values() if self.is_leaf(item) and item.name not in held]
        if not free:
            return False
        pending = [min(free, key=lambda item: (item.used, item.sequence))]
        while pending:
            item = pending.pop()
            higher = self.directly_above(item)
            self.remove(item)
            if item.place.namespace == ROLLING:
                pending += [each for each in higher if self.is_leaf(each) and each.name not in held]
        return True

    def put(self, place: Place, n_bytes: int, cost: int) -> bool:
        if place.name in self.kept:
            return True
        item = Item(place, cost, n_bytes, 0, 0)
        item.parent = self.parent_of(item)
        above = self.above(item)
        if cost > self.capacity_bytes:
            return False
        need = self.used_bytes + cost - self.capacity_bytes
        if need > self.used_bytes - sum(each.cost for each in above.values()):
            return False
        while self.used_bytes + cost > self.capacity_bytes:
            if not self.evict(above):
                return False
        item.sequence, item.used = next(self.numbers), next(self.times)
        item.parent = self.parent_of(item)
        self.kept[item.name] = item
        for each in self.kept.values():
            if each.parent is None and not each.at_origin and self.fits(item, each):
                each.parent = item.name
        return True


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class DiskAgainstModel(RuleBasedStateMachine):
    """Any order of calls leaves the store with what a brute-force model keeps."""

    capacity_bytes = pages(12)

    @initialize()
    def empty(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="llamakeep-disk-")
        self.clock = Clock()
        self.model = Model(self.capacity_bytes)
        self.open()

    def open(self) -> None:
        self.store = DiskStore(
            Path(self.directory.name) / "cache",
            self.capacity_bytes,
            min_free_bytes=0,
            clock=self.clock,
            files=Unflushed(),
        )
        self.store.introduce(ROLLING, {"rolling": True})

    @rule(
        tokens=TOKENS,
        namespace=st.sampled_from([NAMESPACE, ROLLING]),
        cuts=st.sets(st.integers(1, 10), max_size=3),
        marks=st.sets(st.integers(1, 11), max_size=2),
        size=st.integers(1, 2),
    )
    def save(
        self, tokens: list[int], namespace: bytes, cuts: set[int], marks: set[int], size: int
    ) -> None:
        """Put the segments of a prompt in order, with checkpoints, up to what is refused."""
        names = path(tokens, namespace)
        ends = {*range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS), *cuts, len(tokens)}
        start = 0
        for end in sorted(end for end in ends if end <= len(tokens)):
            n_bytes = pages(size) - 500
            if not self.put(names.segment(start, end), n_bytes):
                return
            for mark in sorted(marks):
                if start < mark <= end:
                    self.put(names.checkpoint(start, mark), 100)
            start = end

    def put(self, place: Place, n_bytes: int) -> bool:
        cost = self.store.cost_bytes(n_bytes, place)
        kept = self.store.put(place.name, n_bytes, lambda: content(place.name, n_bytes), place)
        assert kept == self.model.put(place, n_bytes, cost)
        return kept

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.model.kept:
            names = data.draw(st.lists(st.sampled_from(sorted(self.model.kept)), max_size=4))
            self.store.touch(names)
            time = next(self.model.times)
            for name in names:
                self.model.kept[name].used = time

    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        pairs = [
            (old.name, new.name)
            for old in self.model.kept.values()
            for new in self.model.kept.values()
            if old.is_segment
            and new.is_segment
            and (old.place.block, old.place.start) == (new.place.block, new.place.start)
            and old.place.end < new.place.end
            and np.array_equal(old.place.tokens, new.place.tokens[: old.place.tokens.size])
        ]
        if pairs:
            old, new = data.draw(st.sampled_from(sorted(pairs)))
            self.store.supersede(old, new)
            for each in self.model.kept.values():
                if each.parent == old:
                    each.parent = new
            self.model.remove(self.model.kept[old])

    @rule(data=st.data())
    def delete_a_leaf(self, data: st.DataObject) -> None:
        leaves = sorted(i.name for i in self.model.kept.values() if self.model.is_leaf(i))
        if leaves:
            name = data.draw(st.sampled_from(leaves))
            assert self.store.delete(name)
            self.model.remove(self.model.kept[name])

    @rule(n_pages=st.integers(4, 12))
    def trim(self, n_pages: int) -> None:
        self.store.trim(pages(n_pages))
        while self.model.used_bytes > pages(n_pages):
            if not self.model.evict({}):
                break

    @rule(by=st.sampled_from([-500.0, 0.0, 1.0, 1e6]))
    def time_passes(self, by: float) -> None:
        self.clock.now += by

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule(fix=st.booleans())
    def check(self, fix: bool) -> None:
        self.store.check(fix=fix)

    @rule(tokens=TOKENS, namespace=st.sampled_from([NAMESPACE, ROLLING]))
    def find(self, tokens: list[int], namespace: bytes) -> None:
        asked = blocks(tokens, namespace)
        found = {record.name: record for record in self.store.find(asked)}
        expected = {
            item.name
            for item in self.model.kept.values()
            for block in asked
            if self.begins_like(item.place, block)
        }
        assert set(found) == expected
        for name, record in found.items():
            item = self.model.kept[name]
            assert (record.kind, record.start, record.end, record.n_bytes, record.tier) == (
                item.place.kind,
                item.place.start,
                item.place.end,
                item.n_bytes,
                "disk",
            )
            span = item.place.tokens[item.place.start - item.place.origin :]
            assert np.array_equal(record.tokens, span)

    @staticmethod
    def begins_like(place: Place, block: Block) -> bool:
        at = place.start - block.origin
        return (
            place.block == block.name
            and at < block.tokens.size
            and place.first == int(block.tokens[at])
        )

    @invariant()
    def is_the_model(self) -> None:
        assert set(self.store) == set(self.model.kept)
        assert self.store.used_bytes == self.model.used_bytes <= self.capacity_bytes
        assert du(self.store.path) == self.store.used_bytes
        for name, item in self.model.kept.items():
            assert is_right(self.store, name)
            # Whatever was put behind what it hangs off can be reached from the root.
            top = min([item, *self.model.above(item).values()], key=lambda each: each.place.start)
            assert top.place.origin == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                self.store.check()
                self.store.clear()
                assert du(self.store.path) == 0
            finally:
                self.store.close()
                self.directory.cleanup()


class TestAgainstModel(DiskAgainstModel.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None, print_blob=True)


def test_time_moves_on_by_as_little_as_it_can(store: DiskStore, clock: Clock) -> None:
    place = path([1]).segment(0, 1)
    put(store, place)
    store.touch([place.name])
    (entry,) = store.entries()
    assert (entry.created, entry.last_used) == (1000.0, math.nextafter(1000.0, math.inf))
    clock.now = 2000.0
    store.touch([place.name])
    (entry,) = store.entries()
    assert (entry.created, entry.last_used, entry.hits) == (1000.0, 2000.0, 2)


def test_what_one_store_remembers_and_must_keep_does_not_hold_it_up(tmp_path: Path) -> None:
    """All that it remembers is gone but for what a new state hangs off: it looks again."""
    where = tmp_path / "cache"

    def place_of(seed: int, start: int, end: int, *, shared: bool = False) -> Place:
        tokens = np.full(8, seed, np.int32)
        tokens[:4] = 7 if shared else seed
        return PathNames(bytes(32), tokens, 4).segment(start, end)

    def keep(store: DiskStore, place: Place) -> bool:
        return store.put(place.name, 3000, lambda: np.zeros(3000, np.uint8), place)

    with (
        DiskStore(where, 6 * 4096, min_free_bytes=0) as one,
        DiskStore(where, 6 * 4096, min_free_bytes=0) as other,
    ):
        root = place_of(1, 0, 4, shared=True)
        assert keep(one, root)
        assert keep(one, place_of(2, 4, 8, shared=True))
        for seed in range(10, 15):
            assert keep(one, place_of(seed, 0, 4))  # the last one evicts the leaf
        for seed in range(20, 32):
            other.touch([root.name])
            assert keep(other, place_of(seed, 0, 4))
        assert keep(one, place_of(3, 4, 8, shared=True))
        assert root.name in one
        one.check()
