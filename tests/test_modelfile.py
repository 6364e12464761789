"""A model file is told from every other by what is in it, and is read once."""

from __future__ import annotations

import builtins
import json
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from llamakeep import gguf, modelfile
from llamakeep.errors import ModelError
from llamakeep.modelfile import CACHE_FILE, ModelFile, fingerprint_file, inspect_file
from tests.test_gguf import SMALL, file_of, tensor, text, value

ROW = 4096


class Opened:
    """Counts the model files that are opened."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def __call__(self, path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, Path):
            self.paths.append(path)
        return builtins.open(path, *args, **options)

    def since(self) -> int:
        n, self.paths = len(self.paths), []
        return n


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet, and the files that are written here are old."""
    monkeypatch.setattr(modelfile, "_known", {})
    monkeypatch.setattr(modelfile, "_now_ns", lambda: 1 << 62)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    counter = Opened()
    monkeypatch.setattr(modelfile, "open", counter, raising=False)
    return counter


def another_process() -> None:
    modelfile._known.clear()


def model(path: Path, *, seed: int = 0, sizes: tuple[int, ...] = (8, 8, 8), **extra: str) -> Path:
    """A file with tensors of so many rows of 4 KiB."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    for key, text_value in extra.items():
        writer.add_string(key, text_value)
    for index, size in enumerate(sizes):
        writer.add_tensor(f"t.{index}", rng.standard_normal((size, ROW // 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def patch(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)
    touched(path)


def touched(path: Path) -> None:
    """Give the file times that it never had, whatever the file system's clock."""
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1_000_000_000))


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is small enough to be read whole."""
    monkeypatch.setattr(gguf, "WHOLE_BYTES", -1)


# -- what is told apart ----------------------------------------------------------------------------


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    content = path.read_bytes()
    start = len(content) - 3 * 8 * ROW
    seen = {fingerprint_file(path)}
    places = [40, start - 1, start, start + 5 * ROW, len(content) - 1]
    for at in places:
        patch(path, at, bytes([content[at] ^ 1]))
        seen.add(fingerprint_file(path))
        patch(path, at, content[at : at + 1])
    path.write_bytes(content + b"\0")
    seen.add(fingerprint_file(path))
    path.write_bytes(content[:-1])
    seen.add(fingerprint_file(path))
    assert len(seen) == len(places) + 3
    path.write_bytes(content)
    assert fingerprint_file(path) in seen


def test_every_byte_of_the_header_counts(tmp_path: Path, sampled: None) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SMALL)
    # Of one part only, or the others would be looked for.
    plain = SMALL.replace(b"\2\0\0\0\3\0", b"\2\0\0\0\1\0")
    assert plain != SMALL
    path.write_bytes(plain)
    seen, refused = {fingerprint_file(path)}, 0
    for at in range(len(plain)):
        changed = bytearray(plain)
        changed[at] ^= 0x20
        path.write_bytes(changed)
        touched(path)
        modelfile._known.clear()
        try:
            seen.add(fingerprint_file(path))
        except ModelError:
            refused += 1
    assert refused < len(plain) / 2
    assert len(seen) + refused == len(plain) + 1


@pytest.mark.parametrize("index", range(3))
def test_another_tensor_makes_another_file(tmp_path: Path, sampled: None, index: int) -> None:
    path = model(tmp_path / "m.gguf", sizes=(8, 8, 8))
    before = fingerprint_file(path)
    start = path.stat().st_size - (3 - index) * 8 * ROW
    noise = np.random.default_rng(9).bytes(8 * ROW)
    was = path.read_bytes()[start : start + 8 * ROW]
    patch(path, start, noise)
    assert fingerprint_file(path) != before
    patch(path, start, was)
    # Its start, its middle and its end, each alone.
    for at in (0, 4 * ROW, 8 * ROW - 1):
        patch(path, start + at, bytes([was[at] ^ 1]))
        assert fingerprint_file(path) != before
        patch(path, start + at, was[at : at + 1])
    assert fingerprint_file(path) == before


def test_a_large_file_is_not_read_whole(
    tmp_path: Path, sampled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "m.gguf", sizes=(100, 200))
    n_read, read_spans = 0, gguf.read_spans

    def counted(*args: Any) -> Iterator[memoryview]:
        nonlocal n_read
        for piece in read_spans(*args):
            n_read += len(piece)
            yield piece

    monkeypatch.setattr(modelfile, "read_spans", counted)
    fingerprint_file(path)
    assert n_read == path.stat().st_size - 300 * ROW + 6 * ROW


def test_the_name_and_the_place_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = fingerprint_file(model(tmp_path / "a.gguf"))
    assert fingerprint_file(str(model(tmp_path / "other" / "b.bin"))) == one
    assert fingerprint_file(model(tmp_path / "c.gguf", seed=1)) != one
    assert fingerprint_file(model(tmp_path / "d.gguf", note="x")) != one
    (tmp_path / "e.gguf").symlink_to(tmp_path / "a.gguf")
    assert fingerprint_file(tmp_path / "e.gguf") == one


def test_a_fingerprint_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Namespaces are made of it: whoever changes this forgets everything that was kept."""
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of([value("k", "STRING", text("v"))], [tensor("t", 0)], data=bytes(32)))
    assert fingerprint_file(path) == (
        "563aac553b779f5919e5a84d79318f2d834049799a2278e66759a59e7ab89023"
    )


