"""The disk store after power was lost, and what must not happen while others write or plant."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamakeep import modelfile
from llamakeep.errors import BlobRejected, IndexDamaged, StoreError
from llamakeep.stores import envelope
from llamakeep.stores.descriptions import MAX_DESCRIPTION_BYTES, parse_description
from llamakeep.stores.disk import DiskStore, archive, audit, files, owners
from llamakeep.stores.disk.index import INDEX_FILE, SIDE_FILES
from llamakeep.tokens import Place
from tests.disk_tools import (
    NAMESPACE,
    ROLLING,
    Failing,
    Open,
    Unflushed,
    blocks,
    content,
    du,
    is_right,
    opening,
    pages,
    path,
    posix,
    put,
)

PLACE = path(range(6)).segment(0, 4)
NEXT = path(range(6)).segment(4, 6)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_store(where: Path) -> Iterator[Open]:
    with opening(where) as open_store:
        yield open_store


def file_of(store: DiskStore, name: bytes) -> Path:
    return store.path / "blobs" / name.hex()[:2] / f"{name.hex()}.state"


def lose_index(where: Path) -> None:
    for name in SIDE_FILES:
        (where / name).unlink(missing_ok=True)


# -- power is lost ---------------------------------------------------------------------------------


@contextlib.contextmanager
def rows_are_lost(where: Path, kept: Path) -> Iterator[None]:
    """What is committed to the index inside does not come to the device."""
    kept.mkdir()
    for name in SIDE_FILES:
        if (where / name).exists():
            shutil.copy(where / name, kept / name)
    yield
    lose_index(where)
    for file in kept.iterdir():
        shutil.copy(file, where / file.name)


@pytest.mark.parametrize("clean", [True, False])
def test_what_put_said_is_kept_is_found_after_power_was_lost(
    where: Path, tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    first = open_store()
    assert put(first, NEXT)
    if clean:
        first.close()
    with rows_are_lost(where, tmp_path / "kept"):
        store = open_store()
        store.introduce(NAMESPACE, {"model": "m"})
        assert put(store, PLACE)
        store.delete(NEXT.name)
        store.close()
        first.close()
    monkeypatch.setattr(owners, "_boot", lambda: "another-start of-the-machine")
    store = open_store()
    assert [record.name for record in store.find(blocks(range(6)))] == [PLACE.name]
    assert is_right(store, PLACE.name)
    assert store.used_bytes == du(where) == pages(1)
    assert store.namespaces() == {NAMESPACE: {"model": "m"}}
    assert store.counters["adopted"] == 1
    store.check()


def test_files_and_index_are_compared_once_in_a_start(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = audit.audit

    def counting(*arguments: Any, **options: Any) -> audit.DiskReport:
        compared.append(options)
        return compare(*arguments, **options)

    monkeypatch.setattr(audit, "audit", counting)
    files = Failing()
    store = open_store()
    put(store, PLACE)
    store.close()
    for boot, n_times in (("a x", 1), ("a x", 0), ("b x", 1), ("b y", 0)):
        monkeypatch.setattr(owners, "_boot", lambda boot=boot: boot)
        compared.clear()
        files.calls.clear()
        open_store(files=files).close()
        assert len(compared) == n_times
        assert files.calls["open"] == 1  # what says which start it was; no state that is indexed


def test_what_says_which_start_it_was_comes_after_the_comparison(
    where: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store, PLACE)
    store.close()
    monkeypatch.setattr(owners, "_boot", lambda: "b x")
    with monkeypatch.context() as patched:

        def fails(*_: object, **__: object) -> None:
            assert (where / "boot").read_text() != "b"
            raise PermissionError(13, "not now")

        patched.setattr(audit, "audit", fails)
        assert open_store().counters["errors_read"] == 1
    assert (where / "boot").read_text() != "b"
    assert "errors_read" not in open_store().counters
    assert (where / "boot").read_text() == "b"


def test_one_file_that_cannot_be_read_does_not_end_the_comparison(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneBad(Failing):
        def open(self, path: Path) -> tuple[io.FileIO, os.stat_result]:
            if path.stem == PLACE.name.hex():
                raise OSError(5, "broken")
            return super().open(path)

    store = open_store()
    put(store, PLACE)
    put(store, NEXT)
    with store._index.writing() as sql:
        sql.execute("DELETE FROM states WHERE name = ?", (NEXT.name,))
    store.close()
    monkeypatch.setattr(owners, "_boot", lambda: "b x")
    store = open_store(files=OneBad())
    assert set(store) == {PLACE.name, NEXT.name}
    report = store.audit(fix=True)
    assert (report.problems, report.left) == ({}, {"unreadable": 1})


def test_opening_is_fast_in_the_same_start(where: Path, open_store: Open) -> None:
    store = open_store()
    with store._index.writing() as sql:
        sql.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) "
            "INSERT INTO states (name, kind, n_bytes, file_bytes, created, last_used, hits) "
            "SELECT randomblob(32), 0, 1, 0, i, i, 0 FROM n"
        )
    store.close()
    began = time.perf_counter()
    store = open_store()
    took = time.perf_counter() - began
    assert len(store) == 100_000
    assert took < 1.0


def test_where_the_system_does_not_say_its_starts_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "_boot", lambda: " ")
    monkeypatch.setattr(owners.psutil, "boot_time", lambda: 1000.0)
    before = owners.this_boot()
    monkeypatch.setattr(owners.psutil, "boot_time", lambda: 2000.0)
    assert owners.this_boot() != before


# -- descriptions ----------------------------------------------------------------------------------

NO_DESCRIPTIONS = [
    b"",
    b"{",
    b"[1]",
    b'"text"',
    b"null",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"a":' * 30 + b"1" + b"}" * 30,
    b'{"a": "' + b"x" * MAX_DESCRIPTION_BYTES + b'"}',
    "{\ud800",
]


@pytest.mark.parametrize("data", NO_DESCRIPTIONS, ids=range(len(NO_DESCRIPTIONS)))
def test_what_is_no_description_is_none(data: bytes | str) -> None:
    assert parse_description(data) is None


def test_a_description_is_parsed() -> None:
    assert parse_description('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_description(b'{"a": 1}', max_bytes=8) == {"a": 1}
    assert parse_description(b'{"a": 1}', max_bytes=7) is None


@pytest.mark.parametrize("damage", ["not json", "[1]", "1", b"\xff\xff", "[" * 5000])
def test_a_damaged_description_is_dropped_and_counted(
    open_store: Open, damage: str | bytes
) -> None:
    store = open_store()
    good = b"g" * 32
    store.introduce(NAMESPACE, {"model": "m"})
    store.introduce(good, {"model": "g"})
    with store._index.writing() as sql:
        sql.execute(
            "UPDATE namespaces SET description = CAST(? AS TEXT) WHERE digest = ?",
            (damage, NAMESPACE),
        )
    assert store.namespaces() == {good: {"model": "g"}}
    assert store.counters["rejected_description"] == 1
    assert store.audit().problems == {"descriptions": 1}
    store.audit(fix=True)
    assert store.namespaces() == {NAMESPACE: {"model": "m"}, good: {"model": "g"}}
    with store._index.writing() as sql:
        sql.execute("UPDATE namespaces SET description = '[]' WHERE digest = ?", (NAMESPACE,))
    store.introduce(NAMESPACE, {"model": "m"})
    assert store.namespaces()[NAMESPACE] == {"model": "m"}
    store.check()


def test_a_description_that_would_not_be_read_is_not_written(open_store: Open) -> None:
    store = open_store()
    store.introduce(NAMESPACE, {"model": "m" * MAX_DESCRIPTION_BYTES})
    assert store.namespaces() == {}
    assert store.counters["refused_description"] == 1


def test_a_crafted_archive_is_refused(open_store: Open, tmp_path: Path) -> None:
    for text in (
        b'{"namespaces": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"namespaces": {"%s": 1}}' % (b"a" * 64),
        b'{"namespaces": {"%s": {}}}' % (b"a " * 32),
    ):
        (tmp_path / "crafted").write_bytes(archive._head(0, text, None))
        with pytest.raises(BlobRejected, match="description is corrupt"):
            open_store().import_(tmp_path / "crafted")


def test_descriptions_are_there_again_when_the_index_was_lost(
    where: Path, open_store: Open
) -> None:
    store = open_store()
    store.introduce(ROLLING, {"rolling": True, "model": "m"})
    store.introduce(NAMESPACE, {"model": "damaged later"})
    names = path(range(6), ROLLING)
    put(store, names.segment(0, 4))
    put(store, names.checkpoint(0, 3))
    store.close()
    file = where / "namespaces" / f"{ROLLING.hex()}.json"
    assert json.loads(file.read_text()) == {"rolling": True, "model": "m"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (where / "namespaces" / f"{NAMESPACE.hex()}.json").write_text("[" * 100_000)
    lose_index(where)

    store = open_store()
    assert store.namespaces() == {ROLLING: {"rolling": True, "model": "m"}}
    assert store.counters["rejected_description"] == 1
    assert store.trim(pages(1)) == 2  # the segment is of no use without its checkpoint
    assert store.audit(fix=True).problems == {"descriptions": 1}
    store.check()
    assert [each.name for each in (where / "namespaces").iterdir()] == [file.name]
    put(store, names.segment(0, 4))
    store.remove_namespace(ROLLING.hex())
    assert not file.exists()


def test_an_older_cache_gets_files_of_descriptions(where: Path, open_store: Open) -> None:
    store = open_store()
    store.introduce(NAMESPACE, {"model": "m"})
    shutil.rmtree(where / "namespaces")
    store.introduce(NAMESPACE, {"model": "m"})
    assert len(list((where / "namespaces").iterdir())) == 1


# -- seals -----------------------------------------------------------------------------------------


def test_secrets_are_told_apart_by_48_bits() -> None:
    payload = content(PLACE.name, 100)
    key = envelope.seal_key("hush")
    header = envelope.wrap(PLACE.name, payload, PLACE, key)
    assert len(header) == envelope.header_bytes(PLACE) == 176 + 4 * 4
    found = envelope.parse(header)
    assert found.key_id.bit_length() > 40
    assert envelope.parse(envelope.wrap(PLACE.name, payload, PLACE, None)).key_id == 0
    ids = {envelope._key_id(envelope.seal_key(f"secret {n}")) for n in range(2_000)}
    assert len(ids) == 2_000  # of 16 bits, about 30 would be there twice
    other = bytearray(header)
    other[62] ^= 1
    with pytest.raises(BlobRejected, match="another secret"):
        envelope.verify(envelope.parse(bytes(other)), payload, key)


def test_seals_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = content(PLACE.name, 100)
    parsed = envelope.parse(envelope.wrap(PLACE.name, payload, PLACE, None))
    compared = []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda a, b: compared.append(len(a)) or bytes(a) == bytes(b)
    )
    envelope.verify(parsed, payload, None)
    assert compared == [32]


# -- reading does not wait -------------------------------------------------------------------------


@contextlib.contextmanager
def somebody_writes(store: DiskStore) -> Iterator[None]:
    """Another process holds the index's write lock."""
    sql = sqlite3.connect(store.path / INDEX_FILE, isolation_level=None)
    sql.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        sql.execute("ROLLBACK")
        sql.close()


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
@pytest.mark.parametrize("who", ["process", "thread"])
def test_a_read_does_not_wait_for_a_writer(open_store: Open, damage: str, who: str) -> None:
    store = open_store()
    put(store, PLACE)
    put(store, NEXT)
    file = file_of(store, PLACE.name)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    took = []

    def read() -> None:
        began = time.perf_counter()
        assert store.get(PLACE.name) is None
        took.append(time.perf_counter() - began)

    with somebody_writes(store) if who == "process" else store._index.writing():
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(2.0)
        assert took, "it waits"
        assert took[0] < 0.5
    reader.join()
    assert PLACE.name in store  # noted
    assert file.exists() == (damage == "corrupt")
    assert put(store, path([9]).segment(0, 1))
    assert PLACE.name not in store
    assert store.counters["lost"] == 1
    assert store.used_bytes == du(store.path) == pages(2)
    store.check()


