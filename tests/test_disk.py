"""The disk store: what lies in its directory, what it refuses, and what it survives."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
import pickle
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llamakeep.errors import IntegrityError, InvalidValue, StoreError
from llamakeep.stores import envelope
from llamakeep.stores.disk import DiskStore, layout, owners
from llamakeep.stores.disk.index import INDEX_FILE
from llamakeep.stores.disk.pool import BufferPool
from llamakeep.tokens import PathNames
from tests.disk_tools import (
    NAMESPACE,
    Failing,
    Open,
    blocks,
    content,
    du,
    files_below,
    is_right,
    opening,
    pages,
    path,
    posix,
    put,
)

as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can do this"
)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_store(where: Path) -> Iterator[Open]:
    with opening(where) as open_store:
        yield open_store


@pytest.fixture
def store(open_store: Open) -> DiskStore:
    return open_store()


PLACES = [
    path(range(6)).segment(0, 4),
    path(range(6)).checkpoint(0, 3),
    path(range(6)).segment(4, 6),
]


def fill(store: DiskStore) -> None:
    for place in PLACES:
        assert put(store, place)


def file_of(store: DiskStore, name: bytes) -> Path:
    return store.path / "blobs" / name.hex()[:2] / f"{name.hex()}.state"


# -- the directory ---------------------------------------------------------------------------------


def test_a_state_is_one_file_under_its_name(store: DiskStore) -> None:
    fill(store)
    assert files_below(store.path) == sorted(file_of(store, place.name) for place in PLACES)
    assert store.used_bytes == du(store.path) == pages(3)
    assert store.counters == {"written": 3}


@pytest.mark.parametrize("n_bytes", [0, 1, 3920, 3921, 70_000])
def test_what_a_state_counts_for_is_what_its_file_occupies(store: DiskStore, n_bytes: int) -> None:
    place = path(range(6)).segment(4, 6)
    for at, n in ((None, b"o" * 32), (place, place.name)):
        cost = store.cost_bytes(n_bytes, at)
        before = store.used_bytes
        assert store.put(n, n_bytes, lambda n=n: content(n, n_bytes), at)
        assert store.used_bytes - before == cost
        assert cost == -(-file_of(store, n).stat().st_size // 4096) * 4096
    assert du(store.path) == store.used_bytes


@posix
def test_only_the_owner_can_read_anything(where: Path, open_store: Open) -> None:
    old = os.umask(0)
    try:
        store = open_store()
        fill(store)
        for each in [where, *where.rglob("*")]:
            mode = stat.S_IMODE(each.stat().st_mode)
            assert mode == (0o700 if each.is_dir() else 0o600), each
        assert {each.name for each in where.iterdir()} >= {f"{INDEX_FILE}-wal", "FORMAT"}
    finally:
        os.umask(old)


@posix
def test_what_is_open_to_others_is_closed(where: Path, open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.close()
    for each in (where, where / "blobs", where / "tmp"):
        each.chmod(0o755)
    for each in (where / INDEX_FILE, where / "FORMAT"):
        each.chmod(0o644)
    open_store()
    for each in (where, where / "blobs", where / "tmp"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    for each in (where / INDEX_FILE, where / "FORMAT", where / f"{INDEX_FILE}-wal"):
        assert not each.exists() or stat.S_IMODE(each.stat().st_mode) == 0o600


@as_root
@pytest.mark.parametrize("part", [".", "blobs", "tmp", INDEX_FILE])
def test_what_belongs_to_another_user_is_refused(where: Path, open_store: Open, part: str) -> None:
    open_store().close()
    os.chown(where / part, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        open_store()


def test_a_directory_of_other_things_is_refused_and_left_as_it_is(where: Path) -> None:
    where.mkdir(mode=0o755)
    where.chmod(0o755)
    (where / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match=r"letter\.txt"):
        DiskStore(where)
    assert [each.name for each in where.iterdir()] == ["letter.txt"]
    assert stat.S_IMODE(where.stat().st_mode) == 0o755


def test_a_newer_directory_is_refused(where: Path, open_store: Open) -> None:
    open_store().close()
    (where / "FORMAT").write_text(f"{layout.FORMAT}{layout.VERSION + 41}\n")
    with pytest.raises(StoreError, match=rf"version {layout.VERSION + 41}.*{layout.VERSION}"):
        open_store()


def test_a_directory_that_says_something_else_is_refused(where: Path, open_store: Open) -> None:
    open_store().close()
    (where / "FORMAT").write_text("photos, version 1")
    with pytest.raises(StoreError, match="FORMAT"):
        open_store()


@pytest.mark.parametrize("spoil", [lambda p: p.unlink(), lambda p: p.write_bytes(b"")])
def test_a_lost_marker_is_written_again(
    where: Path, open_store: Open, spoil: Callable[[Path], object]
) -> None:
    store = open_store()
    fill(store)
    store.close()
    spoil(where / "FORMAT")
    assert len(open_store()) == 3
    assert (where / "FORMAT").read_text() == f"{layout.FORMAT}{layout.VERSION}\n"


def test_a_path_that_is_a_file_is_refused(where: Path) -> None:
    where.write_text("")
    with pytest.raises(StoreError, match="cache"):
        DiskStore(where)


@posix
def test_the_path_itself_may_be_a_link(where: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    where.symlink_to(tmp_path / "real")
    with DiskStore(where, pages(9), min_free_bytes=0) as store:
        fill(store)
        assert store.path == tmp_path / "real"
        assert all(is_right(store, place.name) for place in PLACES)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes.*-1"),
        ({"min_free_bytes": -5}, "min_free_bytes.*-5"),
        ({"policy": "gut feeling"}, "gut feeling"),
    ],
)
def test_arguments_that_cannot_be_meant(
    where: Path, options: dict[str, object], match: str
) -> None:
    with pytest.raises(InvalidValue, match=match):
        DiskStore(where, **options)  # type: ignore[arg-type]
    assert not where.exists()


def test_a_name_must_be_that_of_the_place(store: DiskStore) -> None:
    place = PLACES[0]
    for name in (b"o" * 32, b"short"):
        with pytest.raises(InvalidValue, match=name.hex()):
            store.put(name, 10, lambda: content(place.name, 10), place)
    with pytest.raises(InvalidValue, match=b"short".hex()):
        store.put(b"short", 10, lambda: content(place.name, 10))
    assert len(store) == 0


def test_a_store_says_where_it_is(store: DiskStore, where: Path) -> None:
    assert repr(store) == f"DiskStore('{where}', 409,600 bytes at most)"
    assert store  # also when it is empty


# -- reading ---------------------------------------------------------------------------------------


def test_reading_does_not_ask_the_index(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    names = [place.name for place in PLACES]
    with monkeypatch.context() as patch:
        patch.setattr(store._index, "reading", lambda: pytest.fail("the index was asked"))
        patch.setattr(store._index, "writing", lambda: pytest.fail("the index was asked"))
        assert all(is_right(store, name) for name in names)
        for name, data in zip(names, store.get_many(names), strict=True):
            assert data is not None
            assert np.array_equal(data, content(name, 1000))


def test_get_many_goes_on_past_what_is_gone(store: DiskStore) -> None:
    fill(store)
    store.delete(PLACES[1].name)
    assert [data is None for data in store.get_many([p.name for p in PLACES])] == [
        False,
        True,
        False,
    ]


def test_memory_is_used_again_once_nobody_looks_at_it(store: DiskStore) -> None:
    n_bytes = 200_000
    names = [bytes([n]) * 32 for n in range(4)]
    big = [
        name for name in names if store.put(name, n_bytes, lambda name=name: content(name, n_bytes))
    ]
    assert len(big) == 2  # 100 pages have room for two
    first = store.get(big[0])
    assert first is not None
    address = first.ctypes.data
    del first
    second = store.get(big[1])
    assert second is not None
    assert second.ctypes.data == address
    third = store.get(big[0])  # the second is still looked at
    assert third is not None
    assert third.ctypes.data != address
    assert np.array_equal(second, content(big[1], n_bytes))


@pytest.mark.parametrize(
    "look",
    [
        lambda data: data[70_000:70_010],
        lambda data: data[70_000:70_010][2:8][::-1],
        lambda data: memoryview(data)[70_000:70_010],
        lambda data: data.view(np.uint16)[35_000:35_005].reshape(1, 5),
        lambda data: np.frombuffer(data, np.uint8, 10, 70_000),
    ],
    ids=["slice", "slice of a slice", "memoryview", "view", "frombuffer"],
)
def test_whatever_looks_into_memory_holds_it(look: Callable[[np.ndarray], object]) -> None:  # type: ignore[type-arg]
    pool = BufferPool(1 << 30)
    data = pool.take(100_000)
    data[:] = 7
    piece = look(data)
    before = bytes(piece)  # type: ignore[call-overload]
    del data
    gc.collect()
    assert pool.idle_bytes == 0
    for _ in range(3):
        pool.take(100_000)[:] = 9
    assert bytes(piece) == before  # type: ignore[call-overload]
    n_idle = pool.idle_bytes
    del piece
    gc.collect()
    assert pool.idle_bytes > n_idle


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(1 << 20)
    held = [pool.take(400_000) for _ in range(5)]
    assert pool.idle_bytes == 0
    held.clear()
    assert 0 < pool.idle_bytes <= 1 << 20
    held = [pool.take(100_000) for _ in range(50)]
    held.clear()
    assert pool.idle_bytes <= 1 << 20
    assert len(pool._idle) <= 8
    BufferPool(0).take(100_000)
    nothing = BufferPool(0)
    nothing.take(100_000)
    assert nothing.idle_bytes == 0


def test_little_is_not_kept_in_much_memory() -> None:
    pool = BufferPool(1 << 30)
    pool.take(10_000_000)
    assert pool.idle_bytes > 10_000_000
    small = pool.take(1_000_000)
    assert pool.idle_bytes > 10_000_000  # the large block still waits for something large
    assert small.size == 1_000_000


# -- finding ---------------------------------------------------------------------------------------


def test_find_costs_as_much_however_many_branch_off(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 65: the cost follows the prompt, not what is kept."""
    store = open_store(capacity_bytes=pages(10_000), files=Failing())
    put(store, path([1, 2]).segment(0, 2))
    counts = []
    for n_branches in (3, 300):
        for n in range(n_branches):
            put(store, path([1, 2, n]).segment(2, 3), 1)
        statements: list[str] = []
        with store._index.reading() as sql:
            sql.set_trace_callback(statements.append)
        found = store.find(blocks([1, 2, 2, 9]))
        with store._index.reading() as sql:
            sql.set_trace_callback(None)
        assert {(record.start, tuple(record.tokens)) for record in found} == {
            (0, (1, 2)),
            (2, (2,)),
        }
        counts.append(len(statements))
    assert counts[0] == counts[1]


