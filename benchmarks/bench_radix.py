"""RadixIndex: lookup time against a per-token trie, memory, and growth with the number of keys."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.harness import Result, benchmark, median_time
from llamakeep.radix import RadixIndex
from llamakeep.tokens import IntArray

N_VOCAB = 32_000
N_COMMON = 2_000
N_OWN_OF_MANY = 1_000


def prompts(n_prompts: int, n_own: int) -> list[IntArray]:
    """Return prompts that share their first N_COMMON tokens and nothing after them."""
    rng = np.random.default_rng(7)
    common = rng.integers(0, N_VOCAB, N_COMMON, dtype=np.int32)
    # The first own token differs, or two prompts in a few would share more by chance.
    own = rng.integers(0, N_VOCAB, (n_prompts, n_own), dtype=np.int32)
    own[:, 0] = np.arange(n_prompts)
    return [np.concatenate((common, row)) for row in own]


def index_of(keys: list[IntArray]) -> RadixIndex[int]:
    index: RadixIndex[int] = RadixIndex()
    for value, key in enumerate(keys):
        index.insert(key, value)
    return index


class TrieNode:
    """A trie with a dictionary per token, as the prompt caches of llama.cpp's users have."""

    __slots__ = ("children", "value")

    def __init__(self) -> None:
        self.children: dict[int, TrieNode] = {}
        self.value: int | None = None

    def insert(self, tokens: IntArray, value: int) -> None:
        node = self
        for token in tokens.tolist():
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = TrieNode()
            node = child
        node.value = value

    def longest_prefix(self, tokens: IntArray) -> tuple[int, int | None]:
        node, depth = self, 0
        best: tuple[int, int | None] = (0, None)
        # Its fastest form: tolist() gives plain ints at once, iterating over the array does not.
        for token in tokens.tolist():
            child = node.children.get(token)
            if child is None:
                break
            node, depth = child, depth + 1
            if node.value is not None:
                best = (depth, node.value)
        return best


@benchmark("radix-lookup")
def lookup() -> Iterator[Result]:
    keys = prompts(100, 6_000)
    queries = [key.copy() for key in keys]
    index = index_of(keys)
    trie = TrieNode()
    gc.disable()
    for value, key in enumerate(keys):
        trie.insert(key, value)
    gc.enable()
    if any(index.longest_prefix(q) != trie.longest_prefix(q) for q in queries):
        raise RuntimeError("the index and the trie disagree")

    def all_in_index() -> None:
        for query in queries:
            index.longest_prefix(query)

    def all_in_trie() -> None:
        for query in queries:
            trie.longest_prefix(query)

    index_s = median_time(all_in_index, 101) / len(queries)
    trie_s = median_time(all_in_trie, 7) / len(queries)
    yield Result(
        name="radix-lookup",
        value=trie_s / index_s,
        unit="x",
        target=50,
        better="higher",
        detail={
            "what": "longest_prefix of a stored prompt of 8,000 tokens, 100 prompts sharing 2,000,"
            " against a dictionary per token",
            "index_us": index_s * 1e6,
            "trie_us": trie_s * 1e6,
        },
    )


@benchmark("radix-memory")
def memory() -> Iterator[Result]:
    for name, n_prompts, n_own in (
        ("radix-memory", 100, 6_000),
        ("radix-memory-short", 10_000, 100),
    ):
        keys = prompts(n_prompts, n_own)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        index = index_of(keys)
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        n_tokens = N_COMMON + n_prompts * n_own
        yield Result(
            name=name,
            value=allocated / n_tokens,
            unit="bytes/token",
            target=16,
            better="lower",
            detail={
                "what": "bytes allocated by the index (tracemalloc), values not included, for each"
                " distinct token: what prompts share counts once",
                "prompts": n_prompts,
                "distinct_tokens": n_tokens,
                "allocated_bytes": allocated,
                "nbytes": index.nbytes,
            },
        )


def lookup_times(lookup: Callable[[IntArray], object], queries: list[IntArray]) -> Iterator[float]:
    """Yield the seconds of each lookup: of a query in the cache, for keys that may not be.

    Each query is copied to the same buffer before its lookup, as a prompt that was just
    tokenized is in the cache.
    """
    buffer = np.empty_like(queries[0])
    for query in queries:
        np.copyto(buffer, query)
        start = time.perf_counter()
        lookup(buffer)
        yield time.perf_counter() - start


def growth(method: str) -> tuple[float, float]:
    """Return the median seconds of a lookup among 100 and among 10,000 prompts."""
    indexes, queries = [], []
    for n_prompts in (100, 10_000):
        keys = prompts(n_prompts, N_OWN_OF_MANY)
        indexes.append(index_of(keys))
        if method == "longest_common_prefix":
            # Half of them leave after the common part, a tie of all keys, half in their own part.
            for number, key in enumerate(keys):
                key[N_COMMON + (500 if number % 2 else 0)] = N_VOCAB + 1
        # In random order the 10,000, which do not fit in the cache, are met cold.
        queries.append([keys[n] for n in np.random.default_rng(1).permutation(n_prompts)])
    few, many = (getattr(index, method) for index in indexes)
    seconds_few: list[float] = []
    seconds_many: list[float] = []
    # By turns, so that a change in the machine's speed meets both.
    for block in range(0, 10_000, 500):
        seconds_many += lookup_times(many, queries[1][block : block + 500])
        list(lookup_times(few, queries[0]))  # back into the cache
        for _ in range(5):
            seconds_few += lookup_times(few, queries[0])
    return statistics.median(seconds_few), statistics.median(seconds_many)


@benchmark("radix-scaling")
def scaling() -> Iterator[Result]:
    for method in ("longest_prefix", "longest_common_prefix"):
        few, many = growth(method)
        yield Result(
            name=f"radix-scaling-{method.replace('_', '-')}",
            value=many / few,
            unit="x",
            target=3,
            better="lower",
            detail={
                "what": "time of a lookup among 10,000 prompts over that among 100, random order,"
                f" query in the cache; 2,000 common tokens, {N_OWN_OF_MANY:,} own ones instead of"
                " 6,000 for the memory",
                "us_at_100": few * 1e6,
                "us_at_10000": many * 1e6,
            },
        )
