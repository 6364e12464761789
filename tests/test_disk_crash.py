"""The disk store when processes are killed, and when several use one directory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llamakeep.states import Block
from llamakeep.stores.disk import DiskStore
from tests.disk_tools import (
    Unflushed,
    blocks,
    content,
    du,
    files_below,
    is_right,
    pages,
    path,
    put,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill")

N_KILLS = 200
ROOT = Path(__file__).parents[1]


def run(arguments: list[str], timeout: float) -> None:
    """Run one of the programs below in a process without threads, from which it may fork."""
    command = [sys.executable, "-W", "error", "-m", "tests.test_disk_crash", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, timeout=timeout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def open_store(where: Path, n_pages: int) -> DiskStore:
    return DiskStore(where, pages(n_pages), min_free_bytes=0)


def is_found(store: DiskStore, name: bytes) -> bool:
    """Return whether a state is found by its tokens."""
    place = store._shelf.peek(name).place
    assert place is not None
    found = store.find([Block(place.block, place.origin, place.tokens)])
    return name in {record.name for record in found}


# -- kill -9 ---------------------------------------------------------------------------------------


def test_nothing_that_was_saved_is_lost_when_a_process_is_killed(tmp_path: Path) -> None:
    """200 processes are killed in the middle of their saves."""
    run(["kill", str(tmp_path / "cache"), str(N_KILLS)], timeout=300)


def save_until_killed(where: Path, seed: int, pipe: int) -> None:
    """Save prompts, and tell the name of each state whose `put` has returned True."""
    draw = random.Random(seed)
    store = open_store(where, 100_000)
    os.write(pipe, b"open" + bytes(32))
    for round_number in range(1_000):
        tokens = [seed, round_number, *range(draw.randrange(2, 12))]
        names = path(tokens)
        for start in range(0, len(tokens), 4):
            place = names.segment(start, min(start + 4, len(tokens)))
            n_bytes = draw.choice([100, 5_000, 200_000])
            if put(store, place, n_bytes):
                os.write(pipe, b"kept" + place.name)
        if draw.random() < 0.3:
            store.touch([place.name])
        if draw.random() < 0.1:
            os.write(pipe, b"gone" + place.name)
            store.delete(place.name)


def kill_many(where: Path, n_kills: int) -> None:
    """Kill children while they save, and compare each time what they said with what is there."""
    draw = random.Random(4)
    died_while: Counter[str] = Counter()
    kept: set[bytes] = set()
    for number in range(n_kills):
        new: list[bytes] = []
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            try:
                save_until_killed(where, number, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            words = pipe.read(36 * draw.randrange(1, 8))  # it has opened the directory, and more
            assert words[:4] == b"open", words
            time.sleep(draw.uniform(0, 0.008))  # when it is killed is of no matter to what holds
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), status
            words += pipe.read()
        for at in range(36, len(words), 36):
            word, name = words[at : at + 4], words[at + 4 : at + 36]
            (kept.add if word == b"kept" else kept.discard)(name)
            if word == b"kept":
                new.append(name)
        died_while["writing"] += bool(list((where / "tmp").iterdir()))
        with open_store(where, 100_000) as store:
            died_while["publishing"] += store.counters.get("adopted", 0)
            assert not list((where / "tmp").iterdir())
            assert store.used_bytes >= du(where)  # what is there is counted
            for name in new:
                if name in kept:
                    assert is_right(store, name), name.hex()
                    assert is_found(store, name), name.hex()
            held = set(store)
            assert held.issuperset(kept & set(new))
            if number % 20 == 19:
                store.check(fix=True)
                store.check()
                assert store.used_bytes == du(where)
                for name in draw.sample(sorted(kept), 20):
                    assert is_right(store, name), name.hex()
    with open_store(where, 100_000) as store:
        assert all(is_right(store, name) and is_found(store, name) for name in kept)
        for name in store:
            assert is_right(store, name)
        store.check(fix=True)
        store.check()
        assert not [kind for kind in store.counters if kind.startswith("rejected_")]
        assert store.used_bytes == du(where)
    assert len(kept) > n_kills, len(kept)
    assert died_while["writing"] > n_kills // 10, died_while


class Deadly(Unflushed):
    """Kills its own process where it is told to, without a word.

    Args:
        when: `renamed`, after a state has its final name, or `flushed`, before its directory is.
    """

    def __init__(self, when: str) -> None:
        self.when = when

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        if self.when == "renamed" and new.suffix == ".state":
            os.kill(os.getpid(), signal.SIGKILL)

    def flush_directory(self, path: Path) -> None:
        if self.when == "flushed" and path.parent.name == "blobs":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("when", "n_adopted"), [("renamed", 1), ("flushed", 0)])
def test_who_dies_between_the_name_and_the_index_loses_nothing(
    tmp_path: Path, when: str, n_adopted: int
) -> None:
    run(["publish", str(tmp_path / "cache"), when, str(n_adopted)], timeout=60)


def die_while_publishing(where: Path, when: str, n_adopted: int) -> None:
    names = path(range(6))
    first, second = names.segment(0, 4), names.segment(4, 6)
    with open_store(where, 100) as store:
        assert put(store, first)
    pid = os.fork()
    if pid == 0:
        try:
            files = Deadly(when)
            put(DiskStore(where, pages(100), min_free_bytes=0, files=files), second)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status
    with open_store(where, 100) as store:
        assert store.counters.get("adopted", 0) == n_adopted
        assert {r.name for r in store.find(blocks(range(6)))} == {first.name, second.name}
        assert is_right(store, second.name)
        assert store.used_bytes == du(where) == pages(2)
        assert not list((where / "tmp").iterdir())
        store.check()


# -- many processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_processes", [2, 4])
def test_many_processes_use_one_directory(tmp_path: Path, n_processes: int) -> None:
    run(["hammer", str(tmp_path / "cache"), str(n_processes)], timeout=300)


N_PAGES = 60


def hammer(where: Path, seed: int, n_rounds: int) -> dict[str, int]:
    """Save, look up, read and drop prompts that the others use too."""
    draw = random.Random(seed)
    n_read = 0
    with open_store(where, N_PAGES) as store:
        for _ in range(n_rounds):
            tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 13))]
            names = path(tokens)
            for start in range(0, len(tokens), 4):
                end = min(start + 4, len(tokens))
                if not put(store, names.segment(start, end), draw.choice([10, 3_000, 9_000])):
                    break
                if draw.random() < 0.2:
                    put(store, names.checkpoint(start, end), 100)
            assert store.used_bytes <= store.capacity_bytes
            prompt = [draw.randrange(3) for _ in range(12)]
            found = [record.name for record in store.find(blocks(prompt))]
            for name, data in zip(found, store.get_many(found), strict=True):
                if data is not None:
                    assert np.array_equal(data, content(name, data.nbytes)), name.hex()
                    n_read += 1
            store.touch(found[:2])
            if draw.random() < 0.05:
                store.delete(draw.choice(found or [b"x" * 32]))
            if draw.random() < 0.05 and len(tokens) % 4 > 1:
                tail = names.segment(len(tokens) // 4 * 4, len(tokens) - 1)
                store.supersede(tail.name, names.segment(tail.start, len(tokens)).name)
        return {"read": n_read, **store.counters}


def hammer_together(where: Path, n_processes: int) -> None:
    children = {}
    open_store(where, N_PAGES).close()
    for seed in range(n_processes):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                os.write(writer, json.dumps(hammer(where, seed, 500 // n_processes)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        children[pid] = reader
    pending = set(children)
    peak, n_samples = 0, 0
    with open_store(where, N_PAGES) as store:
        while pending:
            with store._index.writing():  # nobody reserves or evicts while files are looked at
                peak = max(peak, du(where))
            n_samples += 1
            time.sleep(0.02)
            for pid in list(pending):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    pending.discard(pid)
                    assert status == 0, status
    counters: Counter[str] = Counter()
    for reader in children.values():
        with os.fdopen(reader) as pipe:
            counters.update(json.load(pipe))
    assert n_samples > 10
    assert pages(N_PAGES // 2) < peak <= pages(N_PAGES), peak
    assert counters["evicted"] > 20, counters
    assert counters["read"] > 100, counters
    assert not [k for k in counters if k.startswith(("errors_", "rejected_"))], counters
    with open_store(where, N_PAGES) as store:
        store.check()
        assert store.used_bytes == du(where) <= store.capacity_bytes
        assert not files_below(where / "tmp")
        for name in store:
            assert is_right(store, name)


# -- a killed process among living ones ------------------------------------------------------------


def test_a_process_is_killed_while_others_go_on(tmp_path: Path) -> None:
    run(["mixed", str(tmp_path / "cache")], timeout=300)


def kill_among_others(where: Path) -> None:
    """One process works on while others are killed beside it, with eviction."""
    reader, writer = os.pipe()
    open_store(where, N_PAGES).close()
    survivor = os.fork()
    if survivor == 0:
        status = 1
        try:
            os.write(writer, json.dumps(hammer(where, 99, 150)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    draw = random.Random(7)
    for seed in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                hammer(where, seed, 10_000)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.01, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    _, status = os.waitpid(survivor, 0)
    assert status == 0, status
    with os.fdopen(reader) as pipe:
        counters = json.load(pipe)
    # Files that went while their rows stayed, because a process ended in between, are misses.
    bad = [k for k in counters if k.startswith(("errors_", "rejected_"))]
    assert not bad, counters
    with open_store(where, N_PAGES) as store:
        store.check(fix=True)
        store.check()
        assert store.used_bytes == du(where) <= store.capacity_bytes
        for name in store:
            assert is_right(store, name)


if __name__ == "__main__":
    what, directory, *rest = sys.argv[1:]
    try:
        if what == "kill":
            kill_many(Path(directory), int(rest[0]))
        elif what == "hammer":
            hammer_together(Path(directory), int(rest[0]))
        elif what == "publish":
            die_while_publishing(Path(directory), rest[0], int(rest[1]))
        else:
            kill_among_others(Path(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