def test_find_asks_for_no_more_than_the_prompt_has(store: DiskStore) -> None:
    fill(store)
    assert [r.start for r in store.find(blocks([0, 1, 2, 3]))] == [0, 0]
    assert store.find(blocks([9])) == []
    assert store.find([]) == []
    assert [r.start for r in store.find(blocks([0]))] == [0, 0]
    put(store, path([0, 1, 7]).segment(2, 3))
    assert sorted(r.start for r in store.find(blocks([0, 1]))) == [0, 0]
    assert sorted(r.start for r in store.find(blocks([0, 1, 7]))) == [0, 0, 2]


def test_fault_04_another_adapter_is_another_namespace(store: DiskStore) -> None:
    fill(store)
    assert store.find(blocks(range(6), b"a" * 32)) == []
    names = PathNames(b"a" * 32, np.arange(6, dtype=np.int32), 4)
    assert store.get(names.segment(0, 4).name) is None


def test_fault_43_another_kv_type_is_another_namespace(store: DiskStore) -> None:
    store.introduce(NAMESPACE, {"kv": "f16"})
    store.introduce(b"q" * 32, {"kv": "q8_0"})
    fill(store)
    assert len(store.find(blocks(range(6)))) == 3
    assert store.find(blocks(range(6), b"q" * 32)) == []
    assert store.namespaces() == {NAMESPACE: {"kv": "f16"}, b"q" * 32: {"kv": "q8_0"}}


def test_descriptions_outlive_the_process(open_store: Open) -> None:
    store = open_store()
    store.introduce(NAMESPACE, {"model": "m", "rolling": True})
    store.introduce(NAMESPACE, {"model": "n", "rolling": True, "list": [1, 2]})
    store.close()
    assert open_store().namespaces() == {NAMESPACE: {"model": "n", "rolling": True, "list": [1, 2]}}