def test_so_is_that_of_a_file_that_is_sampled(tmp_path: Path, sampled: None) -> None:
    path = tmp_path / "m.gguf"
    data = np.arange(1 << 18, dtype="<u4").tobytes()
    path.write_bytes(file_of([], [tensor("t", 0), tensor("u", 1 << 19)], data=data))
    assert fingerprint_file(path) == (
        "0332c3f91f9b792c6e918ef5cf593fa3e52dc5e18d1dae8972958a571fb78e19"
    )


def test_rope_factors_are_seen_in_any_part(tmp_path: Path) -> None:
    plain, long = tmp_path / "p.gguf", tmp_path / "l.gguf"
    plain.write_bytes(file_of([], [tensor("rope_freqs.weight", 0)], data=bytes(32)))
    long.write_bytes(file_of([], [tensor("rope_factors_long.weight", 0)], data=bytes(32)))
    assert not inspect_file(plain).rope_factors
    assert inspect_file(long).rope_factors
    parts = [tmp_path / f"s-0000{index}-of-00002.gguf" for index in (1, 2)]
    count = value("split.count", "UINT16", struct.pack("<H", 2))
    for part, name in zip(parts, ("a", "rope_factors_short.weight"), strict=True):
        part.write_bytes(file_of([count], [tensor(name, 0)], data=bytes(32)))
    assert inspect_file(parts[0]).rope_factors


# -- what is refused -------------------------------------------------------------------------------


