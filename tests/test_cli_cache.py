"""The commands over a disk cache: what they print, what they change, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from llamakeep.cli import app, mending, screen, transfer
from llamakeep.errors import KeeperClosed, ModelError, TokenError
from llamakeep.fingerprint import Namespace, fingerprint_file
from llamakeep.sizes import format_bytes
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.disk.files import Files
from llamakeep.tokens import IntArray, PathNames, Place

BLOCK = 16
NOW = 1_800_000_000.0
TINY = Namespace(
    "5" * 64, "0" * 64, BLOCK, "attention", context={"type_k": 1}, model_name="tiny.gguf"
)
TINY_Q8 = Namespace(
    "5" * 64, "0" * 64, BLOCK, "attention", context={"type_k": 8}, model_name="tiny.gguf"
)
OTHER = Namespace("6" * 64, "0" * 64, BLOCK, "attention", model_name="other.gguf")

LISTING = {
    "path": str,
    "used_bytes": int,
    "capacity_bytes": type(None),
    "n_prompts": int,
    "prompts": list,
}
PROMPT = {
    "id": str,
    "n_tokens": int,
    "own_bytes": int,
    "path_bytes": int,
    "checkpoints": list,
    "hits": int,
    "created": float,
    "last_used": float,
    "tier": str,
    "namespace": str,
    "model_name": str,
    "tokens_from": int,
    "first_tokens": list,
    "text": type(None),
}
STATS = {
    "path": str,
    "used_bytes": int,
    "capacity_bytes": type(None),
    "free_bytes": int,
    "writing_bytes": int,
    "n_blobs": int,
    "n_segments": int,
    "n_checkpoints": int,
    "n_snapshots": int,
    "n_opaque": int,
    "n_prompts": int,
    "namespaces": list,
    "differences": list,
}
NAMESPACE = {
    "namespace": str,
    "model_name": str,
    "model": str,
    "used_bytes": int,
    "n_prompts": int,
    "last_used": float,
}
DIFFERENCE = {"namespace": str, "other": str, "model_name": str, "reason": str, "parts": list}
CHECK = {
    "path": str,
    "ok": bool,
    "fixed": bool,
    "n_blobs": int,
    "used_bytes": int,
    "problems": dict,
    "left": dict,
    "files": dict,
}
TRIM = {
    "path": str,
    "max_bytes": int,
    "removed_blobs": int,
    "removed_bytes": int,
    "used_bytes": int,
    "capacity_bytes": type(None),
}
RM = {
    "path": str,
    "removed": list,
    "stay": list,
    "removed_blobs": int,
    "removed_bytes": int,
    "used_bytes": int,
    "capacity_bytes": type(None),
}
EXPORT = {"path": str, "file": str, "n_prompts": int, "n_blobs": int, "n_bytes": int}
IMPORT = {
    "path": str,
    "file": str,
    "n_blobs": int,
    "n_kept": int,
    "used_bytes": int,
    "capacity_bytes": int,
}


def has_shape(found: dict[str, Any], shape: dict[str, type]) -> bool:
    return {name: type(value) for name, value in found.items()} == shape


class Cache:
    """A small cache, and the commands over it."""

    def __init__(self, path: Path, secret: str | None = None) -> None:
        self.path = path
        self.secret = secret

    def keep(
        self,
        tokens: Sequence[int],
        namespace: Namespace = TINY,
        *,
        at: float = NOW,
        checkpoints: Sequence[int] = (),
        n_bytes: int = 5000,
        hits: int = 0,
    ) -> str:
        """Keep a prompt as a tree would, and return its id."""
        array: IntArray = np.asarray(tokens, np.int32)
        paths = PathNames(namespace.digest, array, BLOCK)
        places: list[Place] = [
            paths.segment(start, min(start + BLOCK, array.size))
            for start in range(0, array.size, BLOCK)
        ]
        last = places[-1].name
        places += [paths.checkpoint((p - 1) // BLOCK * BLOCK, p) for p in checkpoints]
        with DiskStore(
            self.path, 1 << 30, secret=self.secret, min_free_bytes=0, clock=lambda: at
        ) as store:
            store.introduce(namespace.digest, namespace.describe())
            for place in places:
                blob = np.full(n_bytes, place.end % 251, np.uint8)
                assert store.put(place.name, n_bytes, lambda blob=blob: blob, place)
            for _ in range(hits):
                store.touch([last])
        return last.hex()

    def run(self, *arguments: str, **options: Any) -> Result:
        """Run a command over the cache."""
        return CliRunner().invoke(app, [*arguments, "--cache-dir", str(self.path)], **options)

    def json(self, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
        """Return what a command prints with --json."""
        result = self.run(*arguments, "--json")
        assert (result.exit_code, result.stderr) == (exit_code, ""), result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def ids(self) -> list[str]:
        """Return the ids of all prompts."""
        return [prompt["id"] for prompt in self.json("ls")["prompts"]]

    def blobs(self) -> list[Path]:
        """Return the files of all states."""
        return sorted(self.path.glob("blobs/*/*"))

    def snapshot(self) -> dict[str, tuple[int, int, int, bytes]]:
        """Return all that could be changed, but for what SQLite has beside a database."""
        found = {}
        for path in (self.path, *sorted(self.path.rglob("*"))):
            if not path.name.endswith(("-shm", "-wal")):
                info = path.lstat()
                data = path.read_bytes() if path.is_file() else b""
                seen = 0 if path == self.path else info.st_mtime_ns
                found[str(path)] = (info.st_mode, info.st_ino, seen, data)
        return found


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE_DIR", "DISK_BYTES", "SECRET", "SALT", "REDIS_URL", "REDIS_PREFIX"):
        monkeypatch.delenv(f"LLAMAKEEP_{name}", raising=False)
    monkeypatch.setattr(screen, "now", lambda: NOW)


@pytest.fixture
def empty(tmp_path: Path) -> Cache:
    """A directory that is not there yet."""
    return Cache(tmp_path / "cache")


SHARED = list(range(100, 132))  # two blocks


@pytest.fixture
def cache(empty: Cache) -> Cache:
    """Three prompts of two namespaces of one model; the two of one share two blocks."""
    empty.keep([*SHARED, 1, 2, 3], at=NOW - 400_000, checkpoints=[8, 34], hits=2)
    empty.keep([*SHARED, *range(40)], at=NOW - 7300, n_bytes=9000)
    empty.keep([7, 8, 9], TINY_Q8, at=NOW - 90)
    return empty


# -- ls --------------------------------------------------------------------------------------------


def test_ls_lists_the_last_used_first(cache: Cache) -> None:
    found = cache.json("ls")
    assert has_shape(found, LISTING)
    assert found["n_prompts"] == 3
    first, second, third = found["prompts"]
    assert all(has_shape(prompt, PROMPT) for prompt in found["prompts"])
    assert [prompt["n_tokens"] for prompt in (first, second, third)] == [3, 72, 35]
    assert first["first_tokens"] == [7, 8, 9]
    assert third["first_tokens"] == SHARED[:16]
    assert third["checkpoints"] == [8, 34]
    assert (third["hits"], second["hits"]) == (2, 0)
    assert first["namespace"] == TINY_Q8.digest.hex()
    assert {prompt["tier"] for prompt in found["prompts"]} == {"disk"}
    # A page for a segment of 5000 bytes is two; what is shared is counted in both paths.
    assert third["path_bytes"] == 3 * 8192 + 2 * 8192
    assert third["own_bytes"] == 8192 + 8192
    assert second["own_bytes"] == 3 * 12288
    assert (
        found["used_bytes"] == sum(path.stat().st_size // 4096 + 1 for path in cache.blobs()) * 4096
    )


def test_ls_for_people(cache: Cache) -> None:
    result = cache.run("ls")
    titles, first, second, third, _, summary = result.stdout.splitlines()
    assert titles.split()[:6] == ["id", "tokens", "own", "all", "points", "hits"]
    assert titles.split()[6:] == ["used", "age", "tier", "namespace", "first", "tokens"]
    ids = [prompt["id"][:10] for prompt in cache.json("ls")["prompts"]]
    assert [line.split()[0] for line in (first, second, third)] == ids
    short = TINY.digest.hex()[:8]
    assert third.split()[6:12] == ["2", "2", "4d", "4d", "disk", short]
    assert third.endswith(f"{short}   {' '.join(map(str, SHARED[:16]))}")
    assert second.split()[6:11] == ["1", "0", "2h", "2h", "disk"]
    assert first.split()[6:10] == ["0", "0", "1m", "1m"]
    assert summary.startswith(f"3 prompts in {cache.path}, ")


def test_a_table_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal then
    monkeypatch.setenv("TERM", "xterm")
    rows = [("3f9a", "1,000", "灯台 " * 40), ("77b0", "20", "short")]
    monkeypatch.setenv("COLUMNS", "40")
    screen.show_table(("id", "tokens", "text"), rows, ("tokens",))
    bold, *lines = capsys.readouterr().out.splitlines()
    assert "id    tokens  text" in bold
    assert lines == ["3f9a   1,000  灯台 灯台 灯台 灯台 灯...", "77b0      20  short"]
    monkeypatch.setenv("COLUMNS", "25")
    screen.show_table(("id", "tokens", "text"), rows, ("tokens",))
    assert capsys.readouterr().out.splitlines()[2:] == [
        "3f9a   1,000",
        "    灯台 灯台 灯台 灯...",
        "77b0      20",
        "    short",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (7200, "2h"), (172_800, "2d")],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert screen.ago(seconds) == text


@pytest.mark.parametrize(
    ("sort", "n_tokens"),
    [("used", [3, 72, 35]), ("size", [72, 35, 3]), ("hits", [35, 3, 72]), ("age", [35, 72, 3])],
)
def test_ls_sorts(cache: Cache, sort: str, n_tokens: list[int]) -> None:
    found = cache.json("ls", "--sort", sort)["prompts"]
    assert [prompt["n_tokens"] for prompt in found] == n_tokens
    found = cache.json("ls", "--sort", sort, "--limit", "2")
    assert [prompt["n_tokens"] for prompt in found["prompts"]] == n_tokens[:2]
    assert found["n_prompts"] == 3


def test_ls_of_one_namespace(cache: Cache) -> None:
    for digits in (8, 64):
        prefix = TINY_Q8.digest.hex()[:digits]
        found = cache.json("ls", "--namespace", prefix)["prompts"]
        assert [prompt["n_tokens"] for prompt in found] == [3]
    result = cache.run("ls", "--namespace", "xyz")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "xyz" in result.stderr
    assert "1 of 3 prompts" in cache.run("ls", "--limit", "1").stdout


def test_the_environment_says_where(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAKEEP_CACHE_DIR", str(cache.path))
    assert json.loads(CliRunner().invoke(app, ["ls", "--json"]).stdout)["n_prompts"] == 3
    monkeypatch.setenv("LLAMAKEEP_DISK_BYTES", "20MiB")
    before = cache.snapshot()
    for command in ("ls", "stats"):
        found = json.loads(CliRunner().invoke(app, [command, "--json"]).stdout)
        assert found["capacity_bytes"] == 20 << 20
        assert " of 20.0 MiB" in CliRunner().invoke(app, [command]).stdout
    monkeypatch.setenv("LLAMAKEEP_DISK_BYTES", "1")  # nothing goes because somebody looks
    assert CliRunner().invoke(app, ["stats"]).exit_code == 0
    assert cache.snapshot() == before
    monkeypatch.setenv("LLAMAKEEP_DISK_BYTES", "a lot")
    result = CliRunner().invoke(app, ["ls"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "LLAMAKEEP_DISK_BYTES" in result.stderr


def test_without_a_directory_it_is_that_of_the_user(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def user_cache_path(*names: str, **options: object) -> Path:
        asked.append((names, options))
        return cache.path

    monkeypatch.setattr("llamakeep.cli.opening.user_cache_path", user_cache_path)
    assert json.loads(CliRunner().invoke(app, ["ls", "--json"]).stdout)["n_prompts"] == 3
    assert asked == [(("llamakeep",), {"appauthor": False})]
    result = CliRunner().invoke(app, ["ls", "--cache-dir", ""])
    assert (result.exit_code, result.stderr) == (2, "llamakeep: --cache-dir is empty\n")


def test_no_limit_is_shown_that_nobody_said(cache: Cache) -> None:
    used = format_bytes(cache.json("ls")["used_bytes"])
    assert cache.run("ls").stdout.endswith(f"3 prompts in {cache.path}, {used}\n")
    assert f"used        {used}\n" in cache.run("stats").stdout
    for command in (["ls"], ["stats"], ["trim", "--max-bytes", "1GiB"], ["rm", cache.ids()[0]]):
        assert cache.json(*command)["capacity_bytes"] is None


# -- text ------------------------------------------------------------------------------------------


@pytest.fixture
def attention(tiny_model: Callable[[str], Path]) -> Path:
    """The tiny attention model's file."""
    return tiny_model("attention")