def test_descriptions_of_what_nothing_is_kept_of_do_not_pile_up(
    where: Path, open_store: Open
) -> None:
    store = open_store()
    fill(store)
    store.introduce(NAMESPACE, {"model": "m"})
    kept = [bytes([n]) * 32 for n in range(5)]
    for namespace in kept:
        store.introduce(namespace, {"model": namespace.hex()})
        put(store, path([1], namespace).segment(0, 1))
    for n in range(300):
        store.introduce((n + 100).to_bytes(32, "big"), {"model": "asked once"})
    assert len(store.namespaces()) < 100
    assert len(list((where / "namespaces").iterdir())) == len(store.namespaces())
    assert {NAMESPACE, *kept} <= store.namespaces().keys()
    lost = (100).to_bytes(32, "big")
    assert lost not in store.namespaces()
    put(store, path([1], lost).segment(0, 1))
    assert store.namespaces()[lost] == {"model": "asked once"}
    store.check()


def test_a_namespace_can_be_forgotten(store: DiskStore) -> None:
    fill(store)
    others = path(range(6), b"a" * 32)
    put(store, others.segment(0, 4))
    store.introduce(NAMESPACE, {"model": "m"})
    store.forget_namespaces([NAMESPACE])
    assert list(store) == [others.segment(0, 4).name]
    assert store.namespaces() == {}
    put(store, PLACE)  # what comes again is described again
    assert store.namespaces() == {NAMESPACE: {"model": "m"}}
    store.check()


# -- what is not what was put ----------------------------------------------------------------------

PLACE = PLACES[2]
HEADER_BYTES = envelope.header_bytes(PLACE)

REGIONS = {
    "magic": 3,
    "version": 8,
    "flags": 10,
    "header bytes": 12,
    "payload bytes": 16,
    "name": 40,
    "kind": 56,
    "closes": 57,
    "key": 58,
    "end of the key": 63,
    "namespace": 70,
    "block name": 100,
    "origin": 128,
    "start": 136,
    "tokens": 144,
    "last token": 148,
    "seal": HEADER_BYTES - 5,
    "payload": HEADER_BYTES,
    "end of the payload": HEADER_BYTES + 999,
}


@pytest.mark.parametrize("secret", [None, "hush"])
@pytest.mark.parametrize("region", REGIONS)
def test_fault_05_a_flipped_bit_is_a_miss_with_a_reason(
    open_store: Open, region: str, secret: str | None
) -> None:
    store = open_store(secret=secret)
    fill(store)
    file = file_of(store, PLACE.name)
    data = bytearray(file.read_bytes())
    data[REGIONS[region]] ^= 0x02
    file.write_bytes(data)
    assert store.get(PLACE.name) is None
    (reason,) = [kind for kind in store.counters if kind.startswith("rejected_")]
    assert store.counters[reason] == 1
    if region in ("version", "key", "end of the key"):  # a newer program's, or another secret's
        assert reason == ("rejected_version" if region == "version" else "rejected_secret")
        assert file.exists()
        assert put(store, PLACE) is False  # what is there is not ours to overwrite
        assert file.read_bytes() == data
    else:
        assert not file.exists()
        assert PLACE.name not in store
        assert store.counters["lost"] == 1
        assert put(store, PLACE)
        assert is_right(store, PLACE.name)
    assert is_right(store, PLACES[0].name)
    assert store.used_bytes == du(store.path)


@pytest.mark.parametrize(
    "n_bytes",
    [
        0,
        1,
        7,
        8,
        143,
        144,
        175,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        HEADER_BYTES + 1,
        HEADER_BYTES + 999,
    ],
)
def test_a_truncated_file_is_a_miss(store: DiskStore, n_bytes: int) -> None:
    fill(store)
    file = file_of(store, PLACE.name)
    os.truncate(file, n_bytes)
    assert store.get(PLACE.name) is None
    assert store.counters["rejected_truncated"] == 1
    assert not file.exists()
    assert store.used_bytes == du(store.path) == pages(2)
    store.check()


def test_a_file_that_goes_on_is_a_miss(store: DiskStore) -> None:
    fill(store)
    with file_of(store, PLACE.name).open("ab") as file:
        file.write(b"more")
    assert store.get(PLACE.name) is None
    assert store.counters["rejected_corrupt"] == 1


def test_two_files_with_each_others_names_are_misses(store: DiskStore) -> None:
    fill(store)
    a, b = (file_of(store, place.name) for place in PLACES[:2])
    a.rename(a.with_suffix(".x"))
    b.rename(a)
    a.with_suffix(".x").rename(b)
    assert [store.get(place.name) for place in PLACES[:2]] == [None, None]
    assert store.counters["rejected_name"] == 2
    store.check()


def test_a_file_under_the_name_of_another_namespace_is_a_miss(store: DiskStore) -> None:
    """A state that is moved to the name of the same tokens elsewhere is not taken for it."""
    fill(store)
    other = path(range(6), b"a" * 32).segment(4, 6)
    target = file_of(store, other.name)
    target.parent.mkdir(exist_ok=True)
    shutil.copy(file_of(store, PLACE.name), target)
    assert store.get(other.name) is None
    assert store.counters["rejected_name"] == 1


@pytest.mark.parametrize("secret", [None, "another"])
def test_what_was_sealed_with_another_secret_is_left_alone(
    open_store: Open, secret: str | None
) -> None:
    writer = open_store(secret="hush")
    fill(writer)
    reader = open_store(secret=secret)
    assert [reader.get(place.name) for place in PLACES] == [None] * 3
    assert reader.counters["rejected_secret"] == 3
    assert put(reader, PLACE) is False
    assert reader.counters["refused_secret"] == 1
    report = reader.audit(fix=True)
    assert (report.problems, report.left) == ({}, {"secret": 3})
    assert all(is_right(writer, place.name) for place in PLACES)


def test_what_was_made_without_the_secret_is_left_alone(open_store: Open) -> None:
    fill(open_store())
    reader = open_store(secret="hush")
    assert [reader.get(place.name) for place in PLACES] == [None] * 3
    assert reader.counters["rejected_secret"] == 3
    assert len(files_below(reader.path)) == 3


def test_a_seal_cannot_be_made_without_the_secret(open_store: Open) -> None:
    store = open_store(secret="hush")
    fill(store)
    file = file_of(store, PLACE.name)
    forged = bytearray(file.read_bytes())
    forged[HEADER_BYTES:] = bytes(1000)
    header = bytes(forged[: HEADER_BYTES - 32])
    for key in (None, envelope.seal_key("guess")):
        seal = envelope._seal(header, np.zeros(1000, np.uint8), key)
        file.write_bytes(header + seal + bytes(1000))
        assert store.get(PLACE.name) is None
        assert store.counters["rejected_corrupt"] == 1
        store.counters.clear()


