"""What every store must do, and what the one in memory does besides.

A store joins the contract and the state machine with one line in `KINDS`.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamakeep.errors import IntegrityError, InvalidValue
from llamakeep.states import Buffer
from llamakeep.stores.base import Store
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.redis import RedisStore
from llamakeep.stores.sized import SizedTier
from llamakeep.stores.tiered import TieredStore

Factory: TypeAlias = Callable[[int, Path, Callable[[str], Any]], Store]


@dataclass(frozen=True)
class Kind:
    """How a kind of store is made, and what a blob counts for in it.

    Attributes:
        make: `make(capacity_bytes, directory, fixture)` makes an empty store, which may use the
            directory. `fixture("redis_url")` is the value of that fixture, which may skip the test.
        unit_bytes: Blobs of `size(units)` bytes count for whole units of this many bytes.
        overhead_bytes: What a blob counts for besides its own bytes.
        max_examples: How many orders of calls the state machine tries.
    """

    make: Factory
    unit_bytes: int = 1
    overhead_bytes: int = 0
    max_examples: int = 60

    def size(self, units: int) -> int:
        """Return the size of the blob that counts for so many units; of none, an empty blob's."""
        return units * self.unit_bytes - self.overhead_bytes if units else 0

    def cost_of(self, n_bytes: int) -> int:
        """Return what a blob of `n_bytes` counts for."""
        return -(-(n_bytes + self.overhead_bytes) // self.unit_bytes) * self.unit_bytes


def redis_kind(url: str, max_examples: int = 25) -> Kind:
    """Stores on the server that a fixture gives the URL of, each under a prefix of its own."""

    def make(capacity_bytes: int, _: Path, fixture: Callable[[str], Any]) -> RedisStore:
        prefix = f"contract-{next(numbers)}"
        return RedisStore(
            fixture(url), secret="hush", capacity_bytes=capacity_bytes, prefix=prefix, timeout_s=10
        )

    numbers = itertools.count()
    return Kind(make, unit_bytes=176, overhead_bytes=176, max_examples=max_examples)


def over_disk(capacity_bytes: int, path: Path, _: Callable[[str], Any]) -> TieredStore:
    return TieredStore(MemoryStore(capacity_bytes), DiskStore(path, 1 << 30, min_free_bytes=0))


def over_disk_and_redis(
    capacity_bytes: int, path: Path, fixture: Callable[[str], Any]
) -> TieredStore:
    shared = KINDS["redis"].make(1 << 30, path, fixture)
    disk = DiskStore(path, 1 << 30, min_free_bytes=0)
    return TieredStore(MemoryStore(capacity_bytes), disk, shared)  # type: ignore[arg-type]


KINDS: dict[str, Kind] = {
    "memory": Kind(lambda capacity_bytes, *_: MemoryStore(capacity_bytes)),
    "memory-verified": Kind(lambda capacity_bytes, *_: MemoryStore(capacity_bytes, verify=True)),
    "disk": Kind(
        lambda capacity_bytes, path, _: DiskStore(path, capacity_bytes, min_free_bytes=0),
        unit_bytes=4096,
        overhead_bytes=176,
        max_examples=40,
    ),
    "disk-secret": Kind(
        lambda capacity_bytes, path, _: DiskStore(
            path, capacity_bytes, secret="hush", min_free_bytes=0
        ),
        unit_bytes=4096,
        overhead_bytes=176,
        max_examples=40,
    ),
    "fake-tier": Kind(lambda capacity_bytes, *_: FakeTier(capacity_bytes)),
    "sized-tier": Kind(lambda capacity_bytes, *_: SizedTier(capacity_bytes, clock=time.monotonic)),
    "redis": redis_kind("redis_url"),
    "redis-cluster": redis_kind("redis_cluster_url", max_examples=10),
    "tiered": Kind(over_disk, max_examples=10),
    "tiered-over-both": Kind(over_disk_and_redis, max_examples=6),
}
"""Every kind of store, by name."""

TIERS = {"ram", "disk", "shared"}


def name_of(word: str) -> bytes:
    return blake3(word.encode()).digest()


def blob(n_bytes: int, fill: int = 0) -> Buffer:
    return np.full(n_bytes, fill, np.uint8)


def put(store: Store, word: str, n_bytes: int, fill: int = 0) -> bool:
    return store.put(name_of(word), n_bytes, lambda: blob(n_bytes, fill))


def never() -> Buffer:
    raise AssertionError("a blob was produced that nobody needs")


def breaks() -> Buffer:
    raise ZeroDivisionError


def close(store: Store) -> None:
    """Close a store of a kind that is closed."""
    if hasattr(store, "close"):
        store.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Runs the test once for each kind of store."""
    return KINDS[request.param]


@pytest.fixture
def make(
    kind: Kind, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[int], Store]]:
    """`make(capacity_bytes)` makes an empty store; it is closed when the test ends."""
    made: list[Store] = []

    def make(capacity_bytes: int) -> Store:
        directory = tmp_path / f"store-{len(made)}"
        made.append(kind.make(capacity_bytes, directory, request.getfixturevalue))
        return made[-1]

    yield make
    for store in made:
        close(store)


@pytest.fixture
def store(make: Callable[[int], Store], kind: Kind) -> Store:
    """An empty store of 100 units."""
    return make(100 * kind.unit_bytes)


# -- the contract ----------------------------------------------------------------------------------


def test_what_was_put_is_there(store: Store, kind: Kind) -> None:
    assert store.tier in TIERS
    assert put(store, "a", kind.size(30), 1)
    assert put(store, "b", kind.size(20), 2)
    data = store.get(name_of("a"))
    assert data is not None
    assert (data.dtype, data.shape) == (np.dtype(np.uint8), (kind.size(30),))
    assert (data == 1).all()
    assert set(store) == {name_of("a"), name_of("b")}
    assert len(store) == 2
    assert name_of("b") in store
    assert (store.used_bytes, store.capacity_bytes) == (50 * kind.unit_bytes, 100 * kind.unit_bytes)
    store.check()


def test_what_was_not_put_is_not_there(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(30))
    assert store.get(name_of("b")) is None
    assert name_of("b") not in store
    assert "a" not in store
    assert None not in store
    assert store.delete(name_of("b")) is False
    assert (len(store), store.used_bytes) == (1, 30 * kind.unit_bytes)


@pytest.mark.parametrize("units", [0, 1, 2, 99])
def test_a_blob_counts_for_what_the_store_says(store: Store, kind: Kind, units: int) -> None:
    n_bytes = kind.size(units)
    assert store.cost_bytes(n_bytes) == kind.cost_of(n_bytes)
    put(store, "a", n_bytes)
    assert store.used_bytes == kind.cost_of(n_bytes)
    store.check()


def test_delete_gives_the_bytes_back(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(30))
    put(store, "b", kind.size(20))
    assert store.delete(name_of("a")) is True
    assert store.get(name_of("a")) is None
    assert (list(store), store.used_bytes) == ([name_of("b")], 20 * kind.unit_bytes)
    assert store.delete(name_of("a")) is False
    store.check()


def test_clear_leaves_zero_and_the_store_usable(store: Store, kind: Kind) -> None:
    for word in "abc":
        put(store, word, kind.size(30))
    store.clear()
    assert (len(store), store.used_bytes, list(store)) == (0, 0, [])
    store.clear()
    assert put(store, "a", kind.size(100))
    store.check()


def test_a_blob_may_be_deleted_while_iterating(store: Store, kind: Kind) -> None:
    for word in "abc":
        put(store, word, kind.size(10))
    for name in store:
        store.delete(name)
    assert store.used_bytes == 0


def test_the_first_writer_wins(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(30), 1)
    assert store.put(name_of("a"), kind.size(30), never)
    assert store.put(name_of("a"), kind.size(90), never)  # whatever its size would be
    data = store.get(name_of("a"))
    assert data is not None
    assert (data == 1).all()
    assert store.used_bytes == 30 * kind.unit_bytes


def test_produce_is_called_once(store: Store, kind: Kind) -> None:
    calls = []

    def produce() -> Buffer:
        calls.append(1)
        return blob(kind.size(30))

    store.put(name_of("a"), kind.size(30), produce)
    assert calls == [1]


def test_what_does_not_fit_is_neither_produced_nor_makes_room(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(60))
    for n_bytes in (kind.size(40) + 1, kind.size(41), kind.size(100), kind.size(101), 1 << 50):
        assert store.put(name_of("b"), n_bytes, never) is False
    assert (list(store), store.used_bytes) == ([name_of("a")], 60 * kind.unit_bytes)
    assert put(store, "b", kind.size(40))
    store.check()


def test_bytes_are_counted_before_they_exist(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(60))
    seen = []

    def produce() -> Buffer:
        seen.append((store.used_bytes, name_of("b") in store, store.get(name_of("b"))))
        assert store.put(name_of("c"), kind.size(1), never) is False
        return blob(kind.size(40))

    store.put(name_of("b"), kind.size(40), produce)
    assert seen == [(100 * kind.unit_bytes, False, None)]
    assert store.used_bytes == 100 * kind.unit_bytes


def test_produce_that_raises_leaves_nothing(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(60))
    with pytest.raises(ZeroDivisionError):
        store.put(name_of("b"), kind.size(40), breaks)
    assert (list(store), store.used_bytes) == ([name_of("a")], 60 * kind.unit_bytes)
    assert put(store, "b", kind.size(40))
    store.check()


@pytest.mark.parametrize(("units", "more"), [(0, 0), (40, -1), (40, 1), (400, 0)])
def test_a_blob_of_another_size_is_an_error_and_not_kept(
    store: Store, kind: Kind, units: int, more: int
) -> None:
    announced, n_bytes = kind.size(40), kind.size(units) + more
    with pytest.raises(IntegrityError, match=rf"{n_bytes:,}.*{announced:,}"):
        store.put(name_of("a"), announced, lambda: blob(n_bytes))
    assert (len(store), store.used_bytes) == (0, 0)
    assert store.get(name_of("a")) is None
    store.check()


def test_a_negative_size_is_an_error(store: Store) -> None:
    with pytest.raises(InvalidValue, match="-1"):
        store.put(name_of("a"), -1, never)
    assert len(store) == 0


def test_an_empty_blob_is_a_blob(store: Store) -> None:
    assert put(store, "a", 0)
    data = store.get(name_of("a"))
    assert data is not None
    assert data.size == 0
    assert store.delete(name_of("a"))
    store.check()


def test_fault_37_a_capacity_of_zero_keeps_nothing_and_a_negative_one_is_refused(
    make: Callable[[int], Store],
) -> None:
    store = make(0)
    assert store.put(name_of("a"), 1, never) is False
    assert (store.capacity_bytes, store.used_bytes, len(store)) == (0, 0, 0)
    store.check()
    with pytest.raises(InvalidValue, match="-1"):
        make(-1)


def test_fault_13_what_is_handed_out_cannot_be_changed(store: Store, kind: Kind) -> None:
    put(store, "a", kind.size(30), 7)
    for _ in range(2):
        data = store.get(name_of("a"))
        assert data is not None
        with pytest.raises(ValueError, match="read-only"):
            data[0] = 1
        assert (data == 7).all()


@pytest.mark.parametrize("n_bytes", [127, 128, 129, 4096, 70_001])
def test_fault_41_all_byte_values_come_back(
    make: Callable[[int], Store], kind: Kind, n_bytes: int
) -> None:
    store = make(kind.cost_of(n_bytes))
    written = (np.arange(n_bytes) * 7 % 256).astype(np.uint8)
    assert store.put(name_of("a"), n_bytes, written.copy)
    data = store.get(name_of("a"))
    assert data is not None
    assert np.array_equal(data, written)


# -- the contract against a dictionary -------------------------------------------------------------

NAMES = [name_of(word) for word in "abcdefgh"]
names = st.sampled_from(NAMES)
sizes = st.integers(0, 60)


class StoreAgainstDict(RuleBasedStateMachine):
    """Any order of calls does to a store what it does to a dictionary with a limit."""

    kind: Kind
    fixture: Callable[[str], Any]

    @initialize()
    def empty(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="llamakeep-store-")
        self.capacity_bytes = 100 * self.kind.unit_bytes
        path = Path(self.directory.name) / "store"
        self.store = self.kind.make(self.capacity_bytes, path, type(self).fixture)
        self.model: dict[bytes, bytes] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self.kind.cost_of(len(data)) for data in self.model.values())

    @rule(name=names, units=sizes, fill=st.integers(0, 255))
    def put(self, name: bytes, units: int, fill: int) -> None:
        n_bytes = self.kind.size(units)
        expected = self.used_bytes + self.kind.cost_of(n_bytes)
        fits = expected <= self.capacity_bytes

        def produce() -> Buffer:
            assert fits
            assert name not in self.model
            assert self.store.used_bytes == expected
            return blob(n_bytes, fill)

        kept = self.store.put(name, n_bytes, produce)
        assert kept == (name in self.model or fits)
        if kept:
            self.model.setdefault(name, bytes([fill]) * n_bytes)

    def cannot_be_put(self, name: bytes, n_bytes: int) -> bool:
        """Whether nothing is to be produced for it; then it is put in vain."""
        full = self.used_bytes + self.kind.cost_of(n_bytes) > self.capacity_bytes
        if name in self.model or full:
            assert self.store.put(name, n_bytes, never) == (name in self.model)
            return True
        return False

    @rule(name=names, units=sizes, off_by=st.sampled_from([1, 30]))
    def put_another_size(self, name: bytes, units: int, off_by: int) -> None:
        n_bytes = self.kind.size(units)
        if not self.cannot_be_put(name, n_bytes):
            with pytest.raises(IntegrityError):
                self.store.put(name, n_bytes, lambda: blob(n_bytes + off_by))

    @rule(name=names, units=sizes)
    def put_and_fail(self, name: bytes, units: int) -> None:
        n_bytes = self.kind.size(units)
        if not self.cannot_be_put(name, n_bytes):
            with pytest.raises(ZeroDivisionError):
                self.store.put(name, n_bytes, breaks)

    @rule(name=names)
    def delete(self, name: bytes) -> None:
        assert self.store.delete(name) == (self.model.pop(name, None) is not None)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @rule(fix=st.booleans())
    def check(self, fix: bool) -> None:
        self.store.check(fix=fix)

    @invariant()
    def is_the_model(self) -> None:
        self.store.check()
        assert self.store.used_bytes == self.used_bytes <= self.capacity_bytes
        assert set(self.store) == set(self.model)
        assert len(self.store) == len(self.model)
        for name in NAMES:
            data = self.store.get(name)
            assert (None if data is None else data.tobytes()) == self.model.get(name)
            assert (name in self.store) == (name in self.model)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return  # it could not even be made
        try:
            for name in list(self.model):
                assert self.store.delete(name)
            assert self.store.used_bytes == 0
            self.store.check()
        finally:
            close(self.store)
            self.directory.cleanup()


def test_any_order_of_calls(kind: Kind, request: pytest.FixtureRequest) -> None:
    members = {"kind": kind, "fixture": staticmethod(request.getfixturevalue)}
    test_case = type("Machine", (StoreAgainstDict,), members).TestCase
    test_case.settings = settings(
        max_examples=kind.max_examples, stateful_step_count=30, deadline=None, print_blob=True
    )
    test_case().runTest()


# -- memory ----------------------------------------------------------------------------------------


def test_memory_shares_the_bytes_it_was_given() -> None:
    """Fault 36: no second copy, neither on the way in nor on the way out."""
    store, given = MemoryStore(100), blob(40, 3)
    store.put(name_of("a"), 40, lambda: given)
    first, second = store.get(name_of("a")), store.get(name_of("a"))
    assert first is not None
    assert second is not None
    assert np.shares_memory(first, given)
    assert np.shares_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        given[0] = 1  # whoever read it cannot change what others hold


def test_memory_knows_its_peak() -> None:
    store = MemoryStore(100)
    store.put(name_of("a"), 70, lambda: blob(70))
    store.delete(name_of("a"))
    store.put(name_of("b"), 20, lambda: blob(20))
    assert (store.used_bytes, store.peak_bytes) == (20, 70)


def test_memory_says_what_it_holds() -> None:
    store = MemoryStore(2_000)
    store.put(name_of("a"), 1_500, lambda: blob(1_500))
    assert repr(store) == "MemoryStore(1 blobs, 1,500 of 2,000 bytes)"


@pytest.mark.parametrize("counted", [0, 13])
def test_memory_check_finds_and_mends_a_wrong_count(counted: int) -> None:
    store = MemoryStore(100)
    store.put(name_of("a"), 30, lambda: blob(30))
    store._budget.release(store.used_bytes)
    store._budget.reserve(counted)
    with pytest.raises(IntegrityError, match=rf"{counted} bytes are counted, 30 are kept"):
        store.check()
    store.check(fix=True)
    assert store.used_bytes == 30
    store.check()


@pytest.mark.parametrize("where", [0, 17, 39])
def test_memory_verified_drops_and_counts_a_flipped_bit(where: int) -> None:
    store = MemoryStore(100, verify=True)
    for word in "ab":
        store.put(name_of(word), 40, lambda: blob(40, 5))
    data = store.get(name_of("a"))
    assert data is not None
    data.flags.writeable = True
    data[where] ^= 0x10
    assert store.get(name_of("a")) is None
    assert (store.corrupt_blobs, store.used_bytes) == (1, 40)
    assert name_of("a") not in store
    assert store.get(name_of("a")) is None
    assert store.corrupt_blobs == 1
    assert store.get(name_of("b")) is not None
    store.check()
    assert store.put(name_of("a"), 40, lambda: blob(40, 6))
    assert store.get(name_of("a")) is not None


def test_memory_not_verified_hands_out_what_it_has() -> None:
    store = MemoryStore(100)
    store.put(name_of("a"), 40, lambda: blob(40))
    data = store.get(name_of("a"))
    assert data is not None
    data.flags.writeable = True
    data[0] = 1
    assert store.get(name_of("a")) is data
    assert store.corrupt_blobs == 0
