"""The recordings of a llama-server, replayed on the models they were made with."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_states import smollm2
from benchmarks.harness import Result, benchmark
from llamakeep.events import Event
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.slots import Slots
from tests import tiny_models
from tests.test_upstream_beside import INFINITE, SERVER, SLOT_BYTES, Beside, sixteen_checkpoints
from tests.test_upstream_replay import MIB, differences, option, recording


def replay(name: str, path: Path) -> tuple[int, int, float, dict[str, int]]:
    """Return tokens evaluated, those recorded, seconds, and how many requests differ in what."""
    record = recording(name)
    server = record["server"]
    n_batch, n_ubatch = option(server, "-b", 2048), option(server, "-ub", 512)
    runtime = LlamaCppRuntime.load(
        path, n_ctx=server["n_ctx"], n_batch=n_batch, n_ubatch=n_ubatch, n_threads=1
    )
    events: list[Event] = []
    cache_bytes = option(server, "--cache-ram", 8192) * MIB
    cache = PromptCache(cache_bytes, server["n_ctx"], emit=events.append)
    slots = Slots(
        runtime,
        cache,
        ctx_checkpoints=option(server, "--ctx-checkpoints", 32),
        checkpoint_min_step=option(server, "--checkpoint-min-step", 8192),
        n_ubatch=n_ubatch,
        emit=events.append,
    )
    differ: dict[str, int] = {}
    evaluated, begin = 0, time.perf_counter()
    for request in record["requests"]:
        # Tiny models have fewer tokens; what prompts have in common stays the same.
        tokens = np.array(request["tokens"], np.int32) % runtime.n_vocab
        served = slots.serve(tokens, user_starts=request["user_starts"])
        evaluated += served.evaluated_tokens
        for what in differences(served, request):
            differ[what] = differ.get(what, 0) + 1
    seconds = time.perf_counter() - begin
    slots.check()
    runtime.close()
    recorded = sum(request["evaluated"] for request in record["requests"])
    return evaluated, recorded, seconds, differ


@benchmark("upstream")
def upstream() -> Iterator[Result]:
    """In how much the requests of the recordings are not served as the server served them."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_models.write_all(Path(directory), smollm2())
        hybrid = Path(directory) / tiny_models.model_file("hybrid")
        for name, path in (
            ("checkpoints_hybrid", hybrid),
            ("prompt_cache_shared_system", smollm2()),
            ("prompt_cache_1slot", smollm2()),
        ):
            evaluated, recorded, seconds, differ = replay(name, path)
            yield {
                "name": f"upstream-{name}",
                "value": sum(differ.values()),
                "unit": "differences",
                "target": 0,
                "better": "lower",
                "detail": {
                    "evaluated_tokens": evaluated,
                    "recorded_tokens": recorded,
                    "seconds": seconds,
                    "differ": differ,
                },
            }


@benchmark("beside")
def beside() -> Iterator[Result]:
    """The same requests through the prefix tree: tokens evaluated, against an infinite cache."""
    roomy = "with room for everything"
    attention = ("prompt_cache_1slot", "prompt_cache_shared_system")
    cases: list[tuple[str, str, dict[str, Any], float]] = [
        *(
            (name, f"{roomy}, align {align}", {"align": align}, most)
            for name in attention
            for align, most in ((1, 1.02), (8, 1.03))
        ),
        ("checkpoints_hybrid", f"{roomy}, align 1", {}, 1.10),
        ("checkpoints_hybrid", f"{roomy}, align 8", {"align": 8}, 1.11),
        *(
            (name, f"{what}, policy {policy}", {"capacity_bytes": n, "policy": policy}, 1.10)
            for what, n in (
                ("60 MiB", 60 * MIB),
                ("1.5 x cache and slot", (40 * MIB + SLOT_BYTES) * 3 // 2 - SLOT_BYTES),
            )
            for policy in ("lru", "marginal")
            for name in attention
        ),
        (
            "checkpoints_hybrid",
            "16 checkpoints, policy marginal",
            {"policy": "marginal", "max_checkpoint_bytes": sixteen_checkpoints()},
            1.12,
        ),
    ]
    for name, what, options, most in cases:
        evaluated = Beside(name, **options).evaluated()
        yield Result(
            name=f"beside-{name}-{what}",
            value=evaluated / INFINITE[name],
            unit="x infinite",
            target=most,
            better="lower",
            detail={"evaluated": evaluated, "server": SERVER[name], "infinite": INFINITE[name]},
        )
    for name, policy in itertools.product(attention, ("lru", "marginal")):
        evaluated = Beside(name, capacity_bytes=40 * MIB, policy=policy).evaluated()
        yield Result(
            name=f"beside-{name}-40 MiB, policy {policy}",
            value=evaluated / SERVER[name],
            unit="x the server's",
            target=0.9,
            better="lower",
            detail={"evaluated": evaluated, "server": SERVER[name], "infinite": INFINITE[name]},
        )