def test_fault_44_the_good_one_is_adopted_and_the_rest_reported_and_removed(
    where: Path, open_store: Open
) -> None:
    store = open_store()
    fill(store)
    good = file_of(store, PLACES[0].name)
    newer, truncated = (file_of(store, place.name) for place in PLACES[1:])
    data = bytearray(newer.read_bytes())
    data[8] = 2
    newer.write_bytes(data)
    os.truncate(truncated, 500)
    foreign, empty = (file_of(store, bytes([n]) * 32) for n in (1, 2))
    stranger = where / "blobs" / "readme.txt"
    for each, text in ((foreign, b"not a state" * 100), (empty, b""), (stranger, b"hello")):
        each.parent.mkdir(exist_ok=True)
        each.write_bytes(text)
    store.close()
    (where / INDEX_FILE).unlink()

    store = open_store()
    assert store.counters["rebuilt"] == 1
    assert list(store) == [PLACES[0].name]
    with pytest.raises(IntegrityError, match=r"empty|truncated: 2"):
        store.check()
    report = store.audit(fix=True)
    assert report.problems == {"truncated": 2, "foreign": 2}
    assert report.left == {"version": 1}
    assert files_below(where) == sorted([good, newer])
    assert is_right(store, PLACES[0].name)
    store.check()
    assert "version: 1" in str(store.audit())


def test_fault_45_a_pickle_is_never_loaded(where: Path, open_store: Open) -> None:
    store = open_store()
    fill(store)
    ran = where.parent / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(ran),)

    planted = pickle.dumps(Evil())
    in_place = file_of(store, PLACE.name)
    in_place.write_bytes(planted)
    (where / "blobs" / "cache.pkl").write_bytes(planted)
    (where / "tmp" / "x.pkl").write_bytes(planted)
    assert store.get(PLACE.name) is None
    assert store.counters["rejected_foreign" if len(planted) >= 144 else "rejected_truncated"] == 1
    report = store.audit(fix=True)
    assert report.problems == {"foreign": 2}
    store.close()
    (where / INDEX_FILE).write_bytes(planted)
    store = open_store()
    assert len(store) == 2
    assert not ran.exists()
    assert not list(where.rglob("*.pkl"))


@posix
def test_fault_46_a_link_in_place_of_a_state_is_refused(store: DiskStore, tmp_path: Path) -> None:
    fill(store)
    outside = tmp_path / "outside"
    file = file_of(store, PLACE.name)
    shutil.move(file, outside)
    kept = outside.read_bytes()
    file.symlink_to(outside)
    assert store.get(PLACE.name) is None
    assert store.counters["rejected_symlink"] == 1
    assert put(store, PLACE) is False
    assert store.counters["refused_symlink"] == 1
    assert file.is_symlink()
    with pytest.raises(IntegrityError, match="symlink: 1"):
        store.check()
    report = store.audit(fix=True)
    assert report.problems["symlink"] == 1
    assert not file.is_symlink()
    assert outside.read_bytes() == kept
    assert put(store, PLACE)
    assert is_right(store, PLACE.name)
    store.check()


@posix
def test_a_link_in_place_of_a_state_is_removed_and_not_its_target(
    store: DiskStore, tmp_path: Path
) -> None:
    fill(store)
    outside = tmp_path / "outside"
    shutil.move(file_of(store, PLACE.name), outside)
    file_of(store, PLACE.name).symlink_to(outside)
    store.clear()
    assert outside.exists()
    assert not file_of(store, PLACE.name).is_symlink()


