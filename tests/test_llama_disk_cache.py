"""`LlamaDiskCache`: what outlives a process, what other processes do, and what may lie about."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pickle
import random
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamakeep.errors import InvalidValue, StoreError
from llamakeep.llama_cache import LlamaDiskCache
from llamakeep.llama_cache.packed import VERSION, Packed
from llamakeep.llama_cache.snapshots import Plan
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.disk.files import Files
from tests.llama_states import (
    LegacyState,
    LlamaState,
    fork_state,
    legacy_state,
    llama_state,
    native,
)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(where: Path) -> Iterator[LlamaDiskCache]:
    with LlamaDiskCache(where, namespace="test") as cache:
        yield cache
        cache.check()


def state_of(*tokens: int, size: int = 3000) -> LlamaState:
    return llama_state(list(tokens), native(tokens[0], size, len(tokens)))


def files_of(where: Path) -> list[Path]:
    return sorted((where / "blobs").rglob("*.state"))


# -- what outlives the process ---------------------------------------------------------------------


def test_it_is_there_after_closing(where: Path) -> None:
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[(200, 3, 4)] = state_of(200, 3, 4)
    with LlamaDiskCache(where, namespace="test") as cache:
        assert list(cache.cache) == [(200, 3, 4)]
        found = cache[(200, 3, 4, 5)]
        assert found.llama_state == native(200, n_tokens=3)
        assert found.input_ids.tolist()[:3] == [200, 3, 4]
        assert found.input_ids.shape == (64,)
        assert found.scores.shape == (1, 16)
        assert (found.n_tokens, found.seed, found.llama_state_size) == (3, 7, 3000)


def test_the_order_of_use_outlives_it(where: Path) -> None:
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        for token in (1, 2, 3):
            cache[[token]] = state_of(token)
        cache[[1]]
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        assert list(cache.cache) == [(2,), (3,), (1,)]
        cache[[4]] = state_of(4)
        assert list(cache.cache) == [(3,), (1,), (4,)]
    with LlamaDiskCache(where, 7_000, namespace="test") as cache:
        assert list(cache.cache) == [(1,), (4,)], "what is above the limit goes at once"


def run(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ELSEWHERE = """
    import sys
    from llamakeep.llama_cache import LlamaDiskCache
    from tests.llama_states import llama_state, native
    where, namespace, *tokens = sys.argv[1:]
    cache = LlamaDiskCache(where, namespace=namespace or None)
    key = [int(token) for token in tokens]
    found = key in cache
    if not found:
        cache[key] = llama_state(key, native(key[0], n_tokens=len(key)))
    print(found, len(cache))