def test_what_is_put_again_meanwhile_is_not_forgotten(open_store: Open) -> None:
    store, other = open_store(), open_store()
    put(store, PLACE)
    file_of(store, PLACE.name).unlink()
    with somebody_writes(store):
        assert store.get(PLACE.name) is None
    assert put(other, PLACE)
    assert put(store, NEXT)
    assert is_right(store, PLACE.name)
    store.check()


def test_a_lost_index_is_not_made_anew_by_a_read(
    where: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store, PLACE)
    lose_index(where)
    with monkeypatch.context() as patched:
        patched.setattr(store._index, "_rebuild", lambda sql: pytest.fail("a read makes it anew"))
        assert store.find(blocks(range(6))) == []
        assert len(store) == 0
        assert is_right(store, PLACE.name)
        assert not (where / INDEX_FILE).exists()
    assert store.put(PLACE.name, 1000, lambda: pytest.fail("it is there"), PLACE)
    assert store.counters["rebuilt"] == 1
    assert len(store.find(blocks(range(6)))) == 1
    store.check()


def test_who_reads_while_the_index_is_made_anew_does_not_wait(
    where: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store, PLACE)
    lose_index(where)
    began, go_on = threading.Event(), threading.Event()
    rebuild = store._index._rebuild

    def slow(sql: sqlite3.Connection) -> None:
        began.set()
        assert go_on.wait(30)
        rebuild(sql)

    monkeypatch.setattr(store._index, "_rebuild", slow)
    writer = threading.Thread(target=put, args=(store, NEXT))
    writer.start()
    try:
        assert began.wait(30)
        start = time.perf_counter()
        assert store.find(blocks(range(6))) == []
        assert is_right(store, PLACE.name)
        assert time.perf_counter() - start < 1.0
    finally:
        go_on.set()
        writer.join()
    assert {record.name for record in store.find(blocks(range(6)))} == {PLACE.name, NEXT.name}
    assert store.counters["rebuilt"] == 1
    store.check()