def test_a_vocabulary_reads_tokens(attention: Path, make_llama: Callable[..., Any]) -> None:
    from llamakeep.runtime.llama_text import load_vocab

    text = "The lighthouse burned whale oil: 1871, naïve, 灯台, 🐋!\n" * 4
    llm = make_llama(attention)
    tokens = llm.tokenize(text.encode(), add_bos=False, special=False)
    with load_vocab(attention) as vocabulary:
        assert vocabulary.n_vocab == llm.n_vocab()
        assert vocabulary.text(tokens) == text
        assert vocabulary.text(np.asarray(tokens)) == text
        assert vocabulary.text([]) == ""
        for n in range(len(tokens)):
            assert text.startswith(vocabulary.text(tokens[:n]))  # no half letters
        for bad in ([-1], [vocabulary.n_vocab]):
            with pytest.raises(TokenError):
                vocabulary.text(bad)
    vocabulary.close()
    with pytest.raises(KeeperClosed):
        vocabulary.text(tokens)


@pytest.mark.parametrize("content", [None, b"no model", b"GGUF and then nothing"])
def test_a_vocabulary_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    pytest.importorskip("llama_cpp")
    from llamakeep.runtime.llama_text import load_vocab

    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load_vocab(path)


def test_ls_shows_words(
    cache: Cache, attention: Path, make_llama: Callable[..., Any], empty: Cache
) -> None:
    namespace = Namespace(fingerprint_file(attention), "0" * 64, BLOCK, model_name="attention")
    text = "Sail on\x1b[2J, o ship\nof state! " * 3
    cache.keep(make_llama(attention).tokenize(text.encode(), add_bos=False), namespace)
    found = cache.json("ls", "--model", str(attention))["prompts"]
    assert [prompt["text"] for prompt in found] == [text, None, None, None]
    result = cache.run("ls", "--model", str(attention))
    assert "Sail on\\x1b[2J, o ship\\nof state! " in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    # Only where the namespace says that it is this model; and it may say what is not so.
    cache.run("rm", found[0]["id"])
    result = cache.run("ls", "--model", str(attention))
    assert "7 8 9\n" in result.stdout
    assert result.stderr == f"llamakeep: none of these prompts is of {attention}\n"
    cache.keep([2_000_000_000] * 20, namespace)
    assert [prompt["text"] for prompt in cache.json("ls")["prompts"]] == [None] * 4


