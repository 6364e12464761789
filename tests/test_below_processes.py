"""Trees of several processes over one directory: killed at any moment, and all at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from llamakeep.runtime.base import Family
from llamakeep.stores.disk import DiskStore
from tests.test_below import Process
from tests.test_sequence import joined, tokens_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill")

N_KILLS = 100
ROOT = Path(__file__).parents[1]
FAMILIES = [Family.ATTENTION, Family.HYBRID]


def run(*arguments: object) -> None:
    """Run one of the programs below in a process without threads, from which it may fork."""
    command = [sys.executable, "-W", "error", "-m", "tests.test_below_processes"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def begin(where: Path, family: Family, disk_bytes: int = 1 << 30) -> Process:
    disk: Any = DiskStore(where, disk_bytes, min_free_bytes=0)
    return Process({"family": family}, disk)


def prompt_of(seed: int) -> Any:
    """Return a prompt that shares its beginning with others, and grows."""
    draw = random.Random(seed)
    system = tokens_of(100, draw.randrange(3))
    return joined(system, tokens_of(draw.randrange(10, 200), seed % 7), tokens_of(9, seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_flushed_before_a_kill_is_reused(family: Family, tmp_path: Path) -> None:
    run("kill", tmp_path / "cache", family.value)


def work_until_killed(where: Path, family: Family, seed: int, pipe: int) -> None:
    process = begin(where, family)
    for number in range(1_000):
        prompt_seed = 1_000 * seed + number
        process.ask(prompt_of(prompt_seed), flush=False)
        if number % 3 == 0 and process.store.flush(60):
            os.write(pipe, f"{prompt_seed}\n".encode())


def kill_many(where: Path, family: Family) -> None:
    draw = random.Random(11)
    flushed: list[int] = []
    for number in range(N_KILLS):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            try:
                work_until_killed(where, family, number, writer)
            except Exception:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb", 0) as pipe:
            said = pipe.read(1)  # it has flushed once
            time.sleep(draw.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), status
            said += pipe.read()
        flushed += [int(line) for line in said.split(b"\n")[:-1]]
    after = begin(where, family)
    for seed in flushed:
        prompt = prompt_of(seed)
        after.forget_live()
        after.tree.clear()
        reuse = after.ask(prompt, flush=False)
        assert (reuse.reused_tokens, reuse.tier) == ((prompt.size - 2) // 8 * 8, "disk"), seed
    assert len(flushed) >= N_KILLS, len(flushed)
    [disk] = after.store.below
    after.store.flush(60)
    disk.check(fix=True)
    disk.check()
    assert not [kind for kind in disk.counters if kind.startswith("rejected")]
    after.store.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_processes", [2, 4])
def test_all_are_right_while_they_evict_each_others_states(
    family: Family, n_processes: int, tmp_path: Path
) -> None:
    run("together", tmp_path / "cache", family.value, n_processes)


def work(where: Path, family: Family, seed: int, rounds: int) -> dict[str, int]:
    """Ask prompts that the others ask too, each compared with a cold run, in little room."""
    draw = random.Random(seed)
    reused = {"disk": 0, "ram": 0, "live": 0, "none": 0}
    process = begin(where, family, 200_000)
    for _ in range(rounds):
        if draw.random() < 0.2:
            process.store.close()
            process = begin(where, family, 200_000)
        reuse = process.ask(prompt_of(draw.randrange(40)), flush=draw.random() < 0.3)
        reused[reuse.tier] += 1
    process.store.close()
    return reused


def work_together(where: Path, family: Family, n_processes: int) -> None:
    children = {}
    for seed in range(n_processes):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                said = work(where, family, seed, 160 // n_processes)
                os.write(writer, json.dumps(said).encode())
                status = 0
            except Exception:
                traceback.print_exc()
                raise
            finally:
                os._exit(status)
        os.close(writer)
        children[pid] = reader
    tiers: dict[str, int] = {}
    for pid, reader in children.items():
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        with os.fdopen(reader) as pipe:
            for tier, n in json.load(pipe).items():
                tiers[tier] = tiers.get(tier, 0) + n
    assert tiers["disk"] > 5, tiers
    with DiskStore(where, 200_000, min_free_bytes=0) as disk:
        disk.check(fix=True)
        disk.check()
        assert disk.used_bytes <= disk.capacity_bytes


if __name__ == "__main__":
    what, directory, name, *rest = sys.argv[1:]
    if what == "kill":
        kill_many(Path(directory), Family(name))
    else:
        work_together(Path(directory), Family(name), int(rest[0]))
