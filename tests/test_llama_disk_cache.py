"""`LlamaDiskCache`: what outlives a process, what other processes do, and what may lie about."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pickle
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import BlobRejected, InvalidValue, StoreError
from llamakeep.llama_cache import LlamaDiskCache
from llamakeep.llama_cache.disk import DiskBacking
from llamakeep.llama_cache.packed import VERSION, Packed, unpack
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
    return llama_state(list(tokens), native(tokens[0], size))


def files_of(where: Path) -> list[Path]:
    return sorted((where / "blobs").rglob("*.state"))


# -- what outlives the process ---------------------------------------------------------------------


def test_it_is_there_after_closing(where: Path) -> None:
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[(200, 3, 4)] = state_of(200, 3, 4)
    with LlamaDiskCache(where, namespace="test") as cache:
        assert list(cache.cache) == [(200, 3, 4)]
        found = cache[(200, 3, 4, 5)]
        assert found.llama_state == native(200)
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
        cache[key] = llama_state(key, native(key[0]))
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


def test_without_a_namespace_only_this_process(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "llamakeep"):
        with LlamaDiskCache(where) as cache:
            assert not caplog.records, "there is still time to say which"
            cache[[1, 2]] = state_of(1, 2)
            assert [1, 2] in cache
            assert cache[[1, 2]].n_tokens == 2
        with LlamaDiskCache(where) as again:
            assert [1, 2] in again
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
        with LlamaDiskCache(sys.argv[1]) as cache:
            cache[[1, 2]] = llama_state([1, 2], b"x" * 10)
        child = os.fork()
        if not child:
            with LlamaDiskCache(sys.argv[1]) as cache:
                os._exit([1, 2] in cache)
        assert os.waitpid(child, 0)[1] == 0
        with LlamaDiskCache(sys.argv[1]) as cache:
            assert [1, 2] in cache
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


def test_a_read_only_directory(where: Path) -> None:
    with LlamaDiskCache(where, namespace="test") as cache:
        cache[[1, 2]] = state_of(1, 2)

    class ReadOnly(Files):
        def writable(self, path: Path) -> bool:
            return False

    backing = DiskBacking(where, 1 << 20, ReadOnly())
    cache = LlamaDiskCache.__new__(LlamaDiskCache)
    cache.__dict__.update(LlamaDiskCache(where, namespace="test").__dict__)
    cache._backing.store.close()
    cache._backing = backing
    assert cache[[1, 2]].n_tokens == 2
    cache[[3, 4]] = state_of(3, 4)
    assert [3, 4] not in cache
    assert cache.counters["refused_read_only"] > 0
    assert cache[[1, 2]].n_tokens == 2
    cache[[1, 2]] = state_of(1, 2)
    assert cache[[1, 2]].n_tokens == 2
    cache.close()


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
        cache[[1]] = fork_state([1], native(1))
        found = cache[[1]]
        assert found.nbytes == fork_state([1], native(1)).nbytes
    with LlamaDiskCache(where, namespace="test") as cache:
        llama = pytest.importorskip("llama_cpp.llama")
        assert type(cache[[1]]) is llama.LlamaState
        cache[[2]] = legacy_state([2], native(2))
        assert type(cache[[1]]) is LegacyState


# -- the form --------------------------------------------------------------------------------------

numbers = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64), st.text(max_size=9))
arrays = st.sampled_from(
    [
        np.array([], np.intc),
        np.array([[1.5, -2], [0, np.nan]], np.single),
        np.zeros((0, 5), np.float16),
        np.arange(6, dtype=">i8").reshape(1, 2, 3),
        np.array(7, np.uint8),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.array([True, False]).view(np.int8),
    ]
)


@given(st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z"), numbers | arrays | st.binary()))
@settings(max_examples=150, deadline=None)
def test_what_is_packed_comes_back(attributes: dict[str, Any]) -> None:
    state = LegacyState(b"native")
    state.__dict__.update(attributes)
    state.llama_state_size = 6
    packed = Packed(Plan.of(state).snapshot())
    data = packed.bytes()
    assert data.nbytes == packed.n_bytes
    stream = io.BytesIO(data.tobytes())
    found = unpack(stream.read, packed.n_bytes, LegacyState).revive()
    assert not stream.read()
    assert vars(found).keys() == vars(state).keys()
    for name, value in vars(state).items():
        got = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert got.dtype == value.dtype.newbyteorder("=")
            np.testing.assert_array_equal(got, value)
        else:
            assert got == value
            assert type(got) is type(value)


def told(head: bytes, rest: bytes = b"") -> Any:
    data = struct.pack("<II", VERSION, len(head)) + head + rest
    left = len(data)
    stream = io.BytesIO(data)

    def read(n_bytes: int) -> bytes:
        nonlocal left
        if n_bytes > left:
            raise BlobRejected("too short", reason="truncated")
        left -= n_bytes
        return stream.read(n_bytes)

    return unpack(read, left, LegacyState)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}x",
        b"[1]",
        b"[[]]",
        b"7",
        b'{"a": 1}',
        b'[["__class__", "plain", 1]]',
        b'[["__reduce__", "raw", 0]]',
        b'[["a b", "plain", 1]]',
        b'[[1, "plain", 1]]',
        b'[["a", "plain", [1]]]',
        b'[["a", "plain"]]',
        b'[["a", "pickle", 3]]',
        b'[["a", "raw", -1]]',
        b'[["a", "raw", 1e9]]',
        b'[["a", "raw", true]]',
        b'[["a", "raw", 99999999999]]',
        b'[["a", "array", "|O", [1]]]',
        b'[["a", "array", ["<i4"], [1]]]',
        b'[["a", "array", "<i4", [1000000000]]]',
        b'[["a", "array", "<i4", [-1]]]',
        b'[["a", "array", "<i4", 3]]',
        b'[["a", "array", "<i4", [0, 0, 0, 0, 0, 0, 0, 0, 0]]]',
        b'[["a", "array", "<i4", [0], 99999999999]]',
        b'[["a", "array", "<i4", [1], 0]]',
        b'[["a", "array", "<i4", [0, 0], 1]]',
        b'[["a", "zeros", "<f4", 99999999999]]',
        b'[["a", "zeros", "<f4", "wide"]]',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_heads_that_no_state_has(head: bytes) -> None:
    with pytest.raises(BlobRejected):
        told(head, b"\0" * 4)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_nothing_else_is_raised(data: bytes) -> None:
    with contextlib.suppress(BlobRejected):
        told(data)


def test_a_newer_version() -> None:
    stream = io.BytesIO(struct.pack("<II", VERSION + 1, 0))
    with pytest.raises(BlobRejected, match="version") as caught:
        unpack(stream.read, 8, LegacyState)
    assert caught.value.reason == "version"


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
        assert {"label": "my model"} in store.namespaces().values()
        target = io.BytesIO()
        assert store.export(target) == 2
        freed = store.remove(entries[0].id)
        assert freed == entries[0].own_bytes == entries[0].path_bytes
        target.seek(0)
        assert store.import_(target).n_kept == 2
        store.check()
