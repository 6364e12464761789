"""llamakeep simulate: how fast it replays, in how much memory, and the figures of others."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Result, benchmark
from llamakeep.policy import DEFAULT_POLICY, policy_names
from llamakeep.runtime.sized import SizedRuntime
from llamakeep.simulate.bound import bound
from llamakeep.simulate.experiment import capacity_of
from llamakeep.simulate.replay import (
    CacheName,
    Outcome,
    PromptDriver,
    TraceClock,
    drive,
    replay,
)
from llamakeep.simulate.trace import Trace, open_trace
from tests.published import POINTS, PUBLISHED, searched_first, trace_path

BLOCK_TOKENS = 64
LEAST_BLOCKS_PER_S = 20_000
N_MANY = 1_000_000
MOST_RISE_MB = 256.0


def write_agents(
    path: Path, n_requests: int, n_turns: int = 20, n_system: int = 20, n_agents: int = 40
) -> int:
    """Write a trace of agents that share their system prompts; return the number of blocks.

    So many take turns; when a new one comes, the one that came first is heard of no more.
    """
    rng = np.random.default_rng(5)
    systems = [list(range(1_000 * i, 1_000 * i + n_system)) for i in range(8)]
    new, n_blocks, agents = 10_000, 0, []
    with path.open("w") as file:
        for number in range(n_requests):
            if len(agents) < n_agents or rng.random() < 1 / n_turns:
                agents.append(list(systems[rng.integers(len(systems))]))
                agents = agents[-n_agents:]
            agent = agents[rng.integers(len(agents))]
            n_more = int(rng.integers(1, 4))
            agent.extend(range(new, new + n_more))
            new += n_more
            n_blocks += len(agent)
            request = {
                "timestamp": float(number),
                "block_size": BLOCK_TOKENS,
                "hash_ids": agent,
                "input_length": len(agent) * BLOCK_TOKENS,
                "output_length": 0,
            }
            file.write(json.dumps(request) + "\n")
    return n_blocks


@benchmark("simulate-speed")
def speed() -> Iterator[Result]:
    """Block events a second of CPU time, for each policy."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "agents.jsonl"
        write_agents(path, 2_000)
        caches: dict[CacheName, list[str]] = {
            "tree": policy_names("tree"),
            "prompt": policy_names("prompts"),
        }
        with open_trace(path) as trace:
            for cache, policies in caches.items():
                for policy in policies:
                    start = time.process_time()
                    found = replay(
                        trace,
                        cache,
                        capacity_bytes=trace.footprint_tokens // 10,
                        policy=policy,
                    )
                    seconds = time.process_time() - start
                    yield {
                        "name": f"simulate-speed.{cache}.{policy}",
                        "value": trace.n_blocks / seconds,
                        "unit": "blocks/s",
                        "target": LEAST_BLOCKS_PER_S,
                        "better": "higher",
                        "detail": {
                            "blocks": trace.n_blocks,
                            "requests": trace.n_requests,
                            "saved_share": round(found.saved_share, 4),
                        },
                    }


@benchmark("simulate-speed-many")
def speed_many() -> Iterator[Result]:
    """The prompt cache with hundreds of entries: block events a second, and against a few.

    Also on a published trace that has as many, where it is at hand.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "many.jsonl"
        write_agents(path, 6_000, n_turns=12, n_system=8, n_agents=1_000)
        yield from speeds(path, "agents")
    published = trace_path("mooncake_synthetic")
    if published is not None:
        yield from speeds(published, "mooncake_synthetic")


def speeds(path: Path, name: str) -> Iterator[Result]:
    """Return rates at 50 % of what would keep everything, with those at 1 % beside them."""
    with open_trace(path) as trace:
        for policy in policy_names("prompts"):
            many, n_many, saved = prompt_rate(trace, policy, "50%")
            few, n_few, _ = prompt_rate(trace, policy, "1%")
            yield {
                "name": f"simulate-speed-many.{name}.{policy}",
                "value": many,
                "unit": "blocks/s",
                "target": LEAST_BLOCKS_PER_S,
                "better": "higher",
                "detail": {
                    "entries": n_many,
                    "blocks": trace.n_blocks,
                    "requests": trace.n_requests,
                    "saved_share": round(saved, 4),
                    "with_few": {"entries": n_few, "blocks/s": round(few)},
                    "ratio": round(many / few, 2),
                },
            }


def prompt_rate(trace: Trace, policy: str, share: str) -> tuple[float, int, float]:
    """Return block events a second of CPU time, entries at the end, and the share saved."""
    clock = TraceClock()
    runtime = SizedRuntime(n_ctx=trace.longest_tokens)
    capacity_bytes = capacity_of(share, trace.footprint_tokens)
    driver = PromptDriver(runtime, capacity_bytes, policy=policy, clock=clock)
    start = time.process_time()
    found = drive(trace, driver, clock, Outcome("prompt", policy, capacity_bytes, 0, 0, 0, 0))
    seconds = time.process_time() - start
    return trace.n_blocks / seconds, len(driver.cache), found.saved_share


@benchmark("simulate-memory")
def memory() -> Iterator[Result]:
    """What a trace of a million requests adds to a process: read, replayed, and its bound."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "many.jsonl"
        n_blocks = write_agents(path, N_MANY, n_turns=4, n_system=2)
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.bench_simulate", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
    found = json.loads(run.stdout)
    yield {
        "name": "simulate-memory.rise",
        "value": found["rise_mb"],
        "unit": "MB",
        "target": MOST_RISE_MB,
        "better": "lower",
        "detail": {"requests": N_MANY, "blocks": n_blocks, **found},
    }


