"""What tiers below memory cost and save, on a real model: SmolLM2, 2,048 tokens."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from blake3 import blake3

from benchmarks.bench_states import (
    N_NEW,
    N_PREFIX,
    SEGMENT,
    median_of,
    once,
    prefill_seconds,
    random_tokens,
    smollm2,
)
from benchmarks.harness import Result, benchmark, median_time
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.stores.base import Tier, TreeStore
from llamakeep.stores.disk import DiskStore, rows
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import IntArray, PathNames
from llamakeep.tree import PrefixTree
from tests.redis_servers import Server

NAMESPACE = bytes(32)


def over(runtime: LlamaCppRuntime, tier: Tier, ram: int = 1 << 30) -> KeptSequence:
    """Return a sequence whose tree has nothing in memory yet."""
    store = TieredStore(MemoryStore(ram), tier, queue_bytes=1 << 30)
    tree = PrefixTree(store, runtime.traits, segment_tokens=SEGMENT)
    return KeptSequence(runtime, tree, namespace=NAMESPACE)


def let_go(store: TreeStore) -> None:
    """End the threads of a store, and leave its tiers open."""
    store.flush(60)
    if isinstance(store, TieredStore):
        for behind in store._behind.values():
            behind.close(60)
        store._reader.shutdown()


def fill(runtime: LlamaCppRuntime, tier: Tier, tokens: IntArray) -> None:
    """Compute a prompt and let its states go down."""
    sequence = over(runtime, tier)
    sequence.clear()
    sequence.resume(tokens)
    sequence.advance(tokens[sequence.live.n_tokens :])
    sequence.save()
    if not sequence._tree.store.flush(60):
        raise RuntimeError("the tier did not take the states in a minute")
    let_go(sequence._tree.store)


def restore_seconds(runtime: LlamaCppRuntime, tier: Tier, prompt: IntArray, repeats: int) -> float:
    """Return the median time of a first request in a process that has nothing in memory."""

    def first_request() -> float:
        sequence = over(runtime, tier)
        sequence.clear()
        gc.collect()
        begin = time.perf_counter()
        reuse = sequence.resume(prompt)
        seconds = time.perf_counter() - begin
        if (reuse.reused_tokens, reuse.tier) != (N_PREFIX, tier.tier):
            raise RuntimeError(f"not restored: {reuse}")
        let_go(sequence._tree.store)
        return seconds

    first_request()
    return median_of(first_request, repeats)


@benchmark("restore-below")
def restore_below() -> Iterator[Result]:
    """A 2,048-token prefix from disk and from a local Redis, against evaluating it."""
    runtime = LlamaCppRuntime.load(smollm2(), n_ctx=4096)
    tokens = random_tokens(N_PREFIX, runtime.n_vocab)
    prompt = np.concatenate((tokens, random_tokens(8, runtime.n_vocab, 1)))
    prefill = prefill_seconds(runtime, tokens, 5)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = DiskStore(directory / "cache", 1 << 30)
        stack.callback(disk.close)
        fill(runtime, disk, tokens)
        seconds = restore_seconds(runtime, disk, prompt, 15)
        yield {
            "name": "restore-2048-disk",
            "value": prefill / seconds,
            "unit": "x",
            "target": 400,
            "better": "higher",
            "detail": {"prefill_ms": prefill * 1e3, "restore_ms": seconds * 1e3},
        }
        yield read_path(disk)
        from llamakeep.stores.redis import RedisStore

        server = stack.enter_context(closing(Server()))
        shared = RedisStore(server.url, secret="benchmark")
        stack.callback(shared.close)
        fill(runtime, shared, tokens)
        seconds = restore_seconds(runtime, shared, prompt, 9)
        yield {
            "name": "restore-2048-redis",
            "value": prefill / seconds,
            "unit": "x",
            "target": 50,
            "better": "higher",
            "detail": {"prefill_ms": prefill * 1e3, "restore_ms": seconds * 1e3},
        }
    runtime.close()


def page_aligned(n_bytes: int) -> memoryview:
    """Return memory at the start of a page: reading into any other takes much longer."""
    buffer = np.empty(n_bytes + 4096, np.uint8)
    start = -buffer.ctypes.data % 4096
    return memoryview(buffer[start : start + n_bytes])  # type: ignore[arg-type]


def read_path(disk: DiskStore) -> Result:
    """Reading every blob, against `readinto` of the same files into one buffer and BLAKE3."""
    names = list(disk)
    paths = [next(disk.path.rglob(f"*{name.hex()}*")) for name in names]
    view = page_aligned(max(path.stat().st_size for path in paths))

    def plain() -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                n_bytes = file.readinto(view)
            blake3(view[:n_bytes]).digest()

    def ours() -> None:
        for data in disk.get_many(names):
            if data is None:
                raise RuntimeError("a blob is gone")

    # In turns: what else the machine does meanwhile slows both.
    times = [(once(plain), once(ours)) for _ in range(31)]
    base, seconds = (float(np.median(side)) for side in zip(*times, strict=True))
    return {
        "name": "disk-read-path",
        "value": seconds / base,
        "unit": "x readinto and BLAKE3",
        "target": 1.3,
        "better": "lower",
        "detail": {"read_ms": seconds * 1e3, "plain_ms": base * 1e3, "blobs": len(names)},
    }


@benchmark("save-below")
def save_below() -> Iterator[Result]:
    """What saving adds to a request when states go to disk, beside reading the range itself."""
    runtime = LlamaCppRuntime.load(smollm2(), n_ctx=4096)
    tokens = random_tokens(N_PREFIX + N_NEW, runtime.n_vocab)
    runtime.evaluate(0, tokens)

    def timed(tier: Tier | None) -> float:
        memory = MemoryStore(1 << 30)
        store = memory if tier is None else TieredStore(memory, tier, queue_bytes=1 << 30)
        tree = PrefixTree(store, runtime.traits, segment_tokens=SEGMENT)
        tree.namespace = np.random.default_rng().bytes(32)

        def save(n_tokens: int) -> None:
            tree.save(
                tokens[:n_tokens],
                segment_bytes=runtime.segment_bytes,
                read=lambda start, end: runtime.read_segment(0, start, end),
            )

        save(N_PREFIX)
        store.flush(60)
        seconds = once(lambda: save(N_PREFIX + N_NEW))
        store.flush(60)
        let_go(store)
        return seconds

    def reading() -> float:
        runtime.clear_all()
        runtime.evaluate(0, tokens)
        spans = [(N_PREFIX, N_PREFIX + SEGMENT), (N_PREFIX + SEGMENT, N_PREFIX + N_NEW)]
        return once(lambda: [runtime.read_segment(0, *span) for span in spans])

    with tempfile.TemporaryDirectory() as directory:
        disk = DiskStore(Path(directory) / "cache", 4 << 30)
        in_memory = median_of(lambda: timed(None), 9)
        below = median_of(lambda: timed(disk), 9)
        read = median_of(reading, 5)
        disk.close()
    runtime.close()
    yield {
        "name": "save-300-with-disk-over-reading",
        "value": (below - read) * 1e3,
        "unit": "ms",
        "target": 2,
        "better": "lower",
        "detail": {
            "with_disk_ms": below * 1e3,
            "memory_alone_ms": in_memory * 1e3,
            "reading_ms": read * 1e3,
        },
    }


@benchmark("disk-bytes")
def disk_bytes() -> Iterator[Result]:
    """Ten conversations over one system prompt, on disk, against the bytes of unique tokens."""
    runtime = LlamaCppRuntime.load(smollm2(), n_ctx=4096)
    system = random_tokens(1_000, runtime.n_vocab)
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskStore(Path(directory) / "cache", 4 << 30)
        sequence = over(runtime, disk)
        for seed in range(10):
            prompt = np.concatenate((system, random_tokens(300, runtime.n_vocab, seed + 1)))
            reuse = sequence.resume(prompt)
            sequence.advance(prompt[reuse.reused_tokens :])
            sequence.save()
        sequence._tree.store.flush(60)
        unique_tokens = 1_000 + 10 * 300
        unique_bytes = runtime.segment_bytes(unique_tokens)
        used = disk.used_bytes
        sequence._tree.store.close()
    runtime.close()
    yield {
        "name": "disk-ten-conversations",
        "value": used / unique_bytes,
        "unit": "x the unique tokens",
        "target": 1.1,
        "better": "lower",
        "detail": {"used_bytes": used, "unique_bytes": unique_bytes},
    }


@benchmark("disk-open")
def disk_open() -> Iterator[Result]:
    """Opening a directory with 100,000 blobs."""
    tokens = np.arange(100_000 * 8, dtype=np.int32)
    names = PathNames(NAMESPACE, tokens, 8)
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskStore(Path(directory) / "cache", 4 << 30, min_free_bytes=0)
        with disk._index.writing() as sql:  # as `put` does after the file; opening looks at none
            for start in range(0, tokens.size, 8):
                place = names.segment(start, start + 8)
                rows.insert(sql, place.name, place, 1000, 4096, 1.0)
        disk.close()

        def reopen() -> None:
            DiskStore(Path(directory) / "cache", 4 << 30, min_free_bytes=0).close()

        seconds = median_time(reopen, 5)
    yield {
        "name": "disk-open-100000",
        "value": seconds,
        "unit": "s",
        "target": 1,
        "better": "lower",
        "detail": {"open_ms": seconds * 1e3},
    }