# -- fingerprints ----------------------------------------------------------------------------------


def test_what_killed_processes_left_of_fingerprints_goes(where: Path, open_store: Open) -> None:
    open_store().close()
    old, new = (where / f"{modelfile.PARTIAL_PREFIX}{name}" for name in ("old", "new"))
    older = where / "tmp" / "boot-0123.new"
    for file in (old, new, older, where / "tmp" / "boot-4567.new"):
        file.write_text("{")
    for file in (old, older):
        os.utime(file, (1.0, 1.0))
    store = open_store()
    assert store.audit().problems == {"leftovers": 2}
    store.audit(fix=True)
    assert [file.name for file in (where / "tmp").iterdir()] == ["boot-4567.new"]
    assert (old.exists(), new.exists()) == (False, True)
    store.check()
    store.close()
    (where / "FORMAT").unlink()
    open_store().check()


# -- links -----------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("part", ["blobs", "tmp"])
def test_a_part_that_becomes_a_link_while_it_is_used_leads_nowhere(
    store_and_outside: tuple[DiskStore, Path], part: str
) -> None:
    store, outside = store_and_outside
    shutil.move(store.path / part, outside)
    (store.path / part).symlink_to(outside)
    before = {each: each.read_bytes() for each in outside.rglob("*") if each.is_file()}
    if part == "blobs":
        assert store.get(PLACE.name) is None
        assert store.counters["rejected_symlink"] == 1
    assert put(store, NEXT) is False
    assert put(store, path([9]).segment(0, 1)) is False
    store.delete(PLACE.name)
    with pytest.raises(StoreError, match="symbolic link"):
        store.audit(fix=True)
    assert {each: each.read_bytes() for each in outside.rglob("*") if each.is_file()} == before
    (store.path / part).unlink()
    (store.path / part).mkdir()
    store.check(fix=True)
    assert put(store, NEXT)
    store.check()


