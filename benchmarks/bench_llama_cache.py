"""The drop-in caches: against those of llama-cpp-python, and a directory against plain reading."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from blake3 import blake3

from benchmarks.bench_radix import N_COMMON, N_VOCAB, prompts
from benchmarks.bench_states import once, random_tokens, smollm2
from benchmarks.harness import Result, benchmark
from llamakeep.llama_cache import LlamaDiskCache, LlamaRAMCache, LlamaTrieCache
from llamakeep.stores.disk.files import Files
from llamakeep.tokens import IntArray

N_PROMPT = 1_000
N_SAVES = 20
LARGE_BYTES = 20 << 20
TOKENS_A_SECOND = 4_000_000


def in_turns(rounds: int, *sides: Callable[[], float]) -> list[float]:
    """Return the median of what each side measures, after a round that does not count.

    In turns: what else the machine does meanwhile slows all of them.
    """
    rows = [[side() for side in sides] for _ in range(rounds + 1)][1:]
    return [float(np.median(column)) for column in zip(*rows, strict=True)]


def state_of(n_bytes: int, seed: int, n_tokens: int = 1, n_rows: int = 1, n_vocab: int = 16) -> Any:
    """Return a state as `Llama.save_state()` makes them, with a number to know it by."""
    from llama_cpp.llama import LlamaState

    return LlamaState(
        input_ids=np.zeros(2 * n_tokens, np.intc),
        scores=np.zeros((n_rows, n_vocab), np.single),
        n_tokens=n_tokens,
        llama_state=np.random.default_rng(seed).bytes(n_bytes),
        llama_state_size=n_bytes,
        seed=seed,
    )


def large_state() -> Any:
    """Return a state of 20 MiB, with the scores that SmolLM2 copies to every one."""
    return state_of(LARGE_BYTES, 0, N_PROMPT, 512, 49_152)


def asking(
    cache: Any, queries: list[IntArray], form: Callable[[IntArray], Any], n: int
) -> Callable[[], float]:
    """Return a function that asks the next `n` queries and returns the median seconds of one.

    Each query is made before its lookup: it is in the cache, as a prompt that was just tokenized.
    """
    turn = itertools.cycle(queries)

    def ask() -> float:
        seconds = []
        for each in itertools.islice(turn, n):
            query = form(each)
            start = time.perf_counter()
            cache[query]
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))

    return ask


FORMS: dict[str, Callable[[IntArray], Any]] = {
    "list": lambda query: query.tolist(),
    "tuple": lambda query: tuple(query.tolist()),
    "array": lambda query: query.copy(),
}


@benchmark("llama-cache-lookup")
def lookup() -> Iterator[Result]:
    """Going on with one of 100 prompts of 8,000 tokens that share 2,000."""
    from llama_cpp.llama_cache import LlamaRAMCache as TheirRAMCache

    keys = prompts(100, 6_000)
    queries = [np.concatenate((key, np.arange(50, dtype=np.int32))) for key in keys]
    theirs, ram, trie = TheirRAMCache(), LlamaRAMCache(), LlamaTrieCache()
    for cache in (theirs, ram, trie):
        for seed, key in enumerate(keys):
            cache[key.tolist()] = state_of(64, seed)
        if any(cache[queries[seed].tolist()].seed != seed for seed in range(0, 100, 9)):
            raise RuntimeError(f"{cache!r} found the state of another prompt")

    sides = [asking(theirs, queries, FORMS[form], 7) for form in ("list", "tuple")]
    sides += [asking(cache, queries, form, 50) for cache in (ram, trie) for form in FORMS.values()]
    in_list, in_tuple, *ours = in_turns(15, *sides)
    # Theirs looks up no arrays: it is asked for the list.
    baselines = {"list": in_list, "tuple": in_tuple, "array": in_list}
    which = ((name, form) for name in ("ram", "trie") for form in FORMS)
    for (name, form), seconds in zip(which, ours, strict=True):
        yield {
            "name": f"llama-cache-lookup-{name}-{form}",
            "value": baselines[form] / seconds,
            "unit": "x",
            "target": 300 if form == "array" else 50,
            "better": "higher",
            "detail": {
                "what": "100 keys of 8,000 tokens sharing 2,000, a query that goes on with one,"
                " against llama_cpp.LlamaRAMCache",
                "ours_us": seconds * 1e6,
                "theirs_us": baselines[form] * 1e6,
            },
        }


def prompt_of(llm: Any) -> list[int]:
    """Evaluate a prompt and return it."""
    tokens: list[int] = random_tokens(N_PROMPT, llm.n_vocab()).tolist()
    llm.eval(tokens)
    return tokens


def resident_growth(whose: str) -> int:
    """Return by how many bytes this process grows while a cache takes states. In a new process."""
    import llama_cpp

    llm = llama_cpp.Llama(str(smollm2()), n_ctx=2048, verbose=False)
    tokens = prompt_of(llm)
    ours, theirs = LlamaRAMCache(), llama_cpp.LlamaRAMCache()
    cache = ours if whose == "ours" else theirs
    process = psutil.Process()
    gc.collect()
    before: int = process.memory_info().rss
    for number in range(N_SAVES):
        cache[[number, *tokens[1:]]] = llm.save_state()
    gc.collect()
    grown: int = process.memory_info().rss - before
    if len(ours) + len(theirs.cache_state) != N_SAVES:
        raise RuntimeError("not all states are kept")
    llm.close()
    return grown


def in_new_process(whose: str) -> int:
    """Return what `resident_growth` measures in a process that did nothing before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(resident_growth, whose).result()


