"""What people ask of a directory of states: prompts, counts, one file to take elsewhere."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import BlobRejected, InvalidValue, StoreError
from llamakeep.stores import envelope
from llamakeep.stores.disk import DiskStore, archive
from llamakeep.stores.disk.rows import in_order
from tests.disk_tools import (
    NAMESPACE,
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


def made(where: Path, n_pages: int = 100, **options: object) -> DiskStore:
    return DiskStore(where, pages(n_pages), min_free_bytes=0, files=Unflushed(), **options)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with made(tmp_path / "cache") as opened:
        yield opened


# One prompt of ten tokens with checkpoints after 6 and 10, one that leaves it after 6 tokens.
LONG, SHORT = path(range(10)), path([0, 1, 2, 3, 4, 5, 90, 91])
SHARED = [LONG.segment(0, 4), LONG.segment(4, 8), LONG.checkpoint(4, 6)]
OF_LONG = [LONG.segment(8, 10), LONG.checkpoint(8, 10)]
OF_SHORT = [SHORT.segment(6, 8), SHORT.checkpoint(6, 8)]


def fill(store: DiskStore) -> None:
    for place in [*SHARED, *OF_LONG, *OF_SHORT]:
        assert put(store, place)


# -- entries ---------------------------------------------------------------------------------------


def test_fault_61_what_is_kept_can_be_seen(store: DiskStore) -> None:
    fill(store)
    store.touch([OF_LONG[0].name])
    long, short = store.entries()
    assert (long.id, short.id) == (OF_LONG[0].name.hex(), OF_SHORT[0].name.hex())
    assert (long.namespace, long.n_tokens, long.hits) == (NAMESPACE.hex(), 10, 1)
    assert (long.tokens.tolist(), long.tokens_from) == (list(range(10)), 0)
    assert short.tokens.tolist() == [0, 1, 2, 3, 4, 5, 90, 91]
    assert long.checkpoints == (6, 10)
    assert short.checkpoints == (6, 8)
    assert (long.path_bytes, long.own_bytes) == (pages(5), pages(2))
    assert (short.path_bytes, short.own_bytes) == (pages(5), pages(2))
    assert long.last_used > long.created
    with pytest.raises(ValueError, match="read-only"):
        long.tokens[0] = 5


def test_a_prompt_that_another_leaves_before_its_end_is_one_too(store: DiskStore) -> None:
    tail = LONG.segment(4, 7)
    for place in (SHARED[0], tail, *OF_SHORT):
        assert put(store, place)
    entries = {entry.id: entry for entry in store.entries()}
    assert set(entries) == {tail.name.hex(), OF_SHORT[0].name.hex()}
    assert entries[tail.name.hex()].own_bytes == 0  # the other one needs it
    assert entries[tail.name.hex()].path_bytes == pages(2)
    assert entries[OF_SHORT[0].name.hex()].path_bytes == pages(4)


def test_prompts_of_checkpoints_alone(store: DiskStore) -> None:
    """A family without segments: what was before a block is known when a checkpoint ends there."""
    known = [LONG.checkpoint(0, 2), LONG.checkpoint(0, 4), LONG.checkpoint(4, 6)]
    other = path([7, 7, 7, 7, 8, 8]).checkpoint(4, 6)
    for place in (*known, other):
        assert put(store, place)
    entries = {entry.id: entry for entry in store.entries()}
    assert set(entries) == {known[2].name.hex(), other.name.hex()}
    first = entries[known[2].name.hex()]
    assert (first.tokens.tolist(), first.tokens_from) == ([0, 1, 2, 3, 4, 5], 0)
    assert first.checkpoints == (2, 4, 6)
    assert first.path_bytes == first.own_bytes == pages(3)
    second = entries[other.name.hex()]
    assert (second.tokens.tolist(), second.tokens_from, second.n_tokens) == ([8, 8], 4, 6)
    assert store.remove(first.id) == pages(3)
    assert list(store) == [other.name]


def test_an_empty_store_has_no_entries(store: DiskStore) -> None:
    assert store.entries() == []
    assert store.stats().n_blobs == 0


def test_stats_count(store: DiskStore) -> None:
    fill(store)
    put(store, path([1], b"b" * 32).segment(0, 1))
    store.put(b"o" * 32, 5, lambda: content(b"o" * 32, 5))
    stats = store.stats()
    assert (stats.n_blobs, stats.n_segments, stats.n_checkpoints, stats.n_opaque) == (9, 5, 3, 1)
    assert (stats.used_bytes, stats.capacity_bytes) == (pages(9), pages(100))
    assert stats.namespaces == {NAMESPACE.hex(): pages(7), (b"b" * 32).hex(): pages(1)}
    assert stats.free_bytes > 0
    assert stats.writing_bytes == 0


# -- removing --------------------------------------------------------------------------------------


def test_removing_a_prompt_takes_what_leads_only_there(store: DiskStore) -> None:
    fill(store)
    assert store.remove(OF_SHORT[0].name.hex()[:12]) == pages(2)
    assert {place.name for place in [*SHARED, *OF_LONG]} == set(store)
    (entry,) = store.entries()
    assert store.remove(entry.id) == pages(5)
    assert len(store) == du(store.path) == 0
    store.check()


def test_removing_a_prompt_leaves_one_that_leaves_it(store: DiskStore) -> None:
    tail = LONG.segment(4, 7)
    for place in (SHARED[0], tail, LONG.checkpoint(4, 7), *OF_SHORT):
        assert put(store, place)
    assert store.remove(tail.name.hex()) == pages(1)  # but for the checkpoint behind the branch
    assert store.remove(OF_SHORT[0].name.hex()) == pages(2)
    assert {tail.name, SHARED[0].name} == set(store)
    assert store.remove(tail.name.hex()) == pages(2)
    store.check()


def test_an_id_must_be_known_and_unique(store: DiskStore) -> None:
    for n in range(40):
        put(store, path([n]).segment(0, 1))
    for prefix in ("", "zz", SHARED[0].name.hex()):
        with pytest.raises(InvalidValue, match=rf"prompt '{prefix}'"):
            store.remove(prefix)
    seen = {entry.id[0] for entry in store.entries()}
    twice = next(digit for digit in seen if sum(e.id[0] == digit for e in store.entries()) > 1)
    with pytest.raises(InvalidValue, match=rf"'{twice}': \d+ begin"):
        store.remove(twice)
    assert len(store) == 40


def test_a_namespace_can_be_removed(store: DiskStore) -> None:
    fill(store)
    other = path([1], b"b" * 32).segment(0, 1)
    put(store, other)
    store.introduce(NAMESPACE, {"model": "m"})
    store.introduce(b"c" * 32, {"model": "never used"})
    with pytest.raises(InvalidValue, match="'ff'"):
        store.remove_namespace("ff")
    assert store.remove_namespace(NAMESPACE.hex()[:6]) == 7
    assert store.remove_namespace((b"c" * 32).hex()) == 0
    assert list(store) == [other.name]
    assert store.namespaces() == {}
    store.check()


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=11),
            st.sets(st.integers(1, 11), max_size=2),
        ),
        min_size=1,
        max_size=5,
    ),
    order=st.randoms(use_true_random=False),
)
def test_prompts_come_and_go(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[tuple[list[int], set[int]]],
    order: object,
) -> None:
    """Every prompt is an entry or goes on in one; removing all of them leaves nothing."""
    with made(tmp_path_factory.mktemp("catalog") / "cache") as store:
        for tokens, marks in prompts:
            names = path(tokens)
            ends = sorted({*range(4, len(tokens), 4), len(tokens)})
            start = 0
            for end in ends:
                assert put(store, names.segment(start, end))
                for mark in marks:
                    if start < mark <= end:
                        assert put(store, names.checkpoint(start, mark))
                start = end
        entries = store.entries()
        found = {tuple(entry.tokens.tolist()) for entry in entries}
        wanted = {tuple(tokens) for tokens, _ in prompts}
        assert found == {
            each
            for each in wanted
            if not any(other != each and reaches(other, each) for other in wanted)
        }
        kept = {tuple(tokens): set() for tokens, _ in prompts}  # type: ignore[var-annotated]
        for tokens, marks in prompts:
            for other in kept:
                kept[other] |= {
                    mark
                    for mark in marks
                    if mark <= len(tokens) and tuple(tokens[:mark]) == other[:mark]
                }
        for entry in entries:
            assert entry.tokens_from == 0
            assert set(entry.checkpoints) <= kept[tuple(entry.tokens.tolist())]
            assert entry.own_bytes <= entry.path_bytes <= store.used_bytes
        while entries := store.entries():
            entry = order.choice(entries)  # type: ignore[attr-defined]
            before = store.used_bytes
            assert store.remove(entry.id) == entry.own_bytes == before - store.used_bytes
            store.check()
            if entry.own_bytes == 0:
                break
        if not entries:
            assert len(store) == 0


def reaches(other: tuple[int, ...], each: tuple[int, ...]) -> bool:
    """Whether what `other` is kept in goes on from the end of `each`."""
    return len(each) % 4 == 0 and other[: len(each)] == each


# -- archives --------------------------------------------------------------------------------------


@pytest.fixture
def file(store: DiskStore, tmp_path: Path) -> Path:
    """An archive of the filled store."""
    fill(store)
    store.introduce(NAMESPACE, {"model": "m", "rolling": True})
    store.put(b"o" * 32, 5, lambda: content(b"o" * 32, 5))
    assert store.export(tmp_path / "states") == 8
    return tmp_path / "states"


def test_an_archive_brings_everything_elsewhere(
    store: DiskStore, file: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    with made(tmp_path / "other") as other:
        done = other.import_(file, lambda done, of: seen.append((done, of)))
        assert (done.n_states, done.n_kept) == (8, 8)
        assert seen == [(n, 16) for n in range(1, 17)]
        assert set(other) == set(store)
        assert all(is_right(other, name) for name in other)
        assert other.namespaces() == {NAMESPACE: {"model": "m", "rolling": True}}
        assert {r.name for r in other.find(blocks(range(10)))} == {
            r.name for r in store.find(blocks(range(10)))
        }
        assert {e.id for e in other.entries()} == {e.id for e in store.entries()}
        other.check()
        assert other.import_(file).n_kept == 8  # again: nothing changes
        assert other.used_bytes == store.used_bytes


def test_an_archive_of_one_prompt_has_all_that_is_along_it(
    store: DiskStore, tmp_path: Path
) -> None:
    fill(store)
    seen: list[tuple[int, int]] = []
    target = io.BytesIO(b"before")
    target.seek(0, os.SEEK_END)
    n = store.export(target, [OF_SHORT[0].name.hex()[:10]], lambda a, b: seen.append((a, b)))
    assert n == 5
    assert seen == [(n, 5) for n in range(1, 6)]
    target.seek(6)
    with made(tmp_path / "other") as other:
        assert other.import_(target).n_kept == 5
        assert set(other) == {place.name for place in [*SHARED, *OF_SHORT]}
        # The segment that it leaves before its end is the end of a prompt here.
        ends = {entry.id: entry.checkpoints for entry in other.entries()}
        assert ends == {OF_SHORT[0].name.hex(): (6, 8), SHARED[1].name.hex(): (6,)}
    with pytest.raises(InvalidValue, match="'zz'"):
        store.export(io.BytesIO(), ["zz"])


def test_what_hangs_off_another_comes_behind_it(store: DiskStore) -> None:
    for place in [*OF_SHORT, *OF_LONG[::-1], *SHARED[::-1]]:
        assert put(store, place)
    with store._index.reading() as sql:
        order = in_order(sql)
    at = {place.name: order.index(place.name) for place in [*SHARED, *OF_LONG, *OF_SHORT]}
    first, second, mark = (at[place.name] for place in SHARED)
    assert first < second < min(mark, *(at[place.name] for place in [*OF_LONG, *OF_SHORT]))
    assert at[OF_SHORT[0].name] < at[OF_SHORT[1].name]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_an_archive_is_private_and_complete_or_absent(
    store: DiskStore, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.export(file, progress=stop)
    assert file.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"cache", "states"}
    with pytest.raises(StoreError, match="missing"):
        store.export(tmp_path / "missing" / "states")
    with pytest.raises(StoreError, match="nothing"):
        store.import_(tmp_path / "nothing")


def test_what_is_gone_or_bad_by_now_is_left_out(store: DiskStore, tmp_path: Path) -> None:
    fill(store)
    store._shelf.drop(OF_LONG[1].name)
    bad = store._shelf.path(OF_SHORT[1].name)
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    assert store.export(tmp_path / "states") == 5
    with made(tmp_path / "other") as other:
        assert other.import_(tmp_path / "states").n_states == 5


@pytest.mark.parametrize("theirs", [None, "hush"])
def test_an_export_that_could_read_nothing_is_none(tmp_path: Path, theirs: str | None) -> None:
    with made(tmp_path / "cache", secret=theirs) as store:
        fill(store)
    steps: list[tuple[int, int]] = []
    with made(tmp_path / "cache", secret="guess") as store:
        with pytest.raises(BlobRejected, match="7 sealed with another secret") as raised:
            store.export(tmp_path / "states", progress=lambda done, n: steps.append((done, n)))
        assert raised.value.reason == "secret"
        assert steps == [(n, 7) for n in range(1, 8)]
        assert put(store, LONG.segment(4, 7))
        assert store.export(tmp_path / "states") == 1
    assert {each.name for each in tmp_path.iterdir()} == {"cache", "states"}


def test_what_another_secret_sealed_does_not_count_as_imported(file: Path, tmp_path: Path) -> None:
    with made(tmp_path / "other", secret="hush") as other:
        assert put(other, SHARED[0])
    with made(tmp_path / "other") as other:
        assert other.import_(file).n_kept == 7


def test_an_audit_names_what_it_found(store: DiskStore) -> None:
    fill(store)
    gone, bad = (store._shelf.path(place.name) for place in (OF_LONG[1], OF_SHORT[1]))
    gone.unlink()
    bad.write_bytes(bad.read_bytes()[:-1])
    found = store.audit(fix=True).files
    root = store.path
    assert found == {
        "missing": (gone.relative_to(root).as_posix(),),
        "truncated": (bad.relative_to(root).as_posix(),),
    }
    assert store.audit().files == {}


def test_an_archive_needs_the_secret(tmp_path: Path) -> None:
    with made(tmp_path / "cache", secret="hush") as store:
        fill(store)
        store.export(tmp_path / "states")
    for secret in (None, "guess"):
        with made(tmp_path / "other", secret=secret) as other:
            with pytest.raises(BlobRejected, match="secret"):
                other.import_(tmp_path / "states")
            assert len(other) == 0
    with made(tmp_path / "third", secret="hush") as third:
        assert third.import_(tmp_path / "states").n_kept == 7


def test_an_import_keeps_to_the_limit(file: Path, tmp_path: Path) -> None:
    with made(tmp_path / "small", 3) as small:
        done = small.import_(file)
        assert done.n_states == 8
        assert done.n_kept == len(small)  # what came and went again is none
        assert small.used_bytes <= pages(3)
        small.check()


def head_bytes(data: bytes) -> int:
    return 56 + int.from_bytes(data[12:16], "little")


@pytest.mark.parametrize(
    ("spoil", "reason", "match"),
    [
        (lambda data: b"", "truncated", "is empty"),
        (lambda data: data[:30], "truncated", "head"),
        (lambda data: data[: head_bytes(data) - 1], "truncated", "description"),
        (lambda data: data[: head_bytes(data) + 100], "truncated", "state 1 of 8"),
        (lambda data: data[: head_bytes(data) + 178], "truncated", "state 1 of 8"),
        (lambda data: data[:-1], "truncated", "state 8 of 8"),
        (lambda data: data[:-2000], "truncated", "state 7 of 8"),
        (lambda data: data + b"x", "corrupt", "goes on"),
        (lambda data: b"PK" + data[2:], "foreign", "no archive"),
        (lambda data: data[:8] + b"\x07" + data[9:], "version", "version 7"),
        (lambda data: data[:16] + b"\x05" + data[17:], "corrupt", "head"),
        (lambda data: data[:15] + b"\xff" + data[16:], "corrupt", "head"),
        (lambda data: data[:60] + b"?" + data[61:], "corrupt", "head"),
        (lambda data: data[:-500] + bytes([data[-500] ^ 1]) + data[-499:], "corrupt", "state 8"),
    ],
)
def test_a_bad_archive_is_refused_before_anything_is_put(
    file: Path, tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str, match: str
) -> None:
    file.write_bytes(spoil(file.read_bytes()))
    with made(tmp_path / "other") as other:
        with pytest.raises(BlobRejected, match=match) as raised:
            other.import_(file)
        assert raised.value.reason == reason
        assert len(other) == 0
        assert other.namespaces() == {}


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"namespaces": {"ab": {}}}', b"\xff", b"{"])
def test_a_forged_description_is_refused(tmp_path: Path, text: bytes) -> None:
    file = io.BytesIO(archive._head(0, text, None))
    with made(tmp_path / "other") as other, pytest.raises(BlobRejected, match="description"):
        other.import_(file)


def test_a_state_that_claims_to_be_huge_is_refused(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    at = head_bytes(data) + 16
    data[at : at + 8] = (1 << 60).to_bytes(8, "little")
    file.write_bytes(data)
    with made(tmp_path / "other") as other, pytest.raises(BlobRejected, match="state 1"):
        other.import_(file)


def test_a_file_that_cannot_be_read_twice_is_refused(store: DiskStore) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, pytest.raises(StoreError, match="read twice"):
        store.import_(pipe)


# -- the form of a state ---------------------------------------------------------------------------


def test_secrets_are_told_apart() -> None:
    data = content(b"x" * 32, 100)
    keys = [envelope.seal_key(secret) for secret in (None, "", "a", b"a", "b")]
    assert keys[0] is keys[1] is None
    assert keys[2] == keys[3] != keys[4]
    for mine in keys:
        header = envelope.wrap(b"x" * 32, data, None, mine)
        parsed = envelope.parse(header)
        for other in keys:
            if other == mine:
                envelope.verify(parsed, data, other)
            else:
                with pytest.raises(BlobRejected, match="secret") as raised:
                    envelope.verify(parsed, data, other)
                assert raised.value.reason == "secret"


def test_a_position_beyond_all_sense_is_refused(store: DiskStore) -> None:
    """A header can be forged where there is no secret; the index must not choke on it."""
    huge = 1 << 63
    place = path([1, 2]).segment(0, 2)
    header = bytearray(envelope.wrap(place.name, content(place.name, 10), place, None)[:-32])
    header[128:136] = header[136:144] = huge.to_bytes(8, "little")
    tokens = np.array([1, 2], np.int32)
    name = blake3(
        place.block + b"segment\0" + huge.to_bytes(8, "little") + tokens.tobytes()
    ).digest()
    header[24:56] = name
    payload = content(name, 10)
    seal = envelope._seal(bytes(header), payload, None)
    file = store._shelf.path(name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(header) + seal + payload.tobytes())
    report = store.audit(fix=True)
    assert report.problems == {"corrupt": 1}


def test_a_failing_index_is_told_to_who_asks(tmp_path: Path) -> None:
    files = Failing()
    with DiskStore(tmp_path / "cache", pages(9), min_free_bytes=0, files=files) as store:
        fill(store)
        files.errors["unlink"] = OSError(5, "broken")
        with pytest.raises(StoreError, match="broken"):
            store.remove(OF_LONG[0].name.hex())
        with pytest.raises(StoreError, match="broken"):
            store.remove_namespace(NAMESPACE.hex())
        files.errors.clear()
        store.check()
        assert len(store) == 7