@pytest.mark.model
def test_ls_of_what_a_keeper_kept(empty: Cache, tiny_llama: Callable[..., Any]) -> None:
    import llamakeep

    llm = tiny_llama("hybrid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMAKEEP_CACHE_DIR", str(empty.path))
        keeper = llamakeep.attach(llm)
        llm("Once upon a time there was a keeper of a light. " * 8, max_tokens=2)
        assert keeper.flush(30)
        keeper.detach()
    found = empty.json("ls", "--model", llm.model_path)
    assert any("Once upon a time" in prompt["text"] for prompt in found["prompts"])
    assert found["prompts"][0]["model_name"] == Path(llm.model_path).name
    assert found["prompts"][0]["checkpoints"]
    stats = empty.json("stats")
    assert stats["n_checkpoints"] > 0
    assert stats["namespaces"][0]["model"] == fingerprint_file(llm.model_path)
    assert empty.json("check")["ok"]


# -- stats -----------------------------------------------------------------------------------------


def test_stats(cache: Cache) -> None:
    cache.keep([1, 2], OTHER, at=NOW - 80)
    found = cache.json("stats")
    assert has_shape(found, STATS)
    assert (found["n_blobs"], found["n_prompts"]) == (10, 4)
    assert (found["n_segments"], found["n_checkpoints"], found["n_opaque"]) == (8, 2, 0)
    assert all(has_shape(each, NAMESPACE) for each in found["namespaces"])
    names = [each["namespace"] for each in found["namespaces"]]
    assert names == [each.digest.hex() for each in (OTHER, TINY_Q8, TINY)]
    assert [each["n_prompts"] for each in found["namespaces"]] == [1, 1, 2]
    assert sum(each["used_bytes"] for each in found["namespaces"]) == found["used_bytes"]
    (difference,) = found["differences"]
    assert has_shape(difference, DIFFERENCE)
    assert difference["parts"] == [{"part": "context.type_k", "ours": 8, "theirs": 1}]
    result = cache.run("stats")
    assert "10 (8 segments, 2 checkpoints, 0 snapshots, 0 others)" in result.stdout
    assert "other.gguf\n" in result.stdout
    assert (
        f"{TINY_Q8.digest.hex()[:8]} cannot use what {TINY.digest.hex()[:8]} has: "
        "kept with context.type_k=1, now 8\n"
    ) in result.stdout