@benchmark("llama-cache-memory")
def memory() -> Iterator[Result]:
    """What 20 states of 1,000 tokens occupy, and what using one of 20 MiB takes beside it."""
    theirs, ours = in_new_process("theirs"), in_new_process("ours")
    yield {
        "name": "llama-cache-memory-20-states",
        "value": ours / theirs,
        "unit": "x theirs",
        "target": 1 / 3,
        "better": "lower",
        "detail": {
            "what": "growth of the resident memory of a process of its own, 20 saves of 1,000"
            " tokens of SmolLM2, n_ctx 2048",
            "ours_bytes": ours,
            "theirs_bytes": theirs,
        },
    }
    key, state = list(range(N_PROMPT)), large_state()
    with (
        tempfile.TemporaryDirectory() as directory,
        LlamaDiskCache(directory, namespace="bench") as disk,
    ):
        for name, cache, most in (("ram", LlamaRAMCache(), 0.1), ("disk", disk, 1.1)):
            cache[key] = state
            yield {
                "name": f"llama-cache-memory-hit-{name}",
                "value": peak_bytes(partial(cache.__getitem__, key)) / LARGE_BYTES,
                "unit": "x the state",
                "target": most,
                "better": "lower",
                "detail": {
                    "measured": "tracemalloc: every buffer Python holds, numpy's included; the"
                    " state that is returned counts too",
                    "state_bytes": LARGE_BYTES,
                },
            }


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at once during a call, after one to warm up."""
    function()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@benchmark("llama-cache-save")
def save() -> Iterator[Result]:
    """Saving a turn of 1,000 tokens as `Llama` does: taking the state, then keeping it."""
    import llama_cpp

    llm = llama_cpp.Llama(str(smollm2()), n_ctx=2048, verbose=False)
    key = prompt_of(llm)
    caches = LlamaRAMCache(), llama_cpp.LlamaRAMCache()

    def saving(cache: Any) -> float:
        return once(lambda: cache.__setitem__(key, llm.save_state()))

    def keeping(cache: Any) -> float:
        state = llm.save_state()
        return once(lambda: cache.__setitem__(key, state))

    ours, theirs = in_turns(15, *(partial(saving, cache) for cache in caches))
    keeping_ours, keeping_theirs = in_turns(9, *(partial(keeping, cache) for cache in caches))
    state = llm.save_state()
    llm.close()
    yield {
        "name": "llama-cache-save",
        "value": ours / theirs,
        "unit": "x theirs",
        "target": 1.5,
        "better": "lower",
        "detail": {
            "what": "save_state() and keeping what it returns, SmolLM2, 1,000 tokens",
            "ours_ms": ours * 1e3,
            "theirs_ms": theirs * 1e3,
            "keeping_ours_ms": keeping_ours * 1e3,
            "keeping_theirs_ms": keeping_theirs * 1e3,
            "state_bytes": state.llama_state_size,
            "scores_bytes": state.scores.nbytes,
        },
    }


class UnflushedFiles(Files):
    """A file system that does not wait for its device: three times for each entry."""

    def flush(self, file: Any) -> None:
        pass

    def flush_directory(self, path: Path) -> None:
        pass


def fill(directory: Path, keys: list[IntArray]) -> None:
    """Write small states under these keys."""
    with LlamaDiskCache(directory, namespace="bench") as cache:
        cache._backing.store._shelf.files = UnflushedFiles()
        for seed, key in enumerate(keys):
            cache[key.tolist()] = state_of(1_000, seed)
        if len(cache) != len(keys):
            raise RuntimeError(f"{len(cache)} of {len(keys)} states were kept")


@benchmark("llama-cache-disk-open")
def disk_open() -> Iterator[Result]:
    """Opening a directory with 4 million tokens of keys, the first lookup included."""
    for n_keys, n_tokens, n_common in ((500, 8_000, N_COMMON), (4_000, 1_000, 500)):
        # Those of bench_radix share more than short ones have.
        keys = [key[N_COMMON - n_common :] for key in prompts(n_keys, n_tokens - n_common)]
        with tempfile.TemporaryDirectory() as directory:
            filling = once(partial(fill, Path(directory), keys))
            query = [*keys[-1].tolist(), 1, 2, 3]
            opening, both = first_lookup(Path(directory), query, n_keys - 1)
        yield {
            "name": f"llama-cache-disk-open-{n_keys}",
            "value": both * TOKENS_A_SECOND / (n_keys * n_tokens),
            "unit": "s a 4M tokens",
            "target": 1,
            "better": "lower",
            "detail": {
                "what": f"opening a directory with {n_keys:,} keys of {n_tokens:,} tokens that"
                f" share {n_common:,}, and the first lookup, which reads the keys",
                "opening_ms": opening * 1e3,
                "with_lookup_ms": both * 1e3,
                "filling_s": filling,
            },
        }


def first_lookup(directory: Path, query: list[int], seed: int) -> tuple[float, float]:
    """Return the median seconds of opening a directory, and with the first lookup in it."""

    def opened() -> tuple[float, float]:
        gc.collect()
        start = time.perf_counter()
        cache = LlamaDiskCache(directory, namespace="bench")
        opening = time.perf_counter() - start
        state = cache[query]
        both = time.perf_counter() - start
        cache.close()
        if state.seed != seed:
            raise RuntimeError("found the state of another prompt")
        return opening, both

    opening, both = np.median([opened() for _ in range(9)], axis=0)
    return float(opening), float(both)


@benchmark("llama-cache-disk-get")
def disk_get() -> Iterator[Result]:
    """A hit of 20 MiB on disk, page cache warm, against reading its file and BLAKE3."""
    key = random_tokens(N_PROMPT, N_VOCAB).tolist()
    query = [*key, 1, 2, 3]
    with tempfile.TemporaryDirectory() as directory:
        cache = LlamaDiskCache(directory, namespace="bench")
        state = large_state()
        cache[key] = state
        if cache[query].llama_state != state.llama_state:
            raise RuntimeError("the state is not what it was")
        (path,) = Path(directory).rglob("*.state")

        def plain() -> None:
            with open(path, "rb") as file:
                blake3(file.read()).digest()

        def hit() -> None:
            cache[query]

        base, seconds = in_turns(51, partial(once, plain), partial(once, hit))
        cache.close()
    yield {
        "name": "llama-cache-disk-get",
        "value": seconds / base,
        "unit": "x read and BLAKE3",
        "target": 1.3,
        "better": "lower",
        "detail": {"get_ms": seconds * 1e3, "plain_ms": base * 1e3, "state_bytes": LARGE_BYTES},
    }
