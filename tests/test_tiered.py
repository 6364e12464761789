"""`TieredStore` and the queue behind it, on tiers that can be stopped and made to fail."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from llamakeep.errors import InvalidValue
from llamakeep.states import Block, Buffer
from llamakeep.stores.base import State
from llamakeep.stores.behind import Behind
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import PathNames, Place

TOKENS = np.arange(100, 132, dtype=np.int32)
NAMES = PathNames(b"space", TOKENS, 16)
PATH = [NAMES.segment(0, 16), NAMES.segment(16, 32)]


def name_of(word: str) -> bytes:
    return blake3(word.encode()).digest()


def blob(n_bytes: int, fill: int = 0) -> Buffer:
    return np.full(n_bytes, fill, np.uint8)


def path(names: list[bytes]) -> list[State]:
    """Return the states of these names, each with the place that `put` gave it."""
    return [State(name, PLACES[name]) for name in names]


PLACES: dict[bytes, Place] = {}


def put(store: TieredStore, place: Place, n_bytes: int = 10, fill: int = 1) -> bytes:
    PLACES[place.name] = place
    assert store.put(place.name, n_bytes, lambda: blob(n_bytes, fill), place)
    return place.name


@pytest.fixture
def disk() -> FakeTier:
    return FakeTier()


@pytest.fixture
def make(disk: FakeTier) -> Iterator[Any]:
    """`make(**options)` makes a store over `disk`; all are closed with the test."""
    made: list[TieredStore] = []

    def begin(*tiers: FakeTier, ram: int = 1000, **options: Any) -> TieredStore:
        made.append(TieredStore(MemoryStore(ram), *(tiers or (disk,)), **options))
        return made[-1]

    yield begin
    for tier in (disk, *(t for store in made for t in store.below)):
        tier.gate.set()  # type: ignore[attr-defined]
    for store in made:
        store.close()


# -- going down ----------------------------------------------------------------------------------


def test_what_was_seen_goes_down_behind_and_stays_in_memory(make: Any, disk: FakeTier) -> None:
    store = make()
    names = [put(store, place) for place in PATH]
    assert store.flush(5)
    assert len(disk) == 0  # nothing goes down before the path to it is known
    store.seen(path(names), 32, used=False)
    assert store.flush(5)
    assert set(disk) == set(names) == set(store)
    assert all(map(store.holds, names))
    assert store.counters["written_disk"] == 2
    store.seen(path(names), 32, used=True)
    assert store.flush(5)
    assert disk.calls["put"] == 2  # once is enough
    assert disk.hits.keys() == set(names)


def test_a_blob_without_a_place_goes_down_at_once(make: Any, disk: FakeTier) -> None:
    store = make()
    store.put(name_of("a"), 10, lambda: blob(10))
    assert store.flush(5)
    assert name_of("a") in disk


def test_a_put_does_not_wait_for_a_slow_tier(make: Any, disk: FakeTier) -> None:
    store = make()
    disk.gate.clear()
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    assert store.flush(0) is False
    assert all(store.get(name) is not None for name in names)
    disk.gate.set()
    assert store.flush(5)
    assert len(disk) == 2


def test_what_memory_holds_takes_no_room_in_the_queue(make: Any, disk: FakeTier) -> None:
    store = make(queue_bytes=0)
    disk.gate.clear()
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    assert store.stats()["queue_bytes"] == 0
    disk.gate.set()
    assert store.flush(5)
    assert set(disk) == set(names)


def test_what_memory_evicts_is_bounded_in_bytes_and_dropped_with_a_count(
    make: Any, disk: FakeTier
) -> None:
    store = make(queue_bytes=15)
    disk.gate.clear()
    store.put(name_of("busy"), 1, lambda: blob(1))  # holds the queue up
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    for name in names:
        store.evict(name)
    assert store.stats()["queue_bytes"] == 10
    assert store.counters["dropped_queue_full"] == 1
    disk.gate.set()
    assert store.flush(5)
    assert set(disk) == {name_of("busy"), names[0]}
    assert (store.stats()["queue_peak_bytes"], store.stats()["queue_bytes"]) == (10, 0)


def test_put_below_takes_its_room_before_the_blob_is_made(make: Any, disk: FakeTier) -> None:
    store, place = make(ram=0, queue_bytes=15), PATH[0]
    disk.gate.clear()
    seen = []

    def produce() -> Buffer:
        seen.append(store.stats()["queue_bytes"])
        return blob(10)

    assert store.put_below(place.name, 10, produce, place) == "disk"
    assert seen == [10]
    assert store.put_below(PATH[1].name, 10, produce, PATH[1]) == ""
    assert seen == [10]
    with pytest.raises(ZeroDivisionError):
        store.put_below(PATH[1].name, 5, lambda: 1 // 0, PATH[1])  # type: ignore[arg-type,return-value]
    assert store.stats()["queue_bytes"] == 10
    disk.gate.set()
    assert store.flush(5)
    assert store.stats()["queue_bytes"] == 0
    assert place.name in disk


def test_nothing_goes_down_without_what_it_hangs_off(make: Any, disk: FakeTier) -> None:
    store = make(second_sighting=True)
    first, second = (put(store, place) for place in PATH)
    store._writes[second].sightings = 3
    store.seen(path([first, second]), 32, used=False)
    assert store.flush(5)
    assert len(disk) == 0


def test_a_tier_that_failed_gets_what_it_missed_when_it_is_seen_again(
    make: Any, disk: FakeTier
) -> None:
    store = make()
    disk.failing.add("put")
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    assert store.flush(5) is False
    assert store.counters["refused_disk"] >= 1
    disk.failing.clear()
    store.seen(path(names), 32, used=True)
    assert store.flush(5)
    assert set(disk) == set(names)


def test_what_is_evicted_while_it_waits_still_goes_down_and_can_be_read(
    make: Any, disk: FakeTier
) -> None:
    store = make()
    disk.gate.clear()
    name = put(store, PATH[0], fill=7)
    store.seen(path([name]), 16, used=False)
    store.evict(name)
    assert store.used_bytes == 0
    assert next(store.get_many([name])).tolist() == [7] * 10
    block = Block(NAMES.block(0), 0, TOKENS[:16])
    assert [record.name for record in store.find_pending([block])] == [name]
    other = Block(NAMES.block(0), 0, TOKENS[1:17])
    assert store.find_pending([other]) == []
    disk.gate.set()
    assert store.flush(5)
    assert name in disk
    assert store.find_pending([block]) == []


def test_what_is_evicted_before_it_is_seen_does_not_go_down(make: Any, disk: FakeTier) -> None:
    store = make()
    name = put(store, PATH[0])
    store.evict(name)
    store.seen(path([name]), 16, used=True)
    assert store.flush(5)
    assert name not in disk
    assert name not in store


def test_a_tier_that_lost_something_gets_it_again_before_what_hangs_off_it(
    make: Any, disk: FakeTier
) -> None:
    store = make()
    first = put(store, PATH[0])
    store.seen(path([first]), 16, used=False)
    assert store.flush(5)
    disk.delete(first)
    second = put(store, PATH[1])
    store.seen(path([first, second]), 32, used=False)
    assert store.flush(5)
    assert set(disk) == {first, second}
    disk.delete(first)
    store.seen(path([first, second]), 32, used=True)
    assert store.flush(5)
    assert set(disk) == {first, second}


def test_what_hangs_off_something_that_is_nowhere_does_not_go_down(
    make: Any, disk: FakeTier
) -> None:
    store = make()
    first = put(store, PATH[0])
    store.seen(path([first]), 16, used=False)
    assert store.flush(5)
    store.evict(first)
    disk.delete(first)
    second = put(store, PATH[1])
    store.seen(path([first, second]), 32, used=False)
    assert store.flush(5) is False
    assert len(disk) == 0


# -- admission -------------------------------------------------------------------------------------


def test_second_sighting_waits_for_a_second_prompt(make: Any, disk: FakeTier) -> None:
    store = make(second_sighting=True)
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    store.seen(path(names), 40, used=False)
    assert store.flush(5)
    assert len(disk) == 0
    store.seen(path(names[:1]), 60, used=True)
    assert store.flush(5)
    assert set(disk) == set(names[:1])
    assert store.put_below(name_of("x"), 5, lambda: blob(5), PATH[0]) == ""


def test_min_tokens_keeps_short_prompts_up(make: Any, disk: FakeTier) -> None:
    store = make(min_tokens=32)
    first = put(store, PATH[0])
    store.seen(path([first]), 16, used=True)
    assert store.flush(5)
    assert len(disk) == 0
    second = put(store, PATH[1])
    store.seen(path([first, second]), 32, used=False)
    assert store.flush(5)
    assert set(disk) == {first, second}  # with what the longer one hangs off


@pytest.mark.parametrize("option", ["queue_bytes", "min_tokens"])
def test_negative_limits_are_refused(option: str) -> None:
    with pytest.raises(InvalidValue, match=f"{option} must be 0 or more, not -1"):
        TieredStore(MemoryStore(10), **{option: -1})


# -- tails -----------------------------------------------------------------------------------------


def test_a_tail_that_waits_is_not_written_when_a_longer_one_takes_its_place(
    make: Any, disk: FakeTier
) -> None:
    store = make()
    disk.gate.clear()
    store.put(name_of("busy"), 1, lambda: blob(1))  # holds the queue up
    short, longer = NAMES.segment(16, 20), NAMES.segment(16, 30)
    old = put(store, short)
    store.seen(path([old]), 20, used=False)
    new = put(store, longer)
    store.supersede(old, new)
    store.seen(path([new]), 30, used=False)
    disk.gate.set()
    assert store.flush(5)
    assert store.counters["cancelled"] == 1
    assert set(disk) == {name_of("busy"), new}
    assert not store.holds(old)


@pytest.mark.parametrize("written", [False, True])
def test_what_hangs_off_a_tail_goes_down_with_the_longer_one(
    make: Any, disk: FakeTier, written: bool
) -> None:
    """A checkpoint at a tail's end waits while the answer makes the tail longer, twice."""
    store = make()
    tails = [NAMES.segment(0, end) for end in (5, 9, 14)]
    checkpoint = NAMES.checkpoint(0, 5)
    disk.gate.clear()
    store.put(name_of("first in the queue"), 10, lambda: blob(10))
    names = [put(store, tails[0]), put(store, checkpoint)]
    store.seen(path(names), 5, used=False)
    for before, after in itertools.pairwise(tails):
        put(store, after)
        store.supersede(before.name, after.name)
    if written:
        store.seen(path([tails[2].name]), 14, used=False)
    disk.gate.set()
    assert store.flush(5)
    if not written:
        store.seen(path([tails[2].name]), 14, used=False)
        assert store.flush(5)
    assert {checkpoint.name, tails[2].name} <= set(disk)
    assert not {tails[0].name, tails[1].name} & set(disk)