def test_stats_of_strange_descriptions(cache: Cache) -> None:
    name = bytes(32)
    with DiskStore(cache.path, min_free_bytes=0) as store:
        store.introduce(name, {"model": "5" * 64, "model_name": "\x1b[2J\u202ehidden"})
        store.introduce(b"1" * 32, {"model": ["no", "text"], "model_name": {}})
    assert "\x1b" not in cache.run("stats").stdout
    by_name = {each["namespace"]: each for each in cache.json("stats")["namespaces"]}
    assert by_name[(b"1" * 32).hex()] == {
        "namespace": (b"1" * 32).hex(),
        "model_name": None,
        "model": None,
        "used_bytes": 0,
        "n_prompts": 0,
        "last_used": None,
    }


# -- looking changes nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "stats", "check", "check --no-verify"])
def test_looking_changes_nothing(cache: Cache, command: str) -> None:
    (cache.path / "tmp" / "1-2-3.part").write_bytes(b"left behind")
    cache.blobs()[0].write_bytes(b"damaged")
    (cache.path / "fingerprints.json").write_text("{}")
    before = cache.snapshot()
    cache.run(*command.split())
    cache.run(*command.split(), "--json")
    assert cache.snapshot() == before


@pytest.mark.parametrize("made", [False, True])
def test_where_nothing_is_yet(empty: Cache, made: bool) -> None:
    if made:
        empty.path.mkdir()
    for command in ("ls", "stats"):
        result = empty.run(command)
        assert result.exit_code == 0
        assert f"Nothing is kept in {empty.path} yet" in result.stdout
        assert f"llamakeep.attach(llm, cache_dir={str(empty.path)!r})" in result.stdout
    listing, stats = empty.json("ls"), empty.json("stats")
    assert (listing["prompts"], listing["used_bytes"], listing["n_prompts"]) == ([], 0, 0)
    assert list(listing) == list(LISTING)
    assert list(stats) == list(STATS)
    assert {stats[name] for name in ("used_bytes", "n_blobs", "n_prompts")} == {0}
    assert stats["namespaces"] == []
    for command in (
        "check",
        "check --fix",
        "trim --max-bytes 1GiB",
        "rm --all --yes",
        "rm abc",
        f"export {empty.path.parent / 'x'}",
    ):
        result = empty.run(*command.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"llamakeep: {empty.path} holds no cache: nothing was kept there\n"
    assert empty.path.exists() == made
    assert not made or not any(empty.path.iterdir())
    assert not (empty.path.parent / "x").exists()


@pytest.mark.parametrize(
    "command",
    ["ls", "stats", "check", "check --fix", "trim --max-bytes 1", "rm --all -y", "export -"],
)
def test_a_directory_of_other_things_is_refused(tmp_path: Path, command: str) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    other = Cache(tmp_path)
    before = other.snapshot()
    result = other.run(*command.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"{tmp_path} is not a cache of llamakeep: it holds 'thesis.tex'" in result.stderr
    assert other.snapshot() == before
    result = Cache(tmp_path / "thesis.tex").run(*command.split())
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is not a directory" in result.stderr


def test_a_cache_of_a_newer_version_is_refused(cache: Cache) -> None:
    (cache.path / "FORMAT").write_text("llamakeep states, version 99\n")
    for command in ("ls", "check --fix"):
        result = cache.run(*command.split())
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "99" in result.stderr


# -- check -----------------------------------------------------------------------------------------


def test_check_of_a_sound_cache(cache: Cache) -> None:
    found = cache.json("check")
    assert has_shape(found, CHECK)
    assert (found["ok"], found["fixed"], found["problems"], found["left"]) == (True, False, {}, {})
    assert found["n_blobs"] == 9
    assert cache.run("check").stdout.startswith("All is well: 9 states in ")
    assert cache.run("check", "--fix").stdout.startswith("All is well: 9 states in ")


def test_check_finds_and_mends(cache: Cache) -> None:
    corrupt, gone, short, *_ = cache.blobs()
    data = bytearray(corrupt.read_bytes())
    data[-1] ^= 1
    corrupt.write_bytes(data)
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-10])
    (short.parent / "notes.txt").write_text("none of yours")
    (cache.path / "tmp" / "1-2-3.part").write_bytes(b"left behind")
    problems = {"corrupt": 1, "missing": 1, "truncated": 1, "foreign": 1, "leftovers": 1}
    found = cache.json("check", exit_code=1)
    assert (found["ok"], found["problems"]) == (False, problems)
    assert found["files"] == {
        "corrupt": [corrupt.relative_to(cache.path).as_posix()],
        "foreign": [(short.parent / "notes.txt").relative_to(cache.path).as_posix()],
        "leftovers": ["tmp/1-2-3.part"],
        "missing": [gone.relative_to(cache.path).as_posix()],
        "truncated": [short.relative_to(cache.path).as_posix()],
    }
    fast = cache.json("check", "--no-verify", exit_code=1)
    assert fast["problems"] == {kind: 1 for kind in problems if kind != "corrupt"}
    result = cache.run("check")
    assert result.exit_code == 1
    name = short.relative_to(cache.path).as_posix()
    assert f"1  files that end early\n          {name}\n" in result.stdout
    assert "llamakeep check --fix" in result.stdout
    mended = cache.json("check", "--fix")
    assert (mended["ok"], mended["fixed"], mended["problems"]) == (True, True, problems)
    assert mended["n_blobs"] == 6
    assert cache.json("check")["problems"] == {}