def measure_memory(path: Path) -> None:
    """Print by how much reading and replaying a trace raised the memory of this process."""
    before, start = own_mb(), time.perf_counter()
    seen, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seen[0] = max(seen[0], own_mb())

    watching = threading.Thread(target=watch)
    watching.start()
    with open_trace(path) as trace:
        read_s, reading_mb = time.perf_counter() - start, seen[0]
        capacity_bytes = trace.footprint_tokens // 10_000
        found = replay(trace, capacity_bytes=capacity_bytes)
        best = bound(trace, capacity_bytes=capacity_bytes)
    done.set()
    watching.join()
    report = {
        "rise_mb": seen[0] - before,
        "rise_of_reading_mb": reading_mb - before,
        "read_s": read_s,
        "seconds": time.perf_counter() - start,
        "saved_share": found.saved_share,
        "bound": best.saved_share,
    }
    print(json.dumps(report))


def own_mb() -> float:
    """Return the memory that only this process has now; files that it maps do not count."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise OSError("this system does not say how much memory of its own a process has")


@benchmark("simulate-published")
def published() -> Iterator[Result]:
    """How far saved shares are off those that others published, in points."""
    for name, shares in PUBLISHED.items():
        path = trace_path(name)
        if path is None:
            print(f"simulate-published: no trace {name}", file=sys.stderr)
            continue
        with open_trace(path) as trace:
            for share, (slot, lru, most) in shares.items():
                capacity_bytes = capacity_of(share, trace.footprint_tokens)
                found = 100 * recent(trace, capacity_bytes)
                best = 100 * bound(trace, capacity_bytes=capacity_bytes).saved_share
                prompt = replay(trace, "prompt", capacity_bytes=capacity_bytes).saved_share
                variant = 100 * searched_first(trace, capacity_bytes)
                for what, value, theirs in (
                    ("lru", found, lru),
                    ("bound", best, most),
                    ("slot", variant, slot),
                ):
                    yield {
                        "name": f"simulate-published.{name}.{share}.{what}",
                        "value": abs(value - theirs),
                        "unit": "points",
                        "target": POINTS[what],
                        "better": "lower",
                        "detail": {
                            "saved": round(value, 1),
                            "published": theirs,
                            "prompt": round(100 * prompt, 1),
                        },
                    }


def recent(trace: Trace, capacity_bytes: int) -> float:
    """Return what `lru` saves of a trace."""
    return replay(trace, capacity_bytes=capacity_bytes, policy="lru").saved_share


@benchmark("simulate-policy")
def default_policy() -> Iterator[Result]:
    """What the default policy saves of three traces, beside `lru`, the prompt cache and the bound.

    `behind` is how far it is below the better of the first two, at the capacities whose figures
    were published; `closed` is its share of the gap from `lru` to the bound, on average where that
    is above 5 points.
    """
    behind: list[float] = []
    closed: list[float] = []
    for name, shares in PUBLISHED.items():
        path = trace_path(name)
        if path is None:
            print(f"simulate-policy: no trace {name}", file=sys.stderr)
            return
        with open_trace(path) as trace:
            for share in shares:
                capacity_bytes = capacity_of(share, trace.footprint_tokens)
                found = replay(trace, capacity_bytes=capacity_bytes).saved_share
                prompt = replay(trace, "prompt", capacity_bytes=capacity_bytes).saved_share
                least = recent(trace, capacity_bytes)
                most = bound(trace, capacity_bytes=capacity_bytes).saved_share
                behind.append(100 * (max(least, prompt) - found))
                if most - least > 0.05:
                    closed.append((found - least) / (most - least))
    yield {
        "name": f"simulate-policy.{DEFAULT_POLICY}.behind",
        "value": max(behind),
        "unit": "points",
        "target": 0.5,
        "better": "lower",
        "detail": {"of": [round(each, 2) for each in behind]},
    }
    yield {
        "name": f"simulate-policy.{DEFAULT_POLICY}.closed",
        "value": sum(closed) / len(closed),
        "unit": "of the gap",
        "target": 1 / 3,
        "better": "higher",
        "detail": {"of": [round(each, 2) for each in closed]},
    }


if __name__ == "__main__":
    measure_memory(Path(sys.argv[1]))