def test_a_tail_that_was_written_goes_only_when_the_longer_one_is_there(
    make: Any, disk: FakeTier
) -> None:
    store = make()
    old, new = NAMES.segment(16, 20), NAMES.segment(16, 30)
    store.seen(path([put(store, old)]), 20, used=False)
    assert store.flush(5)
    put(store, new)
    store.supersede(old.name, new.name)
    assert store.flush(5)
    assert set(disk) == {old.name}
    store.seen(path([new.name]), 30, used=False)
    assert store.flush(5)
    assert set(disk) == {new.name}


# -- reading ---------------------------------------------------------------------------------------


def test_reads_fall_through_to_the_nearest_that_has_it(make: Any) -> None:
    disk, shared = FakeTier(), FakeTier(tier="shared")
    store = make(disk, shared)
    for tier, word, fill in ((disk, "d", 1), (shared, "d", 2), (shared, "s", 3)):
        tier.put(name_of(word), 4, lambda fill=fill: blob(4, fill))
    wanted = [name_of(word) for word in ("d", "s", "none", "d")]
    found = [None if data is None else int(data[0]) for data in store.get_many(wanted)]
    assert found == [1, 3, None, 1]
    assert shared.calls["get"] == 2  # not for what the disk has


def test_what_came_from_below_is_offered_to_memory(make: Any, disk: FakeTier) -> None:
    store = make()
    disk.put(name_of("a"), 4, lambda: blob(4, 9))
    list(store.get_many([name_of("a")]))
    assert store.flush(5)
    list(store.get_many([name_of("a")]))  # twice before it is taken
    assert store.flush(5)
    assert (store.stats()["ready_bytes"], store.stats()["queue_bytes"]) == (4, 0)
    [(name, data, tier)] = store.take_promoted()
    assert (name, data.tolist(), tier) == (name_of("a"), [9] * 4, "disk")
    assert list(store.take_promoted()) == []
    assert store.admit(name, data, None, tier)
    assert store.holds(name)
    assert store.stats()["ready_bytes"] == 0