def test_what_is_no_model_is_refused_with_its_path(tmp_path: Path) -> None:
    cases: dict[str, bytes | None] = {
        "missing.gguf": None,
        "empty.gguf": b"",
        "text.gguf": b"this is no model",
        "cut.gguf": SMALL[:50],
    }
    for name, content in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError) as raised:
            fingerprint_file(path)
        assert str(path) in str(raised.value)
        assert not modelfile._known
    with pytest.raises(ModelError, match=r"cannot read .*(directory|denied)"):
        fingerprint_file(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read_spans = model(tmp_path / "m.gguf"), gguf.read_spans

    def written_meanwhile(*args: Any) -> Iterator[memoryview]:
        yield from read_spans(*args)
        touched(path)

    monkeypatch.setattr(modelfile, "read_spans", written_meanwhile)
    fingerprint_file(path, cache_dir=tmp_path)
    assert not modelfile._known
    assert not (tmp_path / CACHE_FILE).exists()


def test_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be written again within the same tick of the file system's clock."""
    path = model(tmp_path / "m.gguf")
    written_ns = max(path.stat().st_mtime_ns, path.stat().st_ctime_ns)
    monkeypatch.setattr(modelfile, "_now_ns", lambda: written_ns + 1_000_000_000)
    fingerprint_file(path)
    assert opened.since()
    fingerprint_file(path)
    assert opened.since()
    monkeypatch.setattr(modelfile, "_now_ns", lambda: written_ns + 3_000_000_000)
    fingerprint_file(path)
    assert opened.since()
    fingerprint_file(path)
    assert not opened.since()


# -- models in parts -------------------------------------------------------------------------------


def split_model(directory: Path) -> list[Path]:
    writer = GGUFWriter(directory / "m.gguf", "llama", split_max_tensors=1)
    for index in range(3):
        writer.add_tensor(f"t.{index}", np.full((4, ROW // 4), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob("m-*.gguf"))


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = fingerprint_file(parts[0])
    assert {fingerprint_file(part) for part in parts} == {whole}
    for part in parts:
        content = part.read_bytes()
        patch(part, len(content) - 1, b"x")
        assert fingerprint_file(parts[0]) != whole
        patch(part, len(content) - 1, content[-1:])
    assert fingerprint_file(parts[0]) == whole


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    before = fingerprint_file(parts[0])
    aside = parts[1].rename(tmp_path / "aside")
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is missing: m-00001.* of 3"):
        fingerprint_file(parts[0])
    aside.rename(parts[1])
    assert fingerprint_file(parts[0]) == before


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    part = split_model(tmp_path)[0]
    with pytest.raises(ModelError, match=r"one of 3 parts, so its name should end like -00001-of"):
        fingerprint_file(part.rename(tmp_path / "renamed.gguf"))
    with pytest.raises(ModelError, match="one of 3 parts"):
        fingerprint_file((tmp_path / "renamed.gguf").rename(tmp_path / "m-00001-of-00002.gguf"))


def test_a_whole_model_that_is_named_like_a_part_needs_no_others(tmp_path: Path) -> None:
    plain = fingerprint_file(model(tmp_path / "m.gguf"))
    assert fingerprint_file(model(tmp_path / "m-00001-of-00002.gguf")) == plain


# -- what is remembered ----------------------------------------------------------------------------


def test_a_file_is_read_once(tmp_path: Path, opened: Opened) -> None:
    path = model(tmp_path / "m.gguf")
    first = inspect_file(path)
    assert opened.since()
    assert inspect_file(str(path)) == first
    (tmp_path / "link").symlink_to(path)
    assert inspect_file(tmp_path / "link") == first
    assert not opened.since()


def test_without_a_directory_another_process_reads_it_again(tmp_path: Path, opened: Opened) -> None:
    path = model(tmp_path / "m.gguf")
    fingerprint_file(path)
    opened.since()
    another_process()
    fingerprint_file(path)
    assert opened.since()
    assert list(tmp_path.iterdir()) == [path]


def test_with_a_directory_another_process_does_not(tmp_path: Path, opened: Opened) -> None:
    path, cache_dir = model(tmp_path / "m.gguf"), tmp_path / "new" / "cache"
    first = inspect_file(path, cache_dir=cache_dir)
    assert opened.since()
    another_process()
    assert inspect_file(path, cache_dir=str(cache_dir)) == first
    assert not opened.since()
    # And from then on it is known in this process too.
    assert inspect_file(path) == first
    assert not opened.since()
    if os.name == "posix":
        assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700
        assert stat.S_IMODE((cache_dir / CACHE_FILE).stat().st_mode) == 0o600
    assert [entry.name for entry in cache_dir.iterdir()] == [CACHE_FILE]


def test_what_was_known_without_a_directory_is_written_when_there_is_one(
    tmp_path: Path, opened: Opened
) -> None:
    path = model(tmp_path / "m.gguf")
    fingerprint_file(path)
    opened.since()
    fingerprint_file(path, cache_dir=tmp_path)
    another_process()
    fingerprint_file(path, cache_dir=tmp_path)
    assert not opened.since()


def change_time(path: Path) -> None:
    touched(path)


def change_content(path: Path) -> None:
    content, info = path.read_bytes(), path.stat()
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))  # only its ctime tells


def change_size(path: Path) -> None:
    content, info = path.read_bytes(), path.stat()
    path.write_bytes(content + b"x")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def replace_it(path: Path) -> None:
    model(path.with_name("new"), seed=5).replace(path)


@pytest.mark.parametrize("change", [change_time, change_content, change_size, replace_it])
@pytest.mark.parametrize("process", ["this", "another"])
def test_a_changed_file_is_read_again(
    tmp_path: Path, opened: Opened, change: Callable[[Path], None], process: str
) -> None:
    path = model(tmp_path / "m.gguf")
    first = fingerprint_file(path, cache_dir=tmp_path)
    change(path)
    if process == "another":
        another_process()
    opened.since()
    second = fingerprint_file(path, cache_dir=tmp_path)
    assert opened.since()
    assert (second == first) == (change is change_time)


def test_a_moved_file_is_read_again(tmp_path: Path, opened: Opened) -> None:
    """There are file systems that number their files anew on every mount."""
    path = model(tmp_path / "m.gguf")
    first = fingerprint_file(path)
    opened.since()
    assert fingerprint_file(path.rename(tmp_path / "n.gguf")) == first
    assert opened.since()


def test_any_part_that_changed_is_noticed(tmp_path: Path, opened: Opened) -> None:
    parts = split_model(tmp_path)
    fingerprint_file(parts[0], cache_dir=tmp_path)
    another_process()
    opened.since()
    fingerprint_file(parts[0], cache_dir=tmp_path)
    assert not opened.since()
    touched(parts[2])
    fingerprint_file(parts[0], cache_dir=tmp_path)
    assert opened.since()


HEX = "0123456789abcdef" * 4


def forged(key: str = HEX, **changed: Any) -> str:
    entry = {"fingerprint": HEX, "rope_factors": False} | changed
    return json.dumps({"scheme": 1, "files": {key: entry}})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        '"files"',
        "{}",
        '{"scheme": 1}',
        '{"scheme": 2, "files": {}}',
        '{"scheme": 1, "files": []}',
        '{"scheme": 1, "files": null}',
        '{"scheme": 1, "files": {"a": null}}',
        "[" * 100_000,
        '{"scheme": 1, "files": ' + "[" * 5_000 + "]" * 5_000 + "}",
        '{"scheme": 1, "files": {' + " " * (1 << 20) + "}}",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "9" * 5_000,
        forged("short"),
        forged(fingerprint="../../etc"),
        forged(fingerprint=HEX.upper()),
        forged(fingerprint=7),
        forged(rope_factors="yes"),
        forged(rope_factors=1),
    ],
)
def test_a_corrupt_or_foreign_file_is_replaced(
    tmp_path: Path, opened: Opened, content: str
) -> None:
    path = model(tmp_path / "m.gguf")
    (tmp_path / CACHE_FILE).write_text(content, encoding="latin-1")
    first = fingerprint_file(path, cache_dir=tmp_path)
    assert opened.since()
    files = json.loads((tmp_path / CACHE_FILE).read_text())["files"]
    assert [entry["fingerprint"] for entry in files.values()] == [first]
    another_process()
    assert fingerprint_file(path, cache_dir=tmp_path) == first
    assert not opened.since()