@pytest.fixture
def store_and_outside(open_store: Open, tmp_path: Path) -> tuple[DiskStore, Path]:
    store = open_store()
    put(store, PLACE)
    return store, tmp_path / "outside"


@posix
def test_what_comes_in_place_of_a_file_while_it_is_closed_to_others_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, outside = tmp_path / "ours", tmp_path / "outside"
    for file in (ours, outside):
        file.write_bytes(b"")
        file.chmod(0o644)
    refuse = files._refuse

    def swapped(*arguments: object) -> None:
        refuse(*arguments)  # type: ignore[arg-type]
        if not ours.is_symlink():
            ours.unlink()
            ours.symlink_to(outside)

    monkeypatch.setattr(files, "_refuse", swapped)
    with pytest.raises((OSError, StoreError)):
        files.refuse_foreign(ours)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


def test_what_protects_from_links_costs_little(where: Path, open_store: Open) -> None:
    store = open_store()
    put(store, PLACE)
    best = min(timed(store, PLACE) for _ in range(200))
    assert best < 100e-6


def timed(store: DiskStore, place: Place) -> float:
    began = time.perf_counter()
    store._shelf.stat(place.name)
    return time.perf_counter() - began


# -- what is asked for -----------------------------------------------------------------------------


def test_an_audit_says_how_far_it_is(open_store: Open) -> None:
    store = open_store()
    put(store, PLACE)
    put(store, NEXT)
    steps: list[tuple[int, int]] = []
    store.audit(progress=lambda done, n: steps.append((done, n)))
    assert steps == [(1, 2), (2, 2)]