def test_what_is_too_large_for_memory_is_not_offered(make: Any, disk: FakeTier) -> None:
    store = make(ram=3)
    disk.put(name_of("a"), 4, lambda: blob(4))
    assert next(store.get_many([name_of("a")])) is not None
    assert store.flush(5)
    assert list(store.take_promoted()) == []


def test_get_takes_into_memory_what_fits_there(make: Any, disk: FakeTier) -> None:
    store = make(ram=5)
    for word in "ab":
        disk.put(name_of(word), 4, lambda: blob(4))
    assert store.get(name_of("a")) is not None
    assert store.holds(name_of("a"))
    assert store.get(name_of("b")) is not None
    assert not store.holds(name_of("b"))


# -- deleting and closing --------------------------------------------------------------------------


def test_what_is_deleted_is_gone_at_once_everywhere(make: Any, disk: FakeTier) -> None:
    store = make()
    store.put(name_of("a"), 4, lambda: blob(4, 1))
    assert store.flush(5)
    disk.gate.clear()
    store.put(name_of("busy"), 1, lambda: blob(1))
    assert store.delete(name_of("a"))
    assert store.get(name_of("a")) is None
    assert name_of("a") not in store
    assert name_of("a") not in set(store)
    assert list(store.get_many([name_of("a")])) == [None]
    disk.gate.set()
    assert store.flush(5)
    assert name_of("a") not in disk
    assert not store.delete(name_of("a"))
    store.put(name_of("a"), 4, lambda: blob(4, 2))
    assert store.flush(5)
    assert disk.get(name_of("a")) is not None