def test_an_entry_counts_for_its_key_only(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    (tmp_path / CACHE_FILE).write_text(forged())
    assert fingerprint_file(path, cache_dir=tmp_path) != HEX
    assert len(json.loads((tmp_path / CACHE_FILE).read_text())["files"]) == 2


@pytest.mark.skipif(os.name != "posix", reason="symbolic links and pipes as POSIX has them")
def test_fault_46_a_link_or_a_pipe_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    path, outside = model(tmp_path / "m.gguf"), tmp_path / "outside"
    first = fingerprint_file(path)
    key = modelfile._identify([path])[0]
    for plant in (lambda at: at.symlink_to(outside), os.mkfifo):
        outside.write_text(forged(key))
        cache_dir = tmp_path / "cache"
        cache_dir.mkdir(exist_ok=True)
        (cache_dir / CACHE_FILE).unlink(missing_ok=True)
        plant(cache_dir / CACHE_FILE)
        another_process()
        assert fingerprint_file(path, cache_dir=cache_dir) == first
        assert outside.read_text() == forged(key)
        assert (cache_dir / CACHE_FILE).is_file()
        assert not (cache_dir / CACHE_FILE).is_symlink()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner here")
def test_what_someone_else_wrote_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "m.gguf")
    (tmp_path / CACHE_FILE).write_text(forged(modelfile._identify([path])[0]))
    assert fingerprint_file(path, cache_dir=tmp_path) == HEX  # ours, so far
    another_process()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert fingerprint_file(path, cache_dir=tmp_path) != HEX


def test_a_directory_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "m.gguf")
    plain = fingerprint_file(path)
    (tmp_path / "file").write_text("")
    another_process()
    assert fingerprint_file(path, cache_dir=tmp_path / "file" / "below") == plain

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    another_process()
    assert fingerprint_file(path, cache_dir=tmp_path / "cache") == plain
    assert list((tmp_path / "cache").iterdir()) == []  # no half of it is left


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelfile, "_MOST_FILES", 3)
    paths = [model(tmp_path / f"{index}.gguf", sizes=(1,)) for index in range(5)]
    for path in paths:
        fingerprint_file(path, cache_dir=tmp_path)
    assert len(modelfile._known) == 3
    kept = json.loads((tmp_path / CACHE_FILE).read_text())["files"]
    assert list(kept) == [modelfile._identify([path])[0] for path in paths[2:]]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    old, new = (tmp_path / f".fingerprints.json-{name}" for name in ("old", "new"))
    for file in (old, new):
        file.write_text("{")
    os.utime(old, (1.0, 1.0))
    modelfile._save(tmp_path, {})
    assert sorted(file.name for file in tmp_path.iterdir()) == [new.name, "fingerprints.json"]


def test_a_full_file_of_fingerprints_is_small_enough_to_be_read(tmp_path: Path) -> None:
    known = {f"{index:064x}": ModelFile(HEX, True) for index in range(modelfile._MOST_FILES)}
    modelfile._save(tmp_path, known)
    assert modelfile._load(tmp_path) == known
    assert (tmp_path / CACHE_FILE).stat().st_size < modelfile._MOST_CACHE_BYTES / 4


def test_threads_may_ask_at_once(tmp_path: Path) -> None:
    paths = [model(tmp_path / f"{index % 2}.gguf", seed=index % 2) for index in range(8)]
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = fingerprint_file(paths[index], cache_dir=tmp_path)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found.values())) == 2
    assert json.loads((tmp_path / CACHE_FILE).read_text())["files"]