@posix
def test_a_link_in_place_of_a_directory_of_states_is_refused(
    store: DiskStore, tmp_path: Path
) -> None:
    fill(store)
    shard = file_of(store, PLACE.name).parent
    shutil.move(shard, tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    before = {each.name: each.read_bytes() for each in (tmp_path / "outside").iterdir()}
    assert store.get(PLACE.name) is None
    assert store.counters["rejected_symlink"] == 1
    assert put(store, PLACE) is False
    assert store.delete(PLACE.name) is False
    new = bytes.fromhex(shard.name) + b"x" * 31
    assert store.put(new, 10, lambda: content(new, 10)) is False
    assert {each.name: each.read_bytes() for each in (tmp_path / "outside").iterdir()} == before
    report = store.audit(fix=True)
    assert report.problems["symlink"] == 1
    assert {each.name: each.read_bytes() for each in (tmp_path / "outside").iterdir()} == before
    assert put(store, PLACE)
    store.check()


@posix
@pytest.mark.parametrize(
    "part", ["blobs", "tmp", INDEX_FILE, f"{INDEX_FILE}-wal", "FORMAT", "lock"]
)
def test_a_link_in_place_of_a_part_is_refused(
    where: Path, tmp_path: Path, open_store: Open, part: str
) -> None:
    open_store().close()
    outside = tmp_path / "outside"
    if (where / part).exists():
        shutil.move(where / part, outside)
    else:
        outside.write_bytes(b"")
    (where / part).symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        open_store()


@posix
def test_an_index_that_becomes_a_link_is_refused(store: DiskStore, tmp_path: Path) -> None:
    fill(store)
    shutil.copy(store.path / INDEX_FILE, tmp_path / "outside")
    (store.path / INDEX_FILE).unlink()
    (store.path / INDEX_FILE).symlink_to(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    assert put(store, path([7]).segment(0, 1)) is False
    assert store.find(blocks(range(6))) == []
    assert is_right(store, PLACE.name)
    assert (tmp_path / "outside").read_bytes() == before
    with pytest.raises(StoreError, match="symbolic link"):
        store.audit(fix=True)


@posix
def test_a_pipe_in_place_of_a_state_does_not_block(store: DiskStore) -> None:
    fill(store)
    file = file_of(store, PLACE.name)
    file.unlink()
    os.mkfifo(file)
    assert store.get(PLACE.name) is None
    assert store.counters["rejected_foreign"] == 1


def test_what_is_refused_is_logged_once_loudly(
    store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store)
    for place in PLACES[:2]:
        os.truncate(file_of(store, place.name), 10)
    with caplog.at_level(logging.INFO, "llamakeep"):
        for place in PLACES[:2]:
            store.get(place.name)
    levels = [r.levelno for r in caplog.records if "rejected_truncated" in r.message]
    assert levels == [logging.WARNING, logging.INFO]
    assert PLACES[0].name.hex() in caplog.records[0].message


def test_a_file_that_was_removed_is_a_miss_and_forgotten(store: DiskStore) -> None:
    fill(store)
    file_of(store, PLACE.name).unlink()
    assert store.get(PLACE.name) is None
    assert (len(store), store.used_bytes, store.counters["lost"]) == (2, pages(2), 1)
    file_of(store, PLACES[0].name).unlink()
    assert put(store, PLACES[0])  # what a row says is not believed without the file
    assert is_right(store, PLACES[0].name)
    store.check()


# -- comparing and mending -------------------------------------------------------------------------


def test_check_finds_and_mends_what_is_wrong(store: DiskStore) -> None:
    fill(store)
    extra = path([8, 9]).segment(0, 2)
    put(store, extra)
    with store._index.writing() as sql:
        sql.execute("DELETE FROM states WHERE name = ?", (PLACES[0].name,))
        sql.execute("UPDATE states SET parent = ? WHERE name = ?", (extra.name, PLACES[1].name))
        sql.execute("UPDATE states SET start = 5 WHERE name = ?", (PLACES[2].name,))
        sql.execute("UPDATE totals SET used_bytes = used_bytes + 5")
    file_of(store, extra.name).unlink()
    (store.path / "tmp" / "left.part").write_bytes(b"half a state")
    with pytest.raises(IntegrityError) as raised:
        store.check()
    for part in (
        "unindexed: 1",
        "missing: 1",
        "parents: 1",
        "wrong: 1",
        "leftovers: 1",
        "bytes: 5",
    ):
        assert part in str(raised.value)
    report = store.audit(fix=True)
    assert report.fixed
    report = store.audit()
    assert (report.problems, report.n_states, report.used_bytes) == ({}, 3, pages(3))
    assert all(is_right(store, place.name) for place in PLACES)
    assert not files_below(store.path / "tmp")
    with store._index.reading() as sql:
        parents = dict(sql.execute("SELECT name, parent FROM states").fetchall())
    assert parents == {
        PLACES[0].name: None,
        PLACES[1].name: PLACES[0].name,
        PLACES[2].name: None,
    }


def test_check_reads_what_it_checks(store: DiskStore) -> None:
    fill(store)
    file = file_of(store, PLACE.name)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert store.audit(verify=False).problems == {}
    with pytest.raises(IntegrityError, match="corrupt: 1"):
        store.check()
    assert file.exists()
    store.check(fix=True)
    assert not file.exists()
    store.check()


def test_foreign_directories_are_reported_and_left(store: DiskStore) -> None:
    fill(store)
    (store.path / "blobs" / "photos").mkdir()
    (store.path / "blobs" / "photos" / "a.jpg").write_bytes(b"x")
    report = store.audit(fix=True)
    assert (report.problems, report.left) == ({}, {"directories": 1})
    assert (store.path / "blobs" / "photos" / "a.jpg").exists()


def test_check_leaves_what_is_being_written(store: DiskStore) -> None:
    def produce() -> np.ndarray:  # type: ignore[type-arg]
        assert store.audit(fix=True).problems == {}
        return content(PLACE.name, 1000)

    assert store.put(PLACE.name, 1000, produce, PLACE)
    store.check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index: index.unlink(),
        lambda index: index.write_bytes(b""),
        lambda index: index.write_bytes(b"this is no database" * 500),
        lambda index: os.truncate(index, 5000),
        lambda index: index.write_bytes(index.read_bytes()[:4096] + b"\xff" * 20_000),
        lambda index: foreign_database(index),
        lambda index: evil_database(index),
    ],
    ids=["missing", "empty", "text", "truncated", "damaged", "foreign", "evil"],
)
def test_an_index_that_is_lost_is_made_again(
    where: Path, open_store: Open, spoil: Callable[[Path], object]
) -> None:
    store = open_store()
    fill(store)
    store.introduce(NAMESPACE, {"model": "m"})
    store.close()
    spoil(where / INDEX_FILE)
    store = open_store()
    assert store.counters["rebuilt"] == 1
    assert {record.name for record in store.find(blocks(range(6)))} == {p.name for p in PLACES}
    assert all(is_right(store, place.name) for place in PLACES)
    assert store.used_bytes == du(where) == pages(3)
    assert put(store, path([7]).segment(0, 1))
    store.check()
    store.close()
    assert "rebuilt" not in open_store().counters


def foreign_database(index: Path) -> None:
    index.unlink()
    sql = sqlite3.connect(index)
    sql.execute("CREATE TABLE states (x)")
    sql.commit()
    sql.close()


def evil_database(index: Path) -> None:
    """Ours, with a trigger that somebody added."""
    sql = sqlite3.connect(index)
    sql.execute("CREATE TRIGGER evil AFTER INSERT ON states BEGIN DELETE FROM states; END")
    sql.commit()
    sql.close()


def test_an_index_that_is_damaged_while_it_is_used_is_made_again(
    where: Path, open_store: Open
) -> None:
    store = open_store(files=Failing())
    for n in range(50):
        put(store, path([n]).segment(0, 1), 10)
    fill(store)
    with store._index.writing() as sql:
        sql.execute("PRAGMA user_version = 0")
    with store._index.reading() as sql:
        sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    index = where / INDEX_FILE
    data = index.read_bytes()
    with index.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xfe" * (len(data) - 4096))
    store.check(fix=True)
    assert len(store) == 53
    assert store.counters["rebuilt"] == 1
    assert all(is_right(store, place.name) for place in PLACES)
    store.check()


def test_an_index_that_is_damaged_unnoticed_is_made_again(store: DiskStore) -> None:
    """A flipped bit in the database need not offend SQLite."""
    fill(store)
    store.introduce(NAMESPACE, {"model": "m"})
    with store._index.writing() as sql:
        sql.execute("UPDATE states SET tokens = x'010203'")
    assert store.find(blocks(range(6))) == []
    assert store.counters["errors_index"] == 1
    store.touch([PLACE.name])  # the next write makes it anew
    assert store.counters["rebuilt"] == 1
    assert len(store.find(blocks(range(6)))) == 3
    assert store.namespaces() == {NAMESPACE: {"model": "m"}}
    store.check()