def test_close_writes_what_no_tier_took_before(make: Any, disk: FakeTier) -> None:
    store = make()
    disk.failing.add("put")
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    assert store.flush(5) is False
    disk.failing.clear()
    store.close()
    assert set(disk.another()) == set(names)
    assert store.counters["dropped_at_close"] == 0


def test_stats_cost_nothing_that_grows(make: Any, disk: FakeTier) -> None:
    store = make()
    for n in range(50):
        store.put(name_of(str(n)), 1, lambda: blob(1))
    assert store.flush(5)
    disk.calls.clear()

    class Counted(FakeTier):
        def __iter__(self) -> Any:
            raise AssertionError("everything was listed")

    disk.__class__ = Counted
    assert store.stats()["tiers"]["disk"]["used_bytes"] == 50


def test_a_slow_tier_does_not_hold_up_the_other(make: Any) -> None:
    disk, shared = FakeTier(), FakeTier(tier="shared")
    store = make(disk, shared)
    shared.gate.clear()
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    assert store._behind[disk].flush(5)
    assert set(disk) == set(names)
    assert len(shared) == 0
    shared.gate.set()
    assert store.flush(5)
    assert set(shared) == set(names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_hangs_nor_shares_the_queue() -> None:
    code = """
import os, numpy as np
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.tiered import TieredStore
disk = FakeTier()
store = TieredStore(MemoryStore(1000), disk)
disk.gate.clear()
for n in range(5):
    store.put(bytes([n]) * 32, 8, lambda: np.zeros(8, np.uint8))
pid = os.fork()
disk.gate.set()
if pid == 0:
    for n in range(5, 8):
        store.put(bytes([n]) * 32, 8, lambda: np.zeros(8, np.uint8))
    os._exit(0 if store.flush(20) and len(disk) >= 8 else 1)
print(os.waitpid(pid, 0)[1], store.flush(20), len(disk))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["0", "True", "5"], "")


def test_close_writes_what_waits_and_closes_the_tiers(make: Any, disk: FakeTier) -> None:
    store = make()
    names = [put(store, place) for place in PATH]
    store.seen(path(names), 32, used=False)
    store.close()
    assert set(disk.another()) == set(names)
    assert disk.closed
    store.close()
    assert store.put(name_of("late"), 1, lambda: blob(1))  # in memory still
    assert store.counters["dropped_at_close"] == 0


def test_close_gives_up_in_time_and_says_what_was_dropped(
    make: Any, disk: FakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    disk.gate.clear()
    for word in "abc":
        store.put(name_of(word), 4, lambda: blob(4))
    store.close(timeout=0)
    assert store.counters["dropped_at_close"] == 3
    assert "did not reach the tiers below" in caplog.text


def test_what_waits_is_written_when_the_process_ends() -> None:
    code = """
import atexit, numpy as np
atexit.register(lambda: print(len(disk.another())))
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.memory import MemoryStore
disk = FakeTier()
from llamakeep.stores.tiered import TieredStore
store = TieredStore(MemoryStore(1000), disk)
disk.gate.clear()
for n in range(5):
    store.put(bytes([n]) * 32, 8, lambda: np.zeros(8, np.uint8))
disk.gate.set()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "5", "")