"""


def test_another_process_finds_it(cache: LlamaDiskCache, where: Path) -> None:
    cache[[1, 2]] = state_of(1, 2)
    assert run(ELSEWHERE, str(where), "test", "1", "2", "3") == "True 1"


def test_what_another_process_writes_is_found(cache: LlamaDiskCache, where: Path) -> None:
    assert [5, 6] not in cache
    assert run(ELSEWHERE, str(where), "test", "5", "6") == "False 1"
    assert [5, 6, 7] in cache
    assert cache[[5, 6, 7]].llama_state == native(5)
    assert len(cache) == 1


def test_two_caches_of_one_directory(cache: LlamaDiskCache, where: Path) -> None:
    with LlamaDiskCache(where, namespace="test") as other:
        cache[[1, 2]] = state_of(1, 2)
        cache[[1, 2, 3]] = state_of(1, 2, 3)
        assert other[[1, 2, 3]].n_tokens == 3
        del cache.cache[[1, 2, 3]]  # type: ignore[arg-type]
        assert other[[1, 2, 3]].n_tokens == 2, "what went is not in the way of what is there"
        other.clear()
        assert [1, 2] not in cache
        assert len(cache) == 0
        cache[[1, 2]] = state_of(1, 2)
        other[[1, 2]] = state_of(1, 2, size=5000)
        assert len(cache[[1, 2]].llama_state) == 5000
        assert cache.cache_size == other.cache_size


def test_two_caches_keep_one_limit(where: Path) -> None:
    with (
        LlamaDiskCache(where, 10_000, namespace="one") as one,
        LlamaDiskCache(where, 10_000, namespace="two") as two,
    ):
        for token in range(1, 9):
            (one if token % 2 else two)[[token]] = state_of(token)
            assert one.cache_size == two.cache_size <= 10_000
        assert list(one.cache) == [(7,)]
        assert list(two.cache) == [(6,), (8,)]


def test_two_threads_of_two_caches(where: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with LlamaDiskCache(where, 20_000, namespace="test") as cache:
                for turn in range(15):
                    token = 1 + (number * 7 + turn) % 6
                    cache[[token, 1]] = state_of(token, 1)
                    try:
                        found = cache[[token, 1]]
                    except KeyError:
                        continue
                    assert found.llama_state == native(token)
                    assert cache.cache_size <= 20_000
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


# -- namespaces ------------------------------------------------------------------------------------


def test_without_a_namespace_it_knows_only_itself(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "llamakeep"):
        with LlamaDiskCache(where) as cache:
            assert not caplog.records, "there is still time to say which"
            cache[[1, 2]] = state_of(1, 2)
            assert [1, 2] in cache
            assert cache[[1, 2]].n_tokens == 2
            with LlamaDiskCache(where) as another:
                assert [1, 2] not in another, "it may be for another model"
            assert [1, 2] in cache
            cache.set_namespace("a name")
            assert [1, 2] not in cache
            cache.set_namespace(None)
            assert [1, 2] in cache
        with LlamaDiskCache(where, namespace="test") as named:
            assert named.cache_size == 0, "what nobody can find is gone"
    warnings = [record for record in caplog.records if "set_namespace" in record.message]
    assert len(warnings) == 2, "once each"
    assert run(ELSEWHERE, str(where), "", "1", "2") == "False 1"
    assert run(ELSEWHERE, str(where), "test", "1", "2") == "False 1"


def test_a_fork_is_another_process(where: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    code = """
        import os, sys
        from llamakeep.llama_cache import LlamaDiskCache
        from tests.llama_states import llama_state
        cache = LlamaDiskCache(sys.argv[1])
        cache[[1, 2]] = llama_state([1, 2], b"x" * 10)
        child = os.fork()
        if not child:
            seen = [1, 2] in cache
            cache[[1, 2]] = llama_state([1, 2], b"y" * 10)
            cache.close()
            os._exit(seen)
        assert os.waitpid(child, 0)[1] == 0
        assert cache[[1, 2]].llama_state == b"x" * 10
        cache.close()
    """
    run(code, str(where))


def test_namespaces_are_kept_apart(where: Path) -> None:
    with LlamaDiskCache(where, namespace="f16") as cache:
        cache[[1, 2]] = state_of(1, 2)
        size = cache.cache_size
    with LlamaDiskCache(where, namespace="q8_0") as cache:
        assert [1, 2] not in cache
        assert cache.cache_size == size
    with LlamaDiskCache(where, namespace=b"f16") as cache:
        assert [1, 2] in cache, "text and its bytes are one label"


def test_an_impossible_namespace_lets_go_of_the_directory(where: Path) -> None:
    with pytest.raises(InvalidValue):
        LlamaDiskCache(where, namespace="")
    with LlamaDiskCache(where, namespace="x") as cache:
        assert len(cache) == 0


# -- the directory ---------------------------------------------------------------------------------


def test_it_is_private(cache: LlamaDiskCache, where: Path) -> None:
    cache[[1]] = state_of(1)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    for path in where.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_directory_of_the_callers_is_made_private(where: Path) -> None:
    where.mkdir(mode=0o755)
    with LlamaDiskCache(str(where), namespace="test"):
        assert stat.S_IMODE(where.stat().st_mode) == 0o700


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with LlamaDiskCache(namespace="test") as cache:
        assert cache.cache_dir == ".cache/llama_cache"
        assert Path(cache.cache.directory) == tmp_path / ".cache" / "llama_cache"


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_fault_45_what_diskcache_left_is_not_touched(where: Path, tmp_path: Path) -> None:
    where.mkdir()
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    (where / "cache.db").write_bytes(b"SQLite format 3\0" + bomb)
    (where / "ab").mkdir()
    (where / "ab" / "cdef.val").write_bytes(bomb)
    (where / "index.sqlite3").write_bytes(bomb)
    with LlamaDiskCache(where, namespace="test") as cache:
        assert Path(cache.cache.directory) == where / "llamakeep"
        assert len(cache) == 0
        cache[[1]] = state_of(1)
        assert cache[[1]].n_tokens == 1
        cache.clear()
    with LlamaDiskCache(where, namespace="test") as cache:
        assert Path(cache.cache.directory) == where / "llamakeep"
    assert not exploded.exists()
    assert (where / "ab" / "cdef.val").read_bytes() == bomb
    assert (where / "cache.db").exists()


def test_fault_45_a_pickle_where_a_state_should_be(
    where: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exploded = tmp_path / "exploded"
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)
        cache[[1, 2, 3]] = state_of(1, 2, 3)
        entry = cache._index().get([1, 2, 3])
        assert entry is not None
        (path,) = (path for path in files_of(where) if entry.name.hex() in path.name)
        path.write_bytes(pickle.dumps(Bomb(exploded)) + bytes(1000))
        with caplog.at_level(logging.WARNING, "llamakeep"):
            assert cache[[1, 2, 3]].n_tokens == 2
        assert cache.counters["rejected_foreign"] == 1
        assert "begins with" in caplog.text
    assert not exploded.exists()


def rewrite(path: Path, change: Any) -> None:
    data = bytearray(path.read_bytes())
    path.chmod(0o600)
    path.write_bytes(bytes(change(data)))


def flipped(at: int) -> Any:
    def change(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:20], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: data + b"more", "corrupt"),
        (flipped(-1), "corrupt"),
        (flipped(250), "corrupt"),
        (flipped(145), "name"),
        (lambda data: data[:8] + b"\x09\x00" + data[10:], "version"),
        (lambda data: b"GGUF" + data[4:], "foreign"),
    ],
)
def test_fault_44_files_that_are_not_what_was_written(
    cache: LlamaDiskCache,
    where: Path,
    change: Any,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache[[1, 2]] = state_of(1, 2)
    (good,) = files_of(where)
    cache[[1, 2, 3]] = state_of(1, 2, 3)
    (bad,) = set(files_of(where)) - {good}
    rewrite(bad, change)
    with caplog.at_level(logging.WARNING, "llamakeep"):
        assert cache[[1, 2, 3]].n_tokens == 2, "the next best is used"
    assert cache.counters[f"rejected_{reason}"] == 1
    assert str(bad) in caplog.text
    assert bad.exists() == (reason == "version"), "what is newer is left alone"
    assert cache[[1, 2]].n_tokens == 2


def test_a_newer_form_of_the_state(cache: LlamaDiskCache, where: Path) -> None:
    cache[[1, 2]] = state_of(1, 2)
    entry = cache._index().get([1, 2])
    assert entry is not None
    packed = Packed(Plan.of(state_of(1, 2)).snapshot()).bytes()
    packed = packed.copy()
    packed[:4] = np.frombuffer(struct.pack("<I", VERSION + 1), np.uint8)
    store = cache._backing.store
    store.delete(entry.name)
    assert store.put(entry.name, packed.nbytes, lambda: packed, entry.place)
    with pytest.raises(KeyError):
        cache[[1, 2]]
    assert cache.counters["rejected_version"] == 1
    assert files_of(where), "it is left to who can read it"


def test_fault_46_a_file_that_is_a_link(cache: LlamaDiskCache, where: Path, tmp_path: Path) -> None:
    cache[[1, 2]] = state_of(1, 2)
    (path,) = files_of(where)
    outside = tmp_path / "outside"
    shutil.copy(path, outside)
    before = outside.read_bytes()
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(KeyError):
        cache[[1, 2]]
    cache[[1, 2]] = state_of(1, 2, size=90)
    assert outside.read_bytes() == before
    cache._backing.store.check(fix=True)
    assert outside.read_bytes() == before


def test_an_index_that_is_lost(where: Path) -> None:
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)
        cache[[1, 5]] = state_of(1, 5)
        size = cache.cache_size
    for path in where.glob("index.sqlite3*"):
        path.unlink()
    with LlamaDiskCache(where, namespace="test") as cache:
        assert sorted(cache.cache) == [(1, 2), (1, 5)]
        assert cache.cache_size == size
        assert cache[[1, 2, 3]].n_tokens == 2


def test_an_index_that_is_lost_meanwhile(cache: LlamaDiskCache, where: Path) -> None:
    cache[[1, 2]] = state_of(1, 2)
    cache[[3, 4]] = state_of(3, 4)
    assert [1, 2] in cache
    for path in where.glob("index.sqlite3*"):
        path.unlink()
    cache[[5, 6]] = state_of(5, 6)
    assert sorted(cache.cache) == [(1, 2), (3, 4), (5, 6)]
    for key in ([1, 2], [3, 4], [5, 6]):
        assert cache[key].input_ids.tolist()[:2] == key


def test_rows_that_lie(where: Path) -> None:
    """A row that says another prompt than its file is no entry."""
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)
        cache[[3, 4]] = state_of(3, 4)
    sql = sqlite3.connect(where / "index.sqlite3")
    lie = np.array([9, 9], "<i4").tobytes()
    sql.execute("UPDATE states SET tokens = ? WHERE first = 1", (lie,))
    sql.execute("UPDATE states SET tokens = 'text' WHERE first = 3")
    sql.commit()
    sql.close()
    with LlamaDiskCache(where, namespace="test") as cache:
        assert [9, 9] not in cache
        assert [1, 2] not in cache
        with pytest.raises(KeyError):
            cache[[9, 9]]


def test_a_read_only_directory(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)

    class ReadOnly(Files):
        def writable(self, path: Path) -> bool:
            return False

    monkeypatch.setattr("llamakeep.stores.disk.store.Files", ReadOnly)
    with LlamaDiskCache(where, namespace="test") as cache:
        assert cache[[1, 2]].n_tokens == 2
        cache[[3, 4]] = state_of(3, 4)
        assert [3, 4] not in cache
        assert cache.counters["refused_read_only"] > 0
        cache[[1, 2]] = state_of(1, 2)
        assert cache[[1, 2]].n_tokens == 2


def test_a_key_again_is_replaced_at_once_or_not_at_all(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full()
    monkeypatch.setattr("llamakeep.stores.disk.store.Files", lambda: full)
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)
        full.room = 2000
        cache[[1, 2]] = state_of(1, 2, size=4000)
        assert len(cache[[1, 2]].llama_state) == 3000
        full.room = 1 << 20
        cache[[1, 2]] = state_of(1, 2, size=4000)
        assert len(cache[[1, 2]].llama_state) == 4000
        cache.check()


@pytest.mark.parametrize("sizes", [(3000, 8000), (8000, 3000), (3000, 9000, 300)])
def test_a_key_again_with_another_size_counts_for_that(where: Path, sizes: tuple[int, ...]) -> None:
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        for turn in range(12):
            for size in sizes:
                cache[[1, 2]] = state_of(1, 2, size=size)
                cache[[3, turn]] = state_of(3, turn, size=2000)
                assert cache.cache_size <= 10_000
                cache.check()


def test_killed_while_a_key_is_put_again(where: Path) -> None:
    code = """
        import sys
        from llamakeep.llama_cache import LlamaDiskCache
        from tests.llama_states import llama_state, native
        cache = LlamaDiskCache(sys.argv[1], namespace="test")
        cache[[1, 2]] = llama_state([1, 2], native(1))
        print("ready", flush=True)
        while True:
            cache[[1, 2]] = llama_state([1, 2], native(1, 200_000))
    """
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(where)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.random() / 50)
        process.kill()
        process.wait()
        process.stdout.close()
        with LlamaDiskCache(where, namespace="test") as cache:
            assert cache[[1, 2]].n_tokens == 2


def test_what_went_does_not_stay_in_the_index(where: Path) -> None:
    with (
        LlamaDiskCache(where, 40_000, namespace="test") as cache,
        LlamaDiskCache(where, 40_000, namespace="test") as other,
    ):
        for number in range(400):
            (cache if number % 3 else other)[[1, number]] = state_of(1, number)
            cache._index()
        assert len(cache) == len(other) == 12
        assert len(cache._index()) <= 64
        assert cache[[1, 399]].n_tokens == 2


def test_a_file_that_cannot_be_read_now(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(Files):
        is_exhausted = False

        def open(self, path: Path) -> tuple[io.FileIO, os.stat_result]:
            if self.is_exhausted:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path)

    files = Exhausted()
    monkeypatch.setattr("llamakeep.stores.disk.store.Files", lambda: files)
    with LlamaDiskCache(where, namespace="test") as cache:
        for number in range(5):
            cache[[1, number]] = state_of(1, number)
        files.is_exhausted = True
        with pytest.raises(KeyError):
            cache[[1, 3]]
        assert cache.counters["rejected_unreadable"] == 1
        with pytest.raises(KeyError):
            cache.cache[(1, 3)]
        files.is_exhausted = False
        for number in range(5):
            assert cache[[1, number]].n_tokens == 2


@pytest.mark.parametrize(
    "forge",
    [
        "UPDATE totals SET newest = 'text'",
        "UPDATE totals SET newest = x'00ff'",
        "UPDATE totals SET used_bytes = 'text'",
        "UPDATE totals SET used_bytes = -5",
        "UPDATE totals SET identity = 7",
        "UPDATE states SET file_bytes = 'text'",
        "UPDATE states SET n_bytes = x'00'",
        "UPDATE states SET last_used = 'late'",
        "UPDATE states SET tokens = 5",
        "UPDATE states SET hits = 'many'",
        "INSERT INTO owners VALUES ('k', 'pid', 'x', 'm', 'b', 'seen')",
        "INSERT INTO writing VALUES ('t', x'00', -9, 'o', NULL, NULL)",
    ],
)
def test_an_index_that_says_what_cannot_be(where: Path, forge: str) -> None:
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        for number in range(3):
            cache[[1, number]] = state_of(1, number)
    sql = sqlite3.connect(where / "index.sqlite3")
    sql.execute(forge)
    sql.commit()
    sql.close()
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        for turn in range(2):
            for number in range(3):
                with contextlib.suppress(KeyError):
                    assert cache[[1, number]].n_tokens == 2
                cache[[2, number]] = state_of(2, number)
            assert 0 <= cache.cache_size <= 10_000 or not turn
            repr(cache)
    with LlamaDiskCache(where, 10_000, namespace="test") as cache:
        cache[[5, 6]] = state_of(5, 6)
        assert cache[[5, 6]].n_tokens == 2


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises((StoreError, OSError), match="file"):
        LlamaDiskCache(path)


class Full(Files):
    """A file system that has no room left after so many bytes."""

    room = 1 << 30

    def write(self, file: io.FileIO, data: memoryview) -> None:
        self.room -= len(data)
        if self.room < 0:
            super().write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


def test_fault_48_a_full_disk(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full()
    monkeypatch.setattr("llamakeep.stores.disk.store.Files", lambda: full)
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)
        full.room = 2000
        cache[[3, 4]] = state_of(3, 4)
        assert cache.counters["refused_disk_full"] == 1
        assert [3, 4] not in cache
        assert not list((where / "tmp").glob("*.part")), "the partial file is gone"
        full.room = 1 << 20
        assert cache[[1, 2]].n_tokens == 2
        cache[[3, 4]] = state_of(3, 4)
        assert cache[[3, 4]].n_tokens == 2


def test_a_value_without_a_plain_form(
    cache: LlamaDiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    for odd in (object(), [1], {"a": 1}, np.array(["text"]), np.array([object()]), 1j, np.inf):
        state = state_of(1)
        state.seed = odd  # type: ignore[assignment]
        with caplog.at_level(logging.WARNING, "llamakeep"):
            cache[[1]] = state
        assert [1] not in cache
    assert cache.counters["refused_unsupported"] == 7
    assert "no plain form" in caplog.text
    cache[[1]] = np.zeros(100)  # it says how large it is, but is no state
    assert [1] not in cache


def test_a_key_longer_than_a_header(cache: LlamaDiskCache) -> None:
    cache[np.zeros((1 << 20) + 1, np.int32)] = LegacyState(b"x")  # type: ignore[index]
    assert cache.counters["refused_key"] == 1
    assert len(cache) == 0


def test_other_classes_come_back_as_what_is_stored_here(where: Path) -> None:
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1]] = fork_state([1], native(1, n_tokens=1))
        found = cache[[1]]
        assert found.nbytes == fork_state([1], native(1, n_tokens=1)).nbytes
    with LlamaDiskCache(where, namespace="test") as cache:
        llama = pytest.importorskip("llama_cpp.llama")
        assert type(cache[[1]]) is llama.LlamaState
        cache[[2]] = legacy_state([2], native(2))
        assert type(cache[[2]]) is LegacyState
        assert type(cache[[1]]) is llama.LlamaState, "whatever else is put"


# -- what the store says of it ---------------------------------------------------------------------


def test_it_is_a_directory_of_states_like_others(where: Path) -> None:
    with LlamaDiskCache(where, namespace="my model") as cache:
        cache[[1, 2, 3]] = state_of(1, 2, 3)
        cache[[1, 2, 4]] = state_of(1, 2, 4)
    with DiskStore(where, 1 << 20) as store:
        store.check()
        entries = store.entries()
        assert sorted(entry.tokens.tolist() for entry in entries) == [[1, 2, 3], [1, 2, 4]]
        stats = store.stats()
        assert (stats.n_snapshots, stats.n_segments, stats.n_opaque) == (2, 0, 0)
        assert {"model_name": "my model"} in store.namespaces().values()
        target = io.BytesIO()
        assert store.export(target) == 2
        freed = store.remove(entries[0].id)
        assert freed == entries[0].own_bytes == entries[0].path_bytes
        target.seek(0)
        assert store.import_(target).n_kept == 2
        store.check()