@pytest.mark.parametrize("damage", ["missing", "text", "no table"])
def test_who_may_not_write_is_told_that_the_index_is_damaged(
    where: Path, open_store: Open, damage: str
) -> None:
    store = open_store()
    put(store, PLACE)
    store.close()
    index = where / INDEX_FILE
    if damage == "missing":
        index.unlink()
    elif damage == "text":
        index.write_bytes(b"none" * 5000)
    else:
        sql = sqlite3.connect(index)
        sql.execute("DROP TABLE writing")
        sql.close()
    read_only = Unflushed()
    read_only.writable = lambda path: False  # type: ignore[method-assign]
    with pytest.raises(IndexDamaged):
        open_store(files=read_only)
    assert len(open_store()) == 1


def test_a_forged_ticket_leads_to_no_file_outside(tmp_path: Path) -> None:
    precious = tmp_path / "precious.part"
    precious.write_text("not ours")
    where = tmp_path / "cache"
    DiskStore(where, 1 << 20, min_free_bytes=0).close()
    with contextlib.closing(sqlite3.connect(where / "index.sqlite3")) as sql, sql:
        sql.execute("INSERT INTO owners VALUES ('o', 999999999, 1.0, 'm', 'b', 0)")
        ticket = os.path.relpath(tmp_path / "precious", where / "tmp")
        sql.execute("INSERT INTO writing VALUES (?, x'00', 1, 'o', NULL, NULL)", (ticket,))
    with DiskStore(where, 1 << 20, min_free_bytes=0) as store:
        store.check(fix=True)
        assert store.used_bytes == 0
    assert precious.read_text() == "not ours"