def test_stats_say_what_waits_and_what_each_tier_did(make: Any, disk: FakeTier) -> None:
    store = make()
    put(store, PATH[0])
    stats = store.stats()
    assert stats["tiers"]["disk"]["capacity_bytes"] == disk.capacity_bytes
    assert {"queue_bytes", "queue_capacity_bytes", "queued", "errors"} <= stats.keys()
    assert "MemoryStore" in repr(store)
    assert "FakeTier(disk, 0 blobs)" in repr(store)


# -- the queue -------------------------------------------------------------------------------------


def test_jobs_run_in_order() -> None:
    behind, done = Behind(), []
    assert behind.flush(0)
    for n in range(20):
        assert behind.submit(lambda n=n: done.append(n))
    assert behind.flush(5)
    assert done == list(range(20))
    behind.close()
    behind.close()
    assert not behind.submit(lambda: None)
    assert behind.flush(0)


def test_a_job_that_raises_is_logged_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    behind, done = Behind(), []
    behind.submit(lambda: 1 / 0)
    behind.submit(lambda: done.append(1))
    behind.close()
    assert done == [1]
    assert behind.errors == 1
    assert "ZeroDivisionError" in caplog.text


def test_what_is_not_begun_in_time_is_given_up_and_nobody_waits_for_it() -> None:
    behind, gate, begun, done = Behind(), threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        gate.wait()

    behind.submit(wait)
    behind.submit(lambda: done.append(1))
    begun.wait()
    waiting = threading.Thread(target=behind.flush)
    waiting.start()
    assert not behind.flush(0)
    behind.close(0)
    gate.set()
    waiting.join(5)
    assert not waiting.is_alive()
    assert done == []


def test_many_threads_submit_and_flush() -> None:
    behind, done = Behind(), []

    def work() -> None:
        for _ in range(200):
            behind.submit(lambda: done.append(1))
            behind.flush(5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    behind.close()
    assert len(done) == 800