def test_check_names_so_many_files_and_no_more(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(25):
        (cache.path / "tmp" / f"{n}\x1b[2J").write_bytes(b"")
    assert len(cache.json("check", exit_code=1)["files"]["foreign"]) == 25
    lines = cache.run("check").stdout.splitlines()
    assert lines[0] == "      25  files that are no states"
    assert all(line.startswith("          tmp/") for line in lines[1:21])
    assert lines[21] == "          and 5 more"
    assert "\x1b" not in "".join(lines)
    monkeypatch.setattr("llamakeep.stores.disk.audit._MOST_NAMED", 7)
    found = cache.json("check", "--fix")
    assert (found["problems"], len(found["files"]["foreign"])) == ({"foreign": 25}, 7)


@pytest.mark.parametrize("damage", ["missing", "cut", "none"])
def test_a_damaged_index(cache: Cache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    index = cache.path / "index.sqlite3"
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes(b"" if damage == "cut" else b"none of SQLite's " * 1000)
    for side in ("-wal", "-shm"):
        index.with_name(index.name + side).unlink(missing_ok=True)
    result = cache.run("ls")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "llamakeep check --fix" in result.stderr
    assert cache.json("check", exit_code=1)["problems"] == {"index": 1}
    mended = cache.json("check", "--fix")
    assert (mended["ok"], mended["problems"], mended["n_blobs"]) == (True, {"index": 1}, 9)
    assert cache.json("check")["problems"] == {}
    assert len(cache.ids()) == 3


def test_what_a_secret_sealed(empty: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    empty.secret = "hush"
    empty.keep([1, 2, 3])
    named = {"secret": [path.relative_to(empty.path).as_posix() for path in empty.blobs()]}
    for wrong in ("", "other"):
        monkeypatch.setenv("LLAMAKEEP_SECRET", wrong)
        for options in ([], ["--fix"], ["--no-verify"]):
            found = empty.json("check", *options, exit_code=1)
            assert (found["ok"], found["left"]) == (False, {"secret": 1})
            assert (found["problems"], found["files"]) == ({}, named)
        result = empty.run("check")
        assert result.exit_code == 1
        assert "All is well" not in result.stdout
        assert "1 file could not be verified" in result.stdout
        assert "LLAMAKEEP_SECRET" in result.stdout
    monkeypatch.setenv("LLAMAKEEP_SECRET", "hush")
    found = empty.json("check")
    assert (found["ok"], found["left"], found["files"]) == (True, {}, {})
    assert empty.run("check").stdout.startswith("All is well: 1 states in ")
    empty.secret = None
    empty.keep([4, 5, 6])  # with none
    assert empty.json("check", exit_code=1)["left"] == {"secret": 1}
    for command in ("check", "export", "import"):
        help_text = empty.run(command, "--help").stdout
        assert "LLAMAKEEP_SECRET" in help_text
        assert "--secret" not in help_text


# -- progress --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_to_people_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with screen.Bar("Checking") as bar:
        bar.update(1, 10)
    assert terminal.getvalue() == ""  # nobody waited
    monkeypatch.setattr(screen, "_SLOW_SECONDS", 0.0)
    with screen.Bar("Checking", hidden=True) as bar:
        bar.update(1, 10)
    assert terminal.getvalue() == ""
    with screen.Bar("Checking") as bar:
        bar.update(1, 10)
        bar.update(5, 10)
    assert "Checking" in terminal.getvalue()
    assert "50%" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with screen.Bar("Checking") as bar:
        bar.update(1, 10)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_what_takes_long_says_how_far_it_is(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown: list[tuple[str, int, int]] = []

    class Bar(screen.Bar):
        def __init__(self, title: str, *, hidden: bool = False) -> None:
            super().__init__(title, hidden=hidden)
            self.title = title

        def update(self, done: int, total: int) -> None:
            shown.append((self.title, done, total))

    monkeypatch.setattr(screen, "Bar", Bar)
    for command, steps in (
        (["check"], 9),
        (["check", "--fix"], 9),
        (["export", str(tmp_path / "x")], 9),
        (["import", str(tmp_path / "x")], 18),
    ):
        shown.clear()
        assert cache.run(*command).exit_code == 0
        assert [done for _, done, _ in shown] == list(range(1, steps + 1))
        assert {total for *_, total in shown} == {steps}


# -- trim and rm -----------------------------------------------------------------------------------


def test_trim(cache: Cache) -> None:
    before = cache.json("stats")["used_bytes"]
    found = cache.json("trim", "--max-bytes", "1GiB")
    assert has_shape(found, TRIM)
    assert (found["removed_blobs"], found["removed_bytes"], found["used_bytes"]) == (0, 0, before)
    found = cache.json("trim", "--max-bytes", "64KiB")
    assert found["max_bytes"] == 64 << 10
    assert 0 < found["used_bytes"] <= 64 << 10
    assert found["removed_bytes"] == before - found["used_bytes"]
    assert [prompt["n_tokens"] for prompt in cache.json("ls")["prompts"]][:1] == [3]
    result = cache.run("trim", "--max-bytes", "0")
    assert result.exit_code == 0
    assert "In use: 0 B." in result.stdout
    assert cache.json("check")["ok"]


def test_trim_says_what_cannot_go(cache: Cache) -> None:
    with DiskStore(cache.path, min_free_bytes=0) as store:
        assert store.put(b"o" * 32, 100, lambda: np.zeros(100, np.uint8))
    found = cache.json("trim", "--max-bytes", "0", exit_code=1)
    assert found["used_bytes"] == 4096
    assert cache.run("trim", "--max-bytes", "0").exit_code == 1


@pytest.mark.parametrize("size", ["8GB", "-1", "much"])
def test_trim_refuses_what_is_no_size(cache: Cache, size: str) -> None:
    result = cache.run("trim", "--max-bytes", size)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "512MiB" in result.stderr
    assert cache.run("trim").exit_code == 2


def test_rm_drops_a_prompt_and_not_what_others_share(cache: Cache) -> None:
    by_length = {prompt["n_tokens"]: prompt for prompt in cache.json("ls")["prompts"]}
    found = cache.json("rm", by_length[35]["id"][:9])
    assert has_shape(found, RM)
    assert found["removed"] == [by_length[35]["id"]]
    assert found["removed_bytes"] == by_length[35]["own_bytes"]
    assert [prompt["n_tokens"] for prompt in cache.json("ls")["prompts"]] == [3, 72]
    result = cache.run("rm", by_length[72]["id"], by_length[3]["id"].upper(), by_length[3]["id"])
    assert result.stdout.startswith("Dropped 2 prompts, ")
    assert cache.ids() == []
    assert cache.json("check")["ok"]


def test_rm_of_what_another_prompt_needs(empty: Cache) -> None:
    first = empty.keep([*range(12)])
    empty.keep([*range(12)], checkpoints=[12])
    paths = PathNames(TINY.digest, np.asarray([*range(8), 99, 98], np.int32), BLOCK)
    place = paths.segment(8, 10)
    with DiskStore(empty.path, min_free_bytes=0) as store:
        assert store.put(place.name, 10, lambda: np.zeros(10, np.uint8), place)
    second = place.name.hex()
    found = empty.json("rm", first, exit_code=1)
    assert (found["removed"], found["stay"]) == ([], [first])
    result = empty.run("rm", first)
    assert result.exit_code == 1
    assert f"{first[:10]} stays: its states are part of another prompt" in result.stdout
    found = empty.json("rm", first, second)  # whatever the order
    assert (found["removed"], found["stay"]) == ([first, second], [])
    assert empty.ids() == []


def test_rm_of_what_is_not_clear_drops_nothing(cache: Cache) -> None:
    for n in range(20):
        cache.keep([n, n + 1], OTHER)
    ids = cache.ids()
    firsts = [each[0] for each in ids]
    twice = next(first for first in firsts if firsts.count(first) > 1)
    before = cache.snapshot()
    for wrong in ([twice], ["zz"], [ids[0], "zz"], [""], ["%"], []):
        result = cache.run("rm", *wrong)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    result = cache.run("rm", "--all", "--yes", ids[0])
    assert (result.exit_code, "what to drop" in result.stderr) == (2, True)
    assert cache.ids() == ids
    assert cache.snapshot() == before


def test_an_empty_name_is_said_to_be_empty(cache: Cache, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.touch()
    for command, problem in (
        (["rm", ""], "an id is empty"),
        (["export", "x", " "], "an id is empty"),
        (["export", ""], "the file has an empty name"),
        (["export", "--force", ""], "the file has an empty name"),
        (["import", ""], "the file has an empty name"),
        (["import", str(nothing)], f"{nothing}: is empty; nothing was imported"),
    ):
        result = cache.run(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"llamakeep: {problem}")
        assert result.stderr.count("\n") == 1
    assert len(cache.ids()) == 3


def test_rm_of_a_namespace(cache: Cache) -> None:
    found = cache.json("rm", "--namespace", TINY.digest.hex()[:6])
    assert len(found["removed"]) == 2
    assert found["removed_blobs"] == 8
    assert [prompt["n_tokens"] for prompt in cache.json("ls")["prompts"]] == [3]
    names = [each["namespace"] for each in cache.json("stats")["namespaces"]]
    assert names == [TINY_Q8.digest.hex()]
    assert cache.run("rm", "--namespace", TINY.digest.hex()[:6]).exit_code == 2


def test_rm_of_everything_asks(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cache.run("rm", "--all")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--yes" in result.stderr
    monkeypatch.setattr(mending, "can_ask", lambda: True)
    result = cache.run("rm", "--all", input="n\n")
    assert result.exit_code == 1
    assert "3 prompts" in result.stderr
    assert "Nothing was dropped." in result.stderr
    assert len(cache.ids()) == 3
    result = cache.run("rm", "--all", input="y\n")
    assert result.exit_code == 0
    assert "Dropped 3 prompts, " in result.stdout
    assert cache.ids() == []
    cache.keep([1, 2, 3])
    assert len(cache.json("rm", "--all", "--yes")["removed"]) == 1
    assert cache.json("check")["n_blobs"] == 0


def test_what_can_only_be_read_is_not_changed(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "writable", lambda *_: False)
    before = cache.snapshot()
    for command in ("rm --all --yes", "trim --max-bytes 0", "check --fix"):
        result = cache.run(*command.split())
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert f"{cache.path} can only be read" in result.stderr
    assert cache.snapshot() == before


def test_what_a_store_only_counts_is_said(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(store: DiskStore, max_bytes: int) -> int:
        store.counters["errors_index"] = 1
        return 0

    monkeypatch.setattr(DiskStore, "trim", fails)
    monkeypatch.setattr(DiskStore, "counters", {}, raising=False)
    result = cache.run("trim", "--max-bytes", "1")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "errors_index: 1" in result.stderr


# -- export and import -----------------------------------------------------------------------------


def test_export_and_import(cache: Cache, tmp_path: Path) -> None:
    file, other = tmp_path / "x.llamakeep", Cache(tmp_path / "other")
    before = cache.snapshot()
    found = cache.json("export", str(file))
    assert has_shape(found, EXPORT)
    assert (found["n_prompts"], found["n_blobs"]) == (3, 9)
    assert found["n_bytes"] == file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cache.snapshot() == before
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "x.llamakeep"}
    found = other.json("import", str(file))
    assert has_shape(found, IMPORT)
    assert (found["n_blobs"], found["n_kept"]) == (9, 9)
    assert set(other.ids()) == set(cache.ids())
    assert found["used_bytes"] == cache.json("ls")["used_bytes"]
    assert [path.name for path in other.blobs()] == [path.name for path in cache.blobs()]
    assert other.json("stats")["namespaces"][0]["model_name"] == "tiny.gguf"
    assert other.json("check")["ok"]
    assert "Imported 9 of 9 states" in other.run("import", str(file)).stdout


def test_export_of_some(cache: Cache, tmp_path: Path) -> None:
    file, other = tmp_path / "x", Cache(tmp_path / "other")
    by_length = {prompt["n_tokens"]: prompt["id"] for prompt in cache.json("ls")["prompts"]}
    found = cache.json("export", str(file), by_length[35][:8], by_length[35])
    assert (found["n_prompts"], found["n_blobs"]) == (1, 5)
    other.run("import", str(file))
    assert other.ids() == [by_length[35]]
    for wrong in ("zz", ""):
        result = cache.run("export", str(tmp_path / "y"), by_length[35], wrong)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "y").exists()


def test_export_replaces_only_when_told_to(cache: Cache, tmp_path: Path) -> None:
    file, link = tmp_path / "x", tmp_path / "link"
    file.write_text("precious")
    link.symlink_to(file)
    for target in (file, link, tmp_path):
        result = cache.run("export", str(target))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert str(target) in result.stderr
    assert file.read_text() == "precious"
    assert cache.run("export", "--force", str(link)).exit_code == 0
    assert file.read_text() == "precious"  # the link was replaced, not followed
    assert not link.is_symlink()
    file.chmod(0o644)
    assert cache.run("export", "-f", str(file)).exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cache.run("export", "-f", str(tmp_path)).exit_code == 2
    result = cache.run("export", str(tmp_path / "no" / "x"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert str(tmp_path / "no") in result.stderr


def test_export_says_what_it_left_out(cache: Cache, tmp_path: Path) -> None:
    cache.blobs()[0].write_bytes(b"damaged")
    result = cache.run("export", str(tmp_path / "x"))
    assert result.exit_code == 1
    assert "1 states could not be read" in result.stderr
    assert "llamakeep check" in result.stderr


def test_export_of_what_is_sealed(
    empty: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty.secret = "hush"
    id_ = empty.keep([1, 2, 3])
    file, other = tmp_path / "x", Cache(tmp_path / "other")
    monkeypatch.setenv("LLAMAKEEP_SECRET", "hush")
    assert empty.json("export", str(file))["n_blobs"] == 1
    for wrong in ("", "other"):
        monkeypatch.setenv("LLAMAKEEP_SECRET", wrong)
        result = other.run("import", str(file))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "LLAMAKEEP_SECRET" in result.stderr
    assert other.ids() == []
    monkeypatch.setenv("LLAMAKEEP_SECRET", "hush")
    assert other.json("import", str(file))["n_kept"] == 1
    assert other.ids() == [id_]


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_no_empty_export_without_the_secret(
    empty: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool, as_json: bool
) -> None:
    empty.secret = "hush" if sealed else None
    empty.keep([1, 2, 3])
    (tmp_path / "old").write_text("an older backup")
    options = ["--json"] if as_json else []
    for wrong in ("", "other") if sealed else ("hush",):
        monkeypatch.setenv("LLAMAKEEP_SECRET", wrong)
        for target in ("x", "old"):
            result = empty.run("export", "--force", str(tmp_path / target), *options)
            assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
            assert "LLAMAKEEP_SECRET" in result.stderr
            assert "nothing was exported" in result.stderr
        result = empty.run("export", "-")
        assert (result.exit_code, result.stdout) == (2, "")
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "old"}
    assert (tmp_path / "old").read_text() == "an older backup"


def test_an_export_of_what_only_some_of_is_readable(empty: Cache, tmp_path: Path) -> None:
    empty.keep([1, 2, 3])
    empty.secret = "hush"
    empty.keep([4, 5, 6])
    done = subprocess.run(
        [*LLAMAKEEP, "export", str(tmp_path / "x"), "--cache-dir", str(empty.path)],
        env=os.environ | {"LLAMAKEEP_SECRET": "hush"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 sealed with another secret, or with none (see LLAMAKEEP_SECRET)" in done.stderr
    assert "1 states could not be read and were left out" in done.stderr
    assert (tmp_path / "x").exists()


def test_an_export_of_what_is_all_damaged(cache: Cache, tmp_path: Path) -> None:
    for blob in cache.blobs():
        blob.write_bytes(blob.read_bytes()[:-1])
    result = cache.run("export", str(tmp_path / "x"))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "9 truncated" in result.stderr
    assert "SECRET" not in result.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["head", "middle", "end", "more", "empty", "other"])
def test_a_damaged_file_is_not_imported(cache: Cache, tmp_path: Path, damage: str) -> None:
    file, other = tmp_path / "x", Cache(tmp_path / "other")
    cache.run("export", str(file))
    data = bytearray(file.read_bytes())
    if damage in ("head", "middle"):
        data[20 if damage == "head" else len(data) // 2] ^= 1
    elif damage == "end":
        del data[-100:]
    elif damage == "more":
        data += b"more"
    else:
        data = bytearray(b"" if damage == "empty" else b"GGUF" * 100)
    file.write_bytes(data)
    result = other.run("import", str(file))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert str(file) in result.stderr
    assert "nothing was imported" in result.stderr
    assert (other.blobs(), other.ids()) == ([], [])


def test_import_keeps_to_the_limit(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "x", Cache(tmp_path / "other")
    cache.run("export", str(file))
    monkeypatch.setenv("LLAMAKEEP_DISK_BYTES", "20KiB")
    found = other.json("import", str(file), exit_code=1)
    assert found["n_kept"] < found["n_blobs"] == 9
    assert found["used_bytes"] <= found["capacity_bytes"] == 20 << 10
    assert 0 < found["n_kept"] == other.json("stats")["n_blobs"]
    result = other.run("import", str(file))
    assert result.exit_code == 1
    assert f"Imported {other.json('stats')['n_blobs']} of 9 states" in result.stdout


def test_import_of_a_file_that_is_not_there(empty: Cache, tmp_path: Path) -> None:
    for file in (tmp_path / "nothing", tmp_path):
        result = empty.run("import", str(file))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert str(file) in result.stderr
    assert not empty.path.exists()


def test_a_terminal_gets_no_prompts(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "is_terminal", lambda _stream: True)
    for command in (["export", "-"], ["import", "-"]):
        result = cache.run(*command)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "terminal" in result.stderr
    result = cache.run("export", "-", "--json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


# -- as a program ----------------------------------------------------------------------------------

LLAMAKEEP = [sys.executable, "-W", "error", "-m", "llamakeep"]


def test_from_one_machine_to_another(cache: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path / "other")
    export = [*LLAMAKEEP, "export", "-", "--cache-dir", str(cache.path)]
    packed = subprocess.run(export, capture_output=True, check=True)
    assert packed.stderr.startswith(b"Exported 3 prompts: 9 states, ")
    unpack = [*LLAMAKEEP, "import", "-", "--cache-dir", str(other.path), "--json"]
    done = subprocess.run(unpack, input=packed.stdout, capture_output=True, check=True)
    assert json.loads(done.stdout)["n_kept"] == 9
    assert set(other.ids()) == set(cache.ids())
    cut = subprocess.run(
        [*LLAMAKEEP, "import", "-", "--cache-dir", str(tmp_path / "third")],
        input=packed.stdout[:-5],
        capture_output=True,
        check=False,
    )
    assert (cut.returncode, cut.stdout, cut.stderr.count(b"\n")) == (2, b"", 1)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are others there")
def test_head_is_quiet(cache: Cache) -> None:
    for n in range(30):
        cache.keep(list(range(n, n + 5)), OTHER)
    with subprocess.Popen(
        [*LLAMAKEEP, "ls", "--json", "--cache-dir", str(cache.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["ls", "export -"])
def test_output_that_cannot_be_written(cache: Cache, command: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*LLAMAKEEP, *command.split(), "--cache-dir", str(cache.path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("llamakeep: cannot write the output: ")


def test_llama_cpp_is_not_needed(cache: Cache, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['llama_cpp'] = None\n"
        "from llamakeep.cli import app\n"
        "for command in sys.argv[1:]:\n"
        "    assert not app(command.split(), standalone_mode=False), command\n"
    )
    commands = (
        "ls",
        "stats --json",
        "check --fix",
        f"export {tmp_path}/x",
        f"import {tmp_path}/x",
        "trim --max-bytes 40KiB",
        "rm --all --yes",
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *commands],
        env=os.environ | {"LLAMAKEEP_CACHE_DIR": str(cache.path)},
        capture_output=True,
        check=True,
    )
    assert cache.ids() == []
