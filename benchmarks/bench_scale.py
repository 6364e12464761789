"""What docs/scale.md counts on: the room, the work and the lists of a shared tier, and a router."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

from benchmarks.harness import Result, benchmark
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.simulate.routing import PrefixRouter
from llamakeep.simulate.trace import NEVER, Request, made_up
from llamakeep.states import Block
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.redis import RedisStore
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import IntArray, PathNames
from llamakeep.tree import PrefixTree
from tests.redis_servers import Server, running

BLOCK = 256
N_SYSTEM = 1_590
N_TALKS = 1_500
_ROW_BYTES = 16


class Replica:
    """A prefix tree over little memory and a server."""

    def __init__(self, server: Server, memory_bytes: int) -> None:
        self._runtime = FakeRuntime("attention", n_ctx=8192)
        self.store = TieredStore(MemoryStore(memory_bytes), _opened(server))
        self._tree = PrefixTree(self.store, self._runtime.traits, segment_tokens=BLOCK)

    def serve(self, prompt: IntArray) -> None:
        """Evaluate what is not kept of a prompt, and keep it."""
        sequence = KeptSequence(self._runtime, self._tree)
        sequence.advance(prompt[sequence.resume(prompt).reused_tokens :])
        sequence.save()
        sequence.clear()
        self.store.flush()


def _opened(server: Server) -> RedisStore:
    return RedisStore(server.url, secret="s", timeout_s=10, connect_timeout_s=10)


def _put(store: RedisStore, path: PathNames, start: int, end: int) -> None:
    place = path.segment(start, end)
    if not store.put(place.name, _ROW_BYTES, lambda: np.zeros(_ROW_BYTES, np.uint8), place):
        raise RuntimeError("the server did not take a state")


def _ints(rng: np.random.Generator, n: int, most: int = 200) -> IntArray:
    return rng.integers(0, most, n).astype(np.int32)


@benchmark("scale-redis")
def of_the_server() -> Iterator[Result]:
    """Room for a state besides its rows, and the scripts of a turn."""
    rng = np.random.default_rng(0)
    with running() as server:
        client = server.client()
        store = _opened(server)
        empty, n_states = client.info("memory")["used_memory"], 3_000
        for _ in range(n_states // 30):
            path = PathNames(bytes(32), _ints(rng, 30 * BLOCK), BLOCK)
            for start in range(0, 30 * BLOCK, BLOCK):
                _put(store, path, start, start + BLOCK)
        used = client.info("memory")["used_memory"] - empty
        store.close()
        yield _result("state", used / n_states - _ROW_BYTES, "bytes", 4_096)
        replica = Replica(server, 1 << 30)
        prompt, spent = _ints(rng, 6_000), []
        for n_tokens in range(3_000, 6_000, 200):
            client.config_resetstat()
            replica.serve(prompt[:n_tokens])
            spent.append(client.info("commandstats")["cmdstat_eval"]["usec"])
        replica.store.close()
        client.close()
        yield _result("ledger, a turn", float(np.median(spent)), "us", 500)


@benchmark("scale-redis-lists")
def of_lists() -> Iterator[Result]:
    """Conversations that part at one place: lists, what is found, and what is answered."""
    for n_words in (200, 4):
        with running() as server:
            longest = _longest_list(server, n_words)
        yield _result(f"list, {n_words} words", longest, "records", 16)
    with running() as server:
        store, client = _opened(server), server.client()
        system = _ints(np.random.default_rng(0), N_SYSTEM)
        for n_before, n_talks in ((0, 2_000), (2_000, 4_000)):
            for talk in range(n_before, n_talks):
                _put(store, _path(system, talk), N_SYSTEM, _end(talk))
            wanted = range(0, n_talks, n_talks // 100 - 1)[:100]
            before = client.info("stats")["total_net_output_bytes"]
            found = sum(_finds(store, _path(system, talk), _end(talk)) for talk in wanted)
            n_bytes = (client.info("stats")["total_net_output_bytes"] - before) / len(wanted)
            share = found / len(wanted)
            yield _result(f"found in a list of {n_talks:,}", share, "of all", 1.0, higher=True)
            yield _result(f"answered from a list of {n_talks:,}", n_bytes, "bytes", 16_384)
        client.close()
        store.close()


def _longest_list(server: Server, n_words: int) -> int:
    replicas = [Replica(server, 400_000) for _ in range(2)]
    rng = np.random.default_rng(0)
    system = _ints(rng, N_SYSTEM)
    for talk in range(N_TALKS):
        words = _ints(np.random.default_rng(talk + 1), 110, n_words)
        replicas[talk % 2].serve(np.concatenate([system, [np.int32(7)], words]))
    client = server.client()
    lists = [key for key in client.scan_iter("llamakeep:i2:*", 1000) if key.count(b":") == 4]
    longest = max(client.zcard(key) for key in lists)
    client.close()
    for replica in replicas:
        replica.store.close()
    return int(longest)


def _path(system: IntArray, talk: int) -> PathNames:
    """A conversation behind a system prompt; all begin with the same word."""
    words = _ints(np.random.default_rng(talk + 1), 201, 30_000)
    return PathNames(bytes(32), np.concatenate([system, [np.int32(7)], words]), BLOCK)


def _end(talk: int) -> int:
    """Where what is kept of a conversation ends: each second time inside the block."""
    return 7 * BLOCK - 12 * (talk % 2)


def _finds(store: RedisStore, path: PathNames, end: int) -> bool:
    """Whether what is kept is found for a prompt that goes on."""
    place, whole = path.segment(N_SYSTEM, end), path.segment(N_SYSTEM, 7 * BLOCK)
    found = store.find([Block(whole.block, whole.origin, whole.tokens)])
    return any(record.name == place.name for record in found)


@benchmark("scale-router")
def of_a_router() -> Iterator[Result]:
    """What the prefix router takes for a request, and for a block that it remembers."""
    rng = np.random.default_rng(0)
    talks = [[*range(24), *rng.integers(1 << 40, 1 << 61, 24).tolist()] for _ in range(2_000)]
    requests = [_request(ids) for ids in talks]
    router = PrefixRouter(16)
    begin = time.process_time()
    for request in requests:
        router.route(request)
    spent = (time.process_time() - begin) / len(requests)
    yield _result("a request", spent * 1e6, "us", 100, name="scale-router")
    tracemalloc.start()
    fresh = PrefixRouter(1, blocks=1 << 20)
    for request in requests:
        fresh.route(request)
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    yield _result("a block", n_bytes / fresh.remembered, "bytes", 200, name="scale-router")


def _request(ids: list[int]) -> Request:
    blocks, sizes = np.array(ids, np.int64), np.full(len(ids), 64, np.int32)
    uses = np.full(len(ids), NEVER, np.int32)
    return Request(0.0, made_up(blocks, sizes), blocks, sizes, 64 * len(ids), uses)


def _result(
    what: str,
    value: float,
    unit: str,
    target: float,
    *,
    higher: bool = False,
    name: str = "scale-redis",
) -> Result:
    return {
        "name": f"{name}-{what}",
        "value": value,
        "unit": unit,
        "target": target,
        "better": "higher" if higher else "lower",
        "detail": {},
    }
