"""What every store must do, and what the one in memory does besides.

A store joins the contract and the state machine with one line in `FACTORIES`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamakeep.errors import IntegrityError, InvalidValue
from llamakeep.states import Buffer
from llamakeep.stores.base import Store
from llamakeep.stores.memory import MemoryStore

Factory: TypeAlias = Callable[[int, Path], Store]

FACTORIES: dict[str, Factory] = {
    "memory": lambda capacity_bytes, _: MemoryStore(capacity_bytes),
    "memory-verified": lambda capacity_bytes, _: MemoryStore(capacity_bytes, verify=True),
}
"""Makes a store of that capacity, which may use the directory, by the name of its kind."""

TIERS = {"ram", "disk", "shared"}


def name_of(word: str) -> bytes:
    return blake3(word.encode()).digest()


def blob(n_bytes: int, fill: int = 0) -> Buffer:
    return np.full(n_bytes, fill, np.uint8)


def never() -> Buffer:
    raise AssertionError("a blob was produced that nobody needs")


def breaks() -> Buffer:
    raise ZeroDivisionError


@pytest.fixture(params=FACTORIES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Store]:
    """`make(capacity_bytes)` makes an empty store, of each kind in turn."""
    factory = FACTORIES[request.param]
    return lambda capacity_bytes: factory(capacity_bytes, tmp_path)


@pytest.fixture
def store(make: Callable[[int], Store]) -> Store:
    return make(100)


# -- the contract ----------------------------------------------------------------------------------


def test_what_was_put_is_there(store: Store) -> None:
    assert store.tier in TIERS
    assert store.put(name_of("a"), 30, lambda: blob(30, 1))
    assert store.put(name_of("b"), 20, lambda: blob(20, 2))
    data = store.get(name_of("a"))
    assert data is not None
    assert (data.dtype, data.shape) == (np.dtype(np.uint8), (30,))
    assert (data == 1).all()
    assert set(store) == {name_of("a"), name_of("b")}
    assert len(store) == 2
    assert name_of("b") in store
    assert (store.used_bytes, store.capacity_bytes) == (50, 100)
    store.check()


def test_what_was_not_put_is_not_there(store: Store) -> None:
    store.put(name_of("a"), 30, lambda: blob(30))
    assert store.get(name_of("b")) is None
    assert name_of("b") not in store
    assert "a" not in store
    assert None not in store
    assert store.delete(name_of("b")) is False
    assert (len(store), store.used_bytes) == (1, 30)


def test_delete_gives_the_bytes_back(store: Store) -> None:
    store.put(name_of("a"), 30, lambda: blob(30))
    store.put(name_of("b"), 20, lambda: blob(20))
    assert store.delete(name_of("a")) is True
    assert store.get(name_of("a")) is None
    assert (list(store), store.used_bytes) == ([name_of("b")], 20)
    assert store.delete(name_of("a")) is False
    store.check()


def test_clear_leaves_zero_and_the_store_usable(store: Store) -> None:
    for word in "abc":
        store.put(name_of(word), 30, lambda: blob(30))
    store.clear()
    assert (len(store), store.used_bytes, list(store)) == (0, 0, [])
    store.clear()
    assert store.put(name_of("a"), 100, lambda: blob(100))
    store.check()


def test_a_blob_may_be_deleted_while_iterating(store: Store) -> None:
    for word in "abc":
        store.put(name_of(word), 10, lambda: blob(10))
    for name in store:
        store.delete(name)
    assert store.used_bytes == 0


def test_the_first_writer_wins(store: Store) -> None:
    store.put(name_of("a"), 30, lambda: blob(30, 1))
    assert store.put(name_of("a"), 30, never)
    assert store.put(name_of("a"), 90, never)  # whatever its size would be
    data = store.get(name_of("a"))
    assert data is not None
    assert (data == 1).all()
    assert store.used_bytes == 30


def test_produce_is_called_once(store: Store) -> None:
    calls = []

    def produce() -> Buffer:
        calls.append(1)
        return blob(30)

    store.put(name_of("a"), 30, produce)
    assert calls == [1]


def test_what_does_not_fit_is_neither_produced_nor_makes_room(store: Store) -> None:
    store.put(name_of("a"), 60, lambda: blob(60))
    for n_bytes in (41, 100, 101, 1 << 50):
        assert store.put(name_of("b"), n_bytes, never) is False
    assert (list(store), store.used_bytes) == ([name_of("a")], 60)
    assert store.put(name_of("b"), 40, lambda: blob(40))
    store.check()


def test_bytes_are_counted_before_they_exist(store: Store) -> None:
    store.put(name_of("a"), 60, lambda: blob(60))
    seen = []

    def produce() -> Buffer:
        seen.append((store.used_bytes, name_of("b") in store, store.get(name_of("b"))))
        assert store.put(name_of("c"), 1, never) is False
        return blob(40)

    store.put(name_of("b"), 40, produce)
    assert seen == [(100, False, None)]
    assert store.used_bytes == 100


def test_produce_that_raises_leaves_nothing(store: Store) -> None:
    store.put(name_of("a"), 60, lambda: blob(60))
    with pytest.raises(ZeroDivisionError):
        store.put(name_of("b"), 40, breaks)
    assert (list(store), store.used_bytes) == ([name_of("a")], 60)
    assert store.put(name_of("b"), 40, lambda: blob(40))
    store.check()


@pytest.mark.parametrize("n_bytes", [0, 39, 41, 400])
def test_a_blob_of_another_size_is_an_error_and_not_kept(store: Store, n_bytes: int) -> None:
    with pytest.raises(IntegrityError, match=rf"{n_bytes}.*40"):
        store.put(name_of("a"), 40, lambda: blob(n_bytes))
    assert (len(store), store.used_bytes) == (0, 0)
    assert store.get(name_of("a")) is None
    store.check()


def test_a_negative_size_is_an_error(store: Store) -> None:
    with pytest.raises(InvalidValue, match="-1"):
        store.put(name_of("a"), -1, never)
    assert len(store) == 0


def test_an_empty_blob_is_a_blob(store: Store) -> None:
    assert store.put(name_of("a"), 0, lambda: blob(0))
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


def test_fault_13_what_is_handed_out_cannot_be_changed(store: Store) -> None:
    store.put(name_of("a"), 30, lambda: blob(30, 7))
    for _ in range(2):
        data = store.get(name_of("a"))
        assert data is not None
        with pytest.raises(ValueError, match="read-only"):
            data[0] = 1
        assert (data == 7).all()


@pytest.mark.parametrize("n_bytes", [127, 128, 129, 4096, 70_001])
def test_fault_41_all_byte_values_come_back(make: Callable[[int], Store], n_bytes: int) -> None:
    store = make(n_bytes)
    written = (np.arange(n_bytes) * 7 % 256).astype(np.uint8)
    store.put(name_of("a"), n_bytes, written.copy)
    data = store.get(name_of("a"))
    assert data is not None
    assert np.array_equal(data, written)


# -- the contract against a dictionary -------------------------------------------------------------

NAMES = [name_of(word) for word in "abcdefgh"]
names = st.sampled_from(NAMES)
sizes = st.integers(0, 60)


class StoreAgainstDict(RuleBasedStateMachine):
    """Any order of calls does to a store what it does to a dictionary with a limit."""

    factory: Factory
    capacity_bytes = 100

    @initialize()
    def empty(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="llamakeep-store-")
        self.store = type(self).factory(self.capacity_bytes, Path(self.directory.name))
        self.model: dict[bytes, bytes] = {}

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.model.values()))

    @rule(name=names, n_bytes=sizes, fill=st.integers(0, 255))
    def put(self, name: bytes, n_bytes: int, fill: int) -> None:
        fits = self.used_bytes + n_bytes <= self.capacity_bytes
        expected = self.used_bytes + n_bytes

        def produce() -> Buffer:
            assert fits
            assert name not in self.model
            assert self.store.used_bytes == expected
            return blob(n_bytes, fill)

        kept = self.store.put(name, n_bytes, produce)
        assert kept == (name in self.model or fits)
        if kept:
            self.model.setdefault(name, bytes([fill]) * n_bytes)

    @rule(name=names, n_bytes=sizes, off_by=st.sampled_from([1, 30]))
    def put_another_size(self, name: bytes, n_bytes: int, off_by: int) -> None:
        if name in self.model or self.used_bytes + n_bytes > self.capacity_bytes:
            assert self.store.put(name, n_bytes, never) == (name in self.model)
            return
        with pytest.raises(IntegrityError):
            self.store.put(name, n_bytes, lambda: blob(n_bytes + off_by))

    @rule(name=names, n_bytes=sizes)
    def put_and_fail(self, name: bytes, n_bytes: int) -> None:
        if name in self.model or self.used_bytes + n_bytes > self.capacity_bytes:
            self.store.put(name, n_bytes, never)
            return
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
        try:
            for name in list(self.model):
                assert self.store.delete(name)
            assert self.store.used_bytes == 0
            self.store.check()
        finally:
            self.directory.cleanup()


@pytest.mark.parametrize("kind", FACTORIES)
def test_any_order_of_calls(kind: str) -> None:
    machine = type("Machine", (StoreAgainstDict,), {"factory": staticmethod(FACTORIES[kind])})
    test_case = machine.TestCase
    test_case.settings = settings(
        max_examples=60, stateful_step_count=30, deadline=None, print_blob=True
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