def test_an_index_that_is_removed_while_it_is_used_is_made_again(
    where: Path, open_store: Open
) -> None:
    store, other = open_store(), open_store()
    fill(store)
    for name in (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
        (where / name).unlink()
    assert put(store, path([7]).segment(0, 1))
    assert put(other, path([8]).segment(0, 1))
    assert len(store) == len(other) == 5
    assert store.used_bytes == other.used_bytes == pages(5)
    assert all(is_right(store, place.name) for place in PLACES)
    store.check()


# -- what goes wrong outside -----------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 100, HEADER_BYTES, HEADER_BYTES + 500])
def test_fault_48_a_disk_that_is_full_in_the_middle(open_store: Open, room: int) -> None:
    files = Failing()
    store = open_store(files=files)
    put(store, PLACES[0])
    files.room = room
    assert put(store, PLACE) is False
    assert store.counters["refused_disk_full"] == 1
    assert (len(store), store.used_bytes, du(store.path)) == (1, pages(1), pages(1))
    assert len(files_below(store.path)) == 1
    files.room = None
    assert put(store, PLACE)
    assert is_right(store, PLACE.name)
    store.check()


@posix
def test_fault_48_a_limit_on_file_sizes(store: DiskStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    n_bytes = 300_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        kept = store.put(PLACE.name, n_bytes, lambda: content(PLACE.name, n_bytes), PLACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept is False
    assert store.counters["refused_disk_full"] == 1
    assert files_below(store.path) == []
    assert store.used_bytes == 0
    assert put(store, PLACE)
    store.check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "llamakeep-test", str(mounted)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_fault_48_a_real_disk_that_is_full(small_disk: Path) -> None:
    n_bytes = 150_000
    with DiskStore(small_disk / "cache", 1 << 30, min_free_bytes=0) as store:
        kept = []
        for n in range(30):
            place = path([n]).segment(0, 1)
            free = shutil.disk_usage(small_disk).free
            # The index grows too: the disk may be full for it as well.
            if store.put(place.name, n_bytes, lambda p=place: content(p.name, n_bytes), place):
                kept.append(place)
            assert shutil.disk_usage(small_disk).free >= 0
            assert du(store.path) <= 2 << 20, free
        assert kept
        assert store.counters.get("evicted", 0) + store.counters.get("refused_disk_full", 0) > 0
        readable = [place for place in kept if is_right(store, place.name)]
        assert readable
        for name in list(store):
            assert is_right(store, name)
        store.clear()
        assert put(store, PLACE)
        store.check()


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("create", "errors_write"),
        ("write", "errors_write"),
        ("rename", "errors_write"),
        ("flush_directory", "errors_write"),
    ],
)
def test_an_error_while_writing_leaves_nothing(open_store: Open, method: str, kind: str) -> None:
    files = Failing()
    store = open_store(files=files)
    put(store, PLACES[0])
    files.errors[method] = OSError(errno.EIO, "broken")
    assert put(store, PLACE) is False
    assert store.counters[kind] == 1
    assert store.used_bytes == pages(1)
    files.errors.clear()
    store.check(fix=True)
    assert put(store, PLACE)
    assert is_right(store, PLACE.name)
    store.check()


def test_what_could_not_be_cleaned_up_is_cleaned_up_later(open_store: Open) -> None:
    files = Failing()
    store = open_store(files=files)
    files.errors["rename"] = files.errors["unlink"] = OSError(errno.EIO, "broken")
    assert put(store, PLACE) is False
    assert store.used_bytes == pages(1)  # what is there counts
    assert du(store.path) == pages(1)
    files.errors.clear()
    assert put(store, PLACES[0])
    assert store.used_bytes == du(store.path) == pages(1)
    store.check()


def test_an_error_while_reading_is_a_miss(open_store: Open) -> None:
    files = Failing()
    store = open_store(files=files)
    fill(store)
    files.errors["open"] = PermissionError(errno.EACCES, "not yours")
    assert store.get(PLACE.name) is None
    assert list(store.get_many([PLACE.name])) == [None]
    assert store.counters["errors_read"] == 2
    files.errors.clear()
    assert is_right(store, PLACE.name)


def test_a_file_that_cannot_be_removed_stays_counted(open_store: Open) -> None:
    files = Failing()
    store = open_store(files=files, capacity_bytes=pages(3))
    for n in range(3):
        put(store, path([n]).segment(0, 1))
    files.errors["unlink"] = PermissionError(errno.EACCES, "not yours")
    assert put(store, path([9]).segment(0, 1)) is False
    assert store.delete(path([1]).segment(0, 1).name) is False
    assert store.counters["errors_write"] == 2
    assert (len(store), store.used_bytes) == (3, pages(3))
    files.errors.clear()
    assert put(store, path([9]).segment(0, 1))
    store.check()


def test_a_directory_that_is_removed_while_it_is_used(where: Path, open_store: Open) -> None:
    store = open_store()
    fill(store)
    shutil.rmtree(where)
    assert store.get(PLACE.name) is None
    assert store.find(blocks(range(6))) == []
    assert put(store, PLACE) is False
    assert store.delete(PLACE.name) is False
    store.touch([PLACE.name])
    store.supersede(PLACES[0].name, PLACE.name)
    store.introduce(NAMESPACE, {})
    store.forget_namespaces([NAMESPACE])
    store.clear()
    assert (len(store), list(store), PLACE.name in store, store.used_bytes) == (0, [], False, 0)
    assert sum(n for kind, n in store.counters.items() if kind.startswith("errors_")) > 5
    with pytest.raises(StoreError):
        store.audit()
    with pytest.raises(StoreError):
        store.stats()
    assert not where.exists()
    store.close()
    store = open_store()
    fill(store)
    assert is_right(store, PLACE.name)


def test_a_read_only_directory_is_read(where: Path, open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.close()
    files = Failing()
    files.is_writable = False
    store = open_store(files=files)
    assert store.read_only
    before = {each: each.stat().st_mtime_ns for each in where.rglob("*") if each.suffix == ".state"}
    assert all(is_right(store, place.name) for place in PLACES)
    assert len(store.find(blocks(range(6)))) == 3
    assert put(store, path([7]).segment(0, 1)) is False
    assert store.counters["refused_read_only"] == 1
    store.touch([PLACE.name])
    store.introduce(NAMESPACE, {})
    assert store.delete(PLACE.name) is False
    assert store.trim(0) == 0
    os.truncate(file_of(store, PLACE.name), 10)
    assert store.get(PLACE.name) is None
    assert file_of(store, PLACE.name).exists()
    assert {each: each.stat().st_mtime_ns for each in before if each.stem != PLACE.name.hex()} == {
        each: before[each] for each in before if each.stem != PLACE.name.hex()
    }


def test_a_read_only_directory_that_holds_nothing_is_refused(where: Path) -> None:
    where.mkdir()
    files = Failing()
    files.is_writable = False
    with pytest.raises(StoreError, match="read-only"):
        DiskStore(where, files=files)


@as_root
def test_a_read_only_file_system_is_read(small_disk: Path) -> None:
    with DiskStore(small_disk / "cache", pages(50), min_free_bytes=0) as store:
        fill(store)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with DiskStore(small_disk / "cache", pages(50), min_free_bytes=0) as store:
        assert store.read_only
        assert all(is_right(store, place.name) for place in PLACES)
        assert len(store.find(blocks(range(6)))) == 3
        assert put(store, path([7]).segment(0, 1)) is False
        store.check()


def test_a_closed_store_misses(open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.close()
    store.close()
    assert put(store, path([7]).segment(0, 1)) is False
    assert store.find(blocks(range(6))) == []
    assert len(store) == 0
    assert store.counters["refused_closed"] == 3


def test_a_store_closes_by_itself(where: Path) -> None:
    with DiskStore(where, pages(9), min_free_bytes=0) as store:
        fill(store)
    assert not (where / f"{INDEX_FILE}-wal").exists()
    with DiskStore(where, pages(9)) as store:
        assert len(store) == 3


# -- budget ----------------------------------------------------------------------------------------


def test_fault_31_there_is_no_second_limit(open_store: Open) -> None:
    store = open_store(files=Failing())
    for n in range(100):
        assert put(store, path([n, n + 1]).segment(0, 2), 10)
    assert len(store) == 100
    assert store.used_bytes == store.capacity_bytes
    assert "evicted" not in store.counters


def test_fault_35_every_way_in_counts_against_the_same_limit(
    open_store: Open, tmp_path: Path
) -> None:
    """Put, adopted, imported: what is there is counted, and never above the limit."""
    store = open_store(capacity_bytes=pages(4), files=Failing())
    fill(store)
    store.export(tmp_path / "states")
    assert put(store, path([7]).segment(0, 1))
    store.import_(tmp_path / "states")
    assert store.used_bytes == du(store.path) <= pages(4)
    with store._index.writing() as sql:
        sql.execute("DELETE FROM states WHERE name = ?", (PLACES[0].name,))
    store.check(fix=True)
    assert store.used_bytes == du(store.path) <= pages(4)


def test_fault_67_a_read_does_not_wait_for_a_write(store: DiskStore) -> None:
    fill(store)
    entered, leave = threading.Event(), threading.Event()

    def produce() -> np.ndarray:  # type: ignore[type-arg]
        entered.set()
        assert leave.wait(30)
        return content(b"w" * 32, 1000)

    writer = threading.Thread(target=lambda: store.put(b"w" * 32, 1000, produce))
    writer.start()
    try:
        assert entered.wait(30)
        # All of this while a state is in the middle of being written.
        assert all(is_right(store, place.name) for place in PLACES)
        assert len(store.find(blocks(range(6)))) == 3
        store.touch([PLACE.name])
        assert put(store, path([7]).segment(0, 1))
        assert store.used_bytes == pages(5)
    finally:
        leave.set()
        writer.join()
    assert is_right(store, b"w" * 32)
    store.check()


def test_what_is_kept_is_on_the_device(open_store: Open) -> None:
    order: list[str] = []
    again: list[bool] = []

    class Watched(Failing):
        def flush(self, file: object) -> None:
            order.append("flush")

        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            order.append("rename")

        def flush_directory(self, path: Path) -> None:
            order.append(f"flush {'shard' if path.parent.name == 'blobs' else path.name}")
            if watching and not again:
                # Another writer of the same name must not say that it is kept before this is done.
                again.append(True)
                n = len(order)
                assert store.put(PLACE.name, 1000, never, PLACE)
                assert order[n:] == ["flush shard", "flush blobs"]
                del order[n:]

    def never() -> np.ndarray:  # type: ignore[type-arg]
        raise AssertionError

    watching = False
    store = open_store(files=Watched())
    order.clear()
    watching = True
    assert put(store, PLACE)
    assert order == ["flush", "rename", "flush shard"]
    assert again
    order.clear()
    assert put(store, PLACE)
    assert order == []
    store.check()


def test_the_first_of_two_sizes_stays(store: DiskStore) -> None:
    """Equal names are interchangeable, not equal: what is counted is what is there."""

    def produce() -> np.ndarray:  # type: ignore[type-arg]
        assert put(store, PLACE, 10)
        return content(PLACE.name, 9_000)

    assert store.put(PLACE.name, 9_000, produce, PLACE)
    data = store.get(PLACE.name)
    assert data is not None
    assert data.size == 10
    assert store.used_bytes == du(store.path) == pages(1)
    store.check()


# -- threads and processes -------------------------------------------------------------------------


def test_threads_write_and_read_at_once(open_store: Open) -> None:
    store = open_store(capacity_bytes=pages(20), files=Failing())
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            random = np.random.default_rng(seed)
            for _ in range(60):
                tokens = random.integers(0, 3, 6).tolist()
                names = path(tokens)
                put(store, names.segment(0, 4))
                put(store, names.segment(4, 6))
                assert store.used_bytes <= store.capacity_bytes
                for record in store.find(blocks(tokens)):
                    is_right(store, record.name)
                store.touch([names.segment(0, 4).name])
                if random.random() < 0.2:
                    store.delete(names.segment(4, 6).name)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert not [kind for kind in store.counters if kind.startswith(("errors_", "rejected_"))]
    store.check()


def test_two_threads_write_one_name(store: DiskStore) -> None:
    both = threading.Barrier(2, timeout=30)
    results = []

    def produce() -> np.ndarray:  # type: ignore[type-arg]
        both.wait()
        return content(PLACE.name, 1000)

    def work() -> None:
        results.append(store.put(PLACE.name, 1000, produce, PLACE))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]
    assert (len(store), store.used_bytes, du(store.path)) == (1, pages(1), pages(1))
    assert is_right(store, PLACE.name)
    store.check()


SCRIPT = """
import sys
from llamakeep.stores.disk import DiskStore
from tests.disk_tools import is_right, path, put, pages, blocks
with DiskStore(sys.argv[1], pages(100), min_free_bytes=0) as store:
    print({program})
"""


def in_another_process(where: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(program=program), str(where)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    return done.stdout.strip()


def test_fault_38_another_process_finds_what_was_saved(where: Path, open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.close()
    program = "[is_right(store, r.name) for r in store.find(blocks(range(6)))]"
    assert in_another_process(where, program) == "[True, True, True]"


def test_another_process_finds_it_at_once(where: Path, open_store: Open) -> None:
    store = open_store()
    fill(store)
    program = "[put(store, path([7]).segment(0, 1)), len(store), len(store.find(blocks(range(6))))]"
    assert in_another_process(where, program) == "[True, 4, 3]"
    assert is_right(store, path([7]).segment(0, 1).name)
    assert len(store) == 4
    never = "store.put(path([7]).segment(0, 1).name, 1000, None, path([7]).segment(0, 1))"
    assert in_another_process(where, never) == "True"  # the second writes nothing
    store.check()


def test_fault_41_all_bytes_and_all_tokens_come_back(where: Path, open_store: Open) -> None:
    store = open_store()
    tokens = [0, 127, 128, 2**31 - 1]
    names = path(tokens)
    place = names.segment(0, 4)
    written = np.arange(1024, dtype=np.int64).astype(np.uint8)
    assert store.put(place.name, 1024, written.copy, place)
    store.close()
    store = open_store()
    (record,) = store.find(blocks(tokens))
    assert record.tokens.tolist() == tokens
    data = store.get(record.name)
    assert data is not None
    assert data.tobytes() == written.tobytes()
    digest = f"__import__('hashlib').sha256(store.get({place.name!r})).hexdigest()"
    assert in_another_process(where, digest) == hashlib.sha256(written.tobytes()).hexdigest()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_store_can_be_used_on_both_sides_of_a_fork(open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.touch([PLACE.name])
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours = path([7]).segment(0, 1)
            result = [put(store, ours), len(store), is_right(store, PLACE.name)]
            os.write(writer, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert put(store, path([8]).segment(0, 1))
    with os.fdopen(reader) as pipe:
        kept, n, right = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert kept
    assert right
    assert n in (4, 5)
    assert len(store) == 5
    assert is_right(store, path([7]).segment(0, 1).name)
    store.check(fix=True)  # the child did not say goodbye
    store.check()


# -- the dead --------------------------------------------------------------------------------------


def reserve_as(store: DiskStore, owner: owners.Owner, seen: float, data: bytes = b"half") -> Path:
    """Leave what a process leaves that is killed in the middle of a save."""
    ticket = f"{owner.key}-1"
    with store._index.writing() as sql:
        sql.execute(
            "INSERT INTO owners VALUES (?, ?, ?, ?, ?, ?)",
            (owner.key, owner.pid, owner.started, owner.machine, owner.boot, seen),
        )
        sql.execute(
            "INSERT INTO writing VALUES (?, ?, ?, ?, NULL, NULL)",
            (ticket, PLACE.name, pages(1), owner.key),
        )
    file = store.path / "tmp" / f"{ticket}.part"
    file.write_bytes(data)
    return file


HERE = owners.this_process()
DEAD = owners.Owner("dead", HERE.pid, HERE.started + 1, HERE.machine, HERE.boot)
ALIVE = owners.Owner("alive", HERE.pid, HERE.started, HERE.machine, HERE.boot)
ELSEWHERE = owners.Owner("elsewhere", 1, 1.0, "another machine", "b c")
CONTAINER = owners.Owner("container", 1, 1.0, HERE.machine, HERE.boot + "x")
REBOOTED = owners.Owner("rebooted", HERE.pid, HERE.started, HERE.machine, "earlier " + "x")


@pytest.mark.parametrize(
    ("owner", "seen", "goes"),
    [
        (DEAD, 1000.0, True),
        (ALIVE, 0.0, False),
        (ELSEWHERE, 999.0, False),
        (ELSEWHERE, 1000.0 - 3601, True),
        (CONTAINER, 999.0, False),
        (CONTAINER, 1000.0 - 3601, True),
        (REBOOTED, 1000.0, True),
    ],
    ids=["dead", "alive", "elsewhere", "silent", "container", "silent container", "rebooted"],
)
@pytest.mark.parametrize("how", ["open", "check"])
def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(
    open_store: Open, owner: owners.Owner, seen: float, goes: bool, how: str
) -> None:
    if owner is REBOOTED and not HERE.boot.split(" ")[0]:
        pytest.skip("this system does not say when it was started")
    store = open_store(clock=lambda: 1000.0)
    put(store, PLACES[0])
    file = reserve_as(store, owner, seen)
    assert store.used_bytes == pages(2)
    if how == "open":
        store = open_store(clock=lambda: 1000.0)
    else:
        if goes:
            with pytest.raises(IntegrityError, match="leftovers: 1"):
                store.check()
        store.check(fix=True)
    assert file.exists() != goes
    assert store.used_bytes == pages(1 if goes else 2)
    store.check()


@pytest.mark.parametrize("whole", [True, False])
def test_what_came_to_its_place_before_its_writer_died_is_adopted(
    open_store: Open, whole: bool
) -> None:
    store = open_store()
    put(store, PLACES[0])
    put(store, PLACE)
    file = file_of(store, PLACE.name)
    with store._index.writing() as sql:
        sql.execute("DELETE FROM states WHERE name = ?", (PLACE.name,))
    reserve_as(store, DEAD, 0.0)
    if not whole:
        os.truncate(file, 600)
    store = open_store()
    assert file.exists() == whole
    assert store.counters.get("adopted", 0) == whole
    assert bool(is_right(store, PLACE.name)) == whole
    assert store.used_bytes == du(store.path) == pages(1 + whole)
    store.check()


def test_after_the_machine_went_down_files_and_index_are_compared(open_store: Open) -> None:
    if not HERE.boot.split(" ")[0]:
        pytest.skip("this system does not say when it was started")
    store = open_store()
    fill(store)
    with store._index.writing() as sql:  # the last rows did not come to the device
        sql.execute("DELETE FROM states WHERE name = ?", (PLACES[0].name,))
    file_of(store, PLACES[1].name).unlink()
    reserve_as(store, REBOOTED, 0.0)
    store = open_store()
    assert set(store) == {PLACES[0].name, PLACES[2].name}
    assert store.counters["adopted"] == 1
    store.check()


def test_a_killed_process_that_was_not_waited_for_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = owners._started(child.pid)
    assert started is not None
    owner = owners.Owner("k", child.pid, started, HERE.machine, HERE.boot)
    assert not owner.is_dead(0.0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_dead(0.0)
    child.communicate()
    assert owner.is_dead(0.0)


def test_an_index_that_was_made_anew_in_the_middle_of_a_save_counts_it(
    where: Path, open_store: Open
) -> None:
    store = open_store(capacity_bytes=pages(1))

    def produce() -> np.ndarray:  # type: ignore[type-arg]
        for name in (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
            (where / name).unlink()
        assert put(store, path([7]).segment(0, 1))  # nobody knows of the reservation any more
        return content(PLACE.name, 1000)

    assert store.put(PLACE.name, 1000, produce, PLACE) is False
    assert store.counters["refused_raced"] == 1
    assert store.used_bytes == du(where) == pages(1)
    store.check()
