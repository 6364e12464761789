"""What the store on a Redis server does besides the contract: what goes wrong out there."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hiredis
import numpy as np
import pytest
from blake3 import blake3

from llamakeep.errors import IntegrityError, InvalidValue, StoreError
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.states import Block, Buffer
from llamakeep.stores import envelope
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.redis import RedisStore
from llamakeep.stores.redis.index import spot_of
from llamakeep.stores.redis.ledger import Entry
from llamakeep.stores.redis.lookup import NEIGHBOURS
from llamakeep.stores.redis.namespaces import MAX_DESCRIBED
from llamakeep.stores.tiered import TieredStore
from llamakeep.tiers import TierSettings
from llamakeep.tokens import IntArray, PathNames, Place
from llamakeep.tree import PrefixTree
from tests.finding import usable
from tests.redis_servers import Cluster, Server, free_port, need_redis_server, running, wait_until

BLOCK = 16
NAMESPACE = bytes(range(32))
NOWHERE = "redis://127.0.0.1:9"

numbers = itertools.count()


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make() -> Iterator[Callable[..., RedisStore]]:
    """`make(url, **options)` makes a store that is closed when the test ends.

    Without a prefix it gets a new one, and without a timeout a patient one.
    """
    made: list[RedisStore] = []

    def make(url: str, **options: Any) -> RedisStore:
        defaults: dict[str, Any] = {"secret": "hush", "timeout_s": 10.0, "connect_timeout_s": 10.0}
        defaults["prefix"] = f"test-{next(numbers)}"
        made.append(RedisStore(url, **(defaults | options)))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make: Callable[..., RedisStore], redis_url: str) -> RedisStore:
    """An empty store of 1 MiB."""
    return make(redis_url, capacity_bytes=1 << 20)


@pytest.fixture
def raw(redis_server: Server) -> Iterator[Any]:
    """redis-py's own client, for what others do to a server."""
    client = redis_server.client()
    yield client
    client.close()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may stop."""
    with running() as server:
        yield server


def path_of(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> PathNames:
    return PathNames(namespace, np.array(tokens, np.int32), BLOCK)


def blocks_of(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> list[Block]:
    """The blocks that may hold something for a prompt."""
    array = np.array(tokens, np.int32)
    path = path_of(tokens, namespace)
    origins = range(0, array.size, BLOCK)
    return [Block(path.block(origin), origin, array[origin : origin + BLOCK]) for origin in origins]


def data_of(name: bytes, n_bytes: int) -> Buffer:
    """Bytes that only this name has."""
    return np.frombuffer(blake3(name).digest(length=n_bytes), np.uint8)


def put(store: RedisStore, place: Place, n_bytes: int = 500) -> bytes:
    assert store.put(place.name, n_bytes, lambda: data_of(place.name, n_bytes), place)
    return place.name


def holds(store: RedisStore, name: bytes, n_bytes: int = 500) -> bool:
    data = store.get(name)
    return data is not None and np.array_equal(data, data_of(name, n_bytes))


def never() -> Buffer:
    raise AssertionError("a blob was produced that nobody needs")


def name_of(word: str) -> bytes:
    return blake3(word.encode()).digest()


def asked(store: RedisStore) -> int:
    """How often a caller waited for the server."""
    return store.counters.get("round_trips", 0)


def look_again(store: RedisStore) -> str:
    """Do now what the prober's thread does when it wakes, and say what the breaker thinks then."""
    store._link.prober.look()
    return store.state


def use(store: RedisStore) -> None:
    """Do everything that a tree does with a tier, none of which may raise."""
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    assert store.find(blocks_of(range(BLOCK))) == []
    assert list(store.get_many([place.name, name_of("b")])) == [None, None]
    assert store.get(place.name) is None
    assert place.name not in store
    assert store.put(place.name, 100, never, place) is False
    assert store.delete(place.name) is False
    store.touch([place.name])
    store.supersede(place.name, name_of("b"))
    store.introduce(NAMESPACE, {"model": "m"})
    store.forget_namespaces([NAMESPACE])
    assert store.namespaces() == {}
    assert (len(store), list(store), store.entries()) == (0, [], [])
    assert store.used_bytes >= 0
    store.stats()


def run_ci(directory: Path, *there: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run where only some programs are installed; `make` says what it was told."""
    root = Path(__file__).parents[1]
    programs = {
        "make": 'echo "make $1, CI=$CI"',
        "id": "echo 1000",
        "apt-get": "exit 9",
        "python3": "exit 0",
    }
    directory.mkdir()
    for name in ("bash", "dirname", "env"):
        (directory / name).symlink_to(str(shutil.which(name)))
    for name in (*programs, "g++", "chromium", *there):
        program = directory / name
        program.write_text(f"#!{shutil.which('bash')}\n{programs.get(name, '')}\n")
        program.chmod(0o755)
    return subprocess.run(
        [str(root / ".ci" / "run")],
        env={"PATH": str(directory), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_ci_needs_a_redis_server_and_says_that_it_is_ci(tmp_path: Path) -> None:
    missing = run_ci(tmp_path / "without")
    assert missing.returncode != 0
    assert "only root can install it here, with apt-get: redis-server" in missing.stderr
    assert missing.stdout == ""  # nothing was skipped, because nothing ran
    there = run_ci(tmp_path / "with", "redis-server")
    assert (there.returncode, there.stdout) == (0, "make lint, CI=1\nmake test, CI=1\n")
    there = run_ci(tmp_path / "told", "redis-server", CI="true")
    assert there.stdout.endswith("make test, CI=true\n")


def test_a_missing_server_skips_tests_but_not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="redis-server is not installed"):
        need_redis_server()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="redis-server is not installed"):
        need_redis_server()


# -- what it is made with --------------------------------------------------------------------------


def test_a_secret_is_needed_unless_someone_says_that_it_is_not() -> None:
    with pytest.raises(InvalidValue, match=r"127\.0\.0\.1:9.*secret"):
        RedisStore(NOWHERE)
    with pytest.raises(InvalidValue, match="secret"):
        RedisStore(NOWHERE, secret="")
    RedisStore(NOWHERE, allow_unauthenticated=True).close()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes.*-1"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"min_bytes_per_s": 0}, "min_bytes_per_s"),
        ({"lease_s": 0}, "lease_s"),
        ({"max_blob_bytes": -1}, "max_blob_bytes"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"chunk_bytes": 1 << 30}, "chunk_bytes"),
        ({"cooldown_s": 0}, "cooldown_s"),
        ({"prefix": ""}, "prefix"),
        ({"prefix": "a:b"}, "prefix"),
        ({"prefix": "a{b}"}, "prefix"),
        ({"prefix": "a*"}, "prefix"),
    ],
)
def test_what_cannot_be_meant_is_an_error(options: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidValue, match=names):
        RedisStore(NOWHERE, secret="hush", **options)


def test_without_redis_py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llamakeep.stores.redis.link", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreError, match=r"pip install llamakeep\[redis\]"):
        RedisStore(NOWHERE, secret="hush")


def test_settings_say_how_keys_begin(redis_url: str) -> None:
    for environment, prefix in (({}, "llamakeep"), ({"LLAMAKEEP_REDIS_PREFIX": "fleet"}, "fleet")):
        settings = TierSettings.resolve(redis_url=redis_url, secret="s", environment=environment)
        (shared,) = settings.open(1000).below
        assert isinstance(shared, RedisStore)
        assert shared._keys.prefix == prefix
        shared.close()
    given = TierSettings.resolve(redis_prefix="given", environment=environment)
    assert given.redis_prefix == "given"
    with pytest.raises(InvalidValue, match="redis_prefix must be text, not int"):
        TierSettings.resolve(redis_prefix=7, environment={})  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"prefix must be .*'a b'"):
        TierSettings.resolve(
            redis_url=redis_url, redis_prefix="a b", secret="s", environment={}
        ).open(0)


def test_redis_py_is_imported_only_when_a_store_is_made() -> None:
    code = "import llamakeep.stores.redis, sys; raise SystemExit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_making_one_connects_to_nothing(make: Callable[..., RedisStore]) -> None:
    assert make(NOWHERE).counters == {}


def test_no_secret_and_no_password_is_shown(make: Callable[..., RedisStore]) -> None:
    store = make("redis://me:pass-word@127.0.0.1:9/0", prefix="p")
    assert repr(store) == "RedisStore('redis://***@127.0.0.1:9/0', prefix='p', closed)"
    assert "pass-word" not in str(store.stats())


# -- reading and writing ---------------------------------------------------------------------------


def test_fault_36_a_blob_is_a_view_of_what_came_from_the_server(store: RedisStore) -> None:
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    data = store.get(name)
    assert data is not None
    owner = data
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    assert isinstance(owner, bytes)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("n_chunks", [1, 2, 5])
@pytest.mark.parametrize("chunk_bytes", [1, 1000])
def test_fault_41_bytes_come_back_however_they_are_cut(
    make: Callable[..., RedisStore],
    redis_url: str,
    raw: Any,
    chunk_bytes: int,
    n_chunks: int,
    more: int,
) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    header = envelope.header_bytes(place)
    step = max(chunk_bytes, header)
    n_bytes = max(0, n_chunks * step - header + more)
    store = make(redis_url, chunk_bytes=chunk_bytes, capacity_bytes=1 << 20, prefix="cut")
    put(store, place, n_bytes)
    keys = store._keys.chunks(place.name, -(-(header + n_bytes) // step))
    assert sorted(key.decode() for key in raw.keys("cut:b:*")) == sorted(keys)
    assert store.used_bytes == header + n_bytes == sum(raw.strlen(key) for key in keys)
    store.check()
    # Whoever reads cuts otherwise, and may not know the size.
    others = make(redis_url, chunk_bytes=777, prefix="cut")
    for reader in (store, others):
        assert holds(reader, place.name, n_bytes)
    assert others.delete(place.name)
    assert raw.keys("cut:b:*") == []
    assert store.used_bytes == 0
    store.check()
    store.clear()


def test_a_large_blob_goes_through_a_pipe_with_many_others(store: RedisStore) -> None:
    path = path_of(range(64 * BLOCK))
    places = [path.segment(origin, origin + BLOCK) for origin in range(0, 64 * BLOCK, BLOCK)]
    big = name_of("big")
    assert store.put(big, 900_000, lambda: data_of(big, 900_000))
    for place in places:
        put(store, place, 100)
    names = [place.name for place in places]
    names[30:30] = [big, name_of("missing")]
    found = list(store.get_many(names))
    assert [data is not None for data in found] == [True] * 31 + [False] + [True] * 34
    for name, data in zip(names, found, strict=True):
        if data is not None:
            assert np.array_equal(data, data_of(name, data.nbytes))


def test_blobs_above_the_limit_are_refused_and_not_believed_in(
    make: Callable[..., RedisStore], redis_url: str
) -> None:
    path = path_of(range(BLOCK))
    small = make(redis_url, max_blob_bytes=100, prefix="limit")
    large = make(redis_url, prefix="limit")
    place = path.segment(0, BLOCK)
    assert small.put(place.name, 101, never, place) is False
    assert small.counters["refused_size"] == 1
    put(large, place, 101)
    assert small.find(blocks_of(range(BLOCK))) == []
    assert small.counters["rejected_record"] == 1
    assert small.get(place.name) is None
    assert large.get(place.name) is None  # what nobody can have written is dropped
    large.clear()


def test_a_blob_that_is_there_is_not_produced_again_but_found_again(
    store: RedisStore, raw: Any
) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK - 4)
    put(store, place)
    for key in store._index.keys_of(spot_of(place)):
        raw.delete(key)
    assert store.find(blocks_of(range(BLOCK))) == []
    assert store.put(place.name, 500, never, place)
    assert [record.name for record in store.find(blocks_of(range(BLOCK)))] == [place.name]
    assert all(raw.pttl(key) > 0 for key in store._index.keys_of(spot_of(place)))


def test_with_no_limit_the_server_decides(make: Callable[..., RedisStore], redis_url: str) -> None:
    store = make(redis_url)
    assert store.capacity_bytes == sys.maxsize
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    assert store.used_bytes == sum(entry.n_bytes for entry in store.entries()) > 500
    assert [entry.name for entry in store.entries()] == [name]
    assert store.stats()["capacity_bytes"] is None
    store.check()
    store.clear()


# -- finding ---------------------------------------------------------------------------------------


def brute_force(places: Sequence[Place], tokens: IntArray) -> set[bytes]:
    """The states in a block of the prompt whose span starts with the prompt's token there."""
    blocks = {block.name: block for block in blocks_of(tokens.tolist())}
    return {
        place.name
        for place in places
        if place.block in blocks
        and place.start < tokens.size
        and place.first == int(tokens[place.start])
    }


@pytest.mark.parametrize("where", ["redis_url", "redis_url?protocol=3", "redis_cluster_url"])
def test_find_is_brute_force(
    make: Callable[..., RedisStore], request: pytest.FixtureRequest, where: str
) -> None:
    fixture, _, options = where.partition("?")
    url = request.getfixturevalue(fixture) + (f"?{options}" if options else "")
    store = make(url)
    rng = np.random.default_rng(7)
    prompts: list[IntArray] = [rng.integers(0, 3, 60).astype(np.int32)]
    places: dict[bytes, Place] = {}
    for _ in range(25):
        # Branch off somewhere, into a vocabulary so small that spans begin alike.
        cut = int(rng.integers(0, 50))
        parent = prompts[int(rng.integers(len(prompts)))]
        tail = rng.integers(0, 3, int(rng.integers(1, 40))).astype(np.int32)
        prompt = np.concatenate([parent[:cut], tail])
        prompts.append(prompt)
        path = PathNames(NAMESPACE, prompt, BLOCK)
        position = 0
        while position < prompt.size:
            limit = min(position - position % BLOCK + BLOCK, prompt.size)
            end = int(rng.integers(position + 1, limit + 1))
            spans = [path.segment(position, end)]
            if rng.integers(2):
                spans.append(path.checkpoint(position, end))
            for place in spans:
                if place.name not in places:
                    places[place.name] = place
                    put(store, place, 20)
            position = end
    reader = make(url, prefix=store._keys.prefix)
    for prompt in [*prompts, rng.integers(0, 3, 40).astype(np.int32)]:
        before = asked(reader)
        blocks = blocks_of(prompt.tolist())
        found = reader.find(blocks)
        assert asked(reader) - before <= 3
        names = {record.name for record in found}
        assert names <= brute_force(list(places.values()), prompt)
        assert len(names) == len(found)
        assert usable([places[name] for name in names], blocks) == usable(places.values(), blocks)
        for record in found:
            place = places[record.name]
            span = place.tokens[place.start - place.origin :]
            assert (record.kind, record.start, record.end) == (place.kind, place.start, place.end)
            assert np.array_equal(record.tokens, span)
            assert (record.n_bytes, record.tier) == (20, "shared")
    store.check()
    store.clear()


def enter(store: RedisStore, raw: Any, places: Iterable[Place]) -> None:
    """Put states of 10 bytes, many at once: nothing is counted."""
    with raw.pipeline(transaction=False) as pipe:
        for place in places:
            data = data_of(place.name, 10)
            blob = envelope.wrap(place.name, data, place, envelope.seal_key("hush"))
            pipe.set(store._keys.chunk(place.name, 0), blob + data.tobytes())
            for command in store._index.entering(spot_of(place), 1 << 42):
                pipe.execute_command(*command)
        pipe.execute()


def sent(raw: Any) -> int:
    """Bytes that the server has sent, to all together."""
    n_bytes: int = raw.info("stats")["total_net_output_bytes"]
    return n_bytes


@pytest.mark.parametrize("n_tokens", [BLOCK - 9, BLOCK - 11], ids=["full", "tails"])
def test_fault_65_what_a_lookup_brings_does_not_follow_what_branches_off(
    store: RedisStore, raw: Any, n_tokens: int
) -> None:
    """Conversations branch off at one point, with the same token: of any number, each is found."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 200, (10_000, n_tokens)).tolist()
    places = [path_of([*range(8), 7, *talk]).segment(8, 9 + n_tokens) for talk in words]
    put(store, path_of(range(BLOCK)).segment(0, 8), 100)
    brought = []
    for begin, end in ((0, 100), (100, 10_000)):
        enter(store, raw, places[begin:end])
        before = sent(raw)
        for place, talk in zip(places[:end:50], words[:end:50], strict=True):
            trips = asked(store)
            prompt = [*range(8), 7, *talk, *range(40)]
            names = {record.name for record in store.find(blocks_of(prompt))}
            assert place.name in names
            assert asked(store) - trips <= 3
            assert len(names) <= 2 + 2 * NEIGHBOURS
        brought.append((sent(raw) - before) / len(places[:end:50]))
    assert raw.zcard(store._keys.listed(places[0].block, 8, spot_of(places[0]).branch)) > 9_000
    assert brought[1] < 2 * brought[0] < 20_000
    # One that parts with another on the way finds what they have in common.
    assert n_tokens == BLOCK - 11 or alike(store, places, [*range(8), 7, *words[77][:4], 500])
    store.clear()


def test_conversations_behind_one_system_prompt_find_their_own(
    make: Callable[..., RedisStore], redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 that were saved by replicas that knew of nobody else's, so that all are in one list."""
    n_talks, store = 2_000, make(redis_url)
    runtime = FakeRuntime("attention", n_ctx=512)
    rng = np.random.default_rng(5)
    system, words = rng.integers(0, 200, 300), rng.integers(0, 4, (n_talks, 200))
    talks = [np.concatenate([system, [7], talk]).astype(np.int32) for talk in words]

    def replica() -> tuple[TieredStore, PrefixTree]:
        tiers = TieredStore(MemoryStore(1 << 20), store)
        return tiers, PrefixTree(tiers, runtime.traits, segment_tokens=256)

    with monkeypatch.context() as patched:
        patched.setattr(store, "close", lambda: None)
        for talk in talks:
            tiers, tree = replica()
            sequence = KeptSequence(runtime, tree)
            sequence.advance(talk[:408])
            sequence.save()
            sequence.clear()
            assert tiers.flush()
            tiers.close()
    assert len(store) == 1 + n_talks
    place = PathNames(b"", talks[0], 256).segment(256, 408)
    listed = store._keys.listed(place.block, 256, spot_of(place).branch)
    assert raw.zcard(listed) == n_talks
    reuses = []
    for talk in talks[::40]:
        tiers, tree = replica()
        sequence = KeptSequence(runtime, tree)
        reuse = sequence.resume(talk[:480])
        reuses.append((reuse.tier, reuse.reused_tokens))
        sequence.clear()
        with monkeypatch.context() as patched:
            patched.setattr(store, "close", lambda: None)
            tiers.close()
    assert set(reuses) == {("shared", 408)}
    store.check()
    store.clear()


def alike(store: RedisStore, places: Sequence[Place], prompt: Sequence[int]) -> bool:
    """Whether as much of a prompt is found as there is."""
    blocks, by_name = blocks_of(prompt), {place.name: place for place in places}
    names = {record.name for record in store.find(blocks)} & by_name.keys()
    told = usable([by_name[name] for name in names], blocks)
    return bool(told) and told == usable(places, blocks)


def test_of_states_that_are_in_no_list_those_at_known_positions_are_found(
    store: RedisStore, raw: Any
) -> None:
    """Full segments and checkpoints need no list: it may be lost, or give them up."""
    path = path_of(range(3 * BLOCK))
    places = [path.segment(0, 8), path.segment(8, BLOCK), path.checkpoint(8, 12)]
    places += [path.segment(BLOCK, 2 * BLOCK), path.checkpoint(BLOCK, 2 * BLOCK)]
    for place in places:
        put(store, place)
    for place in places:
        spot = spot_of(place)
        raw.delete(store._keys.listed(spot.block, spot.position, spot.branch))
    before = asked(store)
    found = {record.name for record in store.find(blocks_of(range(3 * BLOCK)))}
    assert found == {place.name for place in places[1:]}
    assert asked(store) - before == 2


def test_round_trips_of_a_look_up(store: RedisStore) -> None:
    def trips(prompt: Iterable[int]) -> tuple[int, int]:
        before = asked(store)
        found = store.find(blocks_of([*prompt]))
        return len(found), asked(store) - before

    path = path_of(range(3 * BLOCK))
    assert trips(range(3 * BLOCK)) == (0, 1)
    put(store, path.segment(0, BLOCK))
    put(store, path.segment(BLOCK, 2 * BLOCK))
    assert trips(range(3 * BLOCK)) == (2, 1)
    assert trips([*range(8), *range(50)]) == (1, 2)  # parts with a whole block on the way
    put(store, path.segment(2 * BLOCK, 2 * BLOCK + 4))
    assert trips(range(3 * BLOCK)) == (3, 2)
    put(store, path.checkpoint(2 * BLOCK, 2 * BLOCK + 4))
    assert trips(range(3 * BLOCK)) == (4, 2)
    put(store, path.segment(2 * BLOCK + 4, 2 * BLOCK + 8))
    assert trips(range(3 * BLOCK)) == (5, 3)
    # What ends inside a block is found as fast near both ends of a long prompt, else a trip later.
    tail = path_of(range(30 * BLOCK)).segment(10 * BLOCK, 10 * BLOCK + 4)
    put(store, tail)
    for n_blocks, n_trips in ((11, 2), (22, 2), (23, 3), (30, 3)):
        blocks = blocks_of(range(n_blocks * BLOCK))[3:]
        before = asked(store)
        assert [record.name for record in store.find(blocks)] == [tail.name]
        assert asked(store) - before == n_trips


def test_what_the_server_dropped_is_not_found(store: RedisStore, raw: Any) -> None:
    path = path_of(range(4 * BLOCK))
    places = [path.segment(0, BLOCK), path.segment(BLOCK, BLOCK + 4)]
    places += [path.segment(BLOCK + 4, 2 * BLOCK - 4), path.checkpoint(BLOCK + 4, 2 * BLOCK)]
    places += [path.segment(2 * BLOCK, 3 * BLOCK)]
    names = [put(store, place) for place in places]
    blocks = blocks_of(range(4 * BLOCK))
    assert {record.name for record in store.find(blocks)} == set(names)
    gone = {names[0], names[2]}
    for name in gone:
        raw.delete(store._keys.chunk(name, 0))
    before = asked(store)
    assert {record.name for record in store.find(blocks)} == set(names) - gone
    assert asked(store) - before <= 3 + 1  # one that takes out what was listed
    assert store.counters["misses_gone"] == 1
    spot = spot_of(places[2])
    assert not raw.exists(store._keys.listed(spot.block, spot.position, spot.branch))
    before = asked(store)
    assert {record.name for record in store.find(blocks)} == set(names) - gone
    assert asked(store) - before <= 3
    assert store.counters["misses_gone"] == 1
    before = asked(store)
    assert store.find(blocks_of([77, *range(2 * BLOCK)])) == []
    assert asked(store) - before == 1
    put(store, places[0])
    assert names[0] in {record.name for record in store.find(blocks)}


def test_an_empty_prompt_asks_nobody(store: RedisStore) -> None:
    assert store.find([]) == []
    assert store.find([Block(NAMESPACE, 0, np.empty(0, np.int32))]) == []
    assert list(store.get_many([])) == []
    store.touch([])
    assert asked(store) == 0


def test_fault_47_tenants_with_other_salts_share_nothing(store: RedisStore) -> None:
    tokens = list(range(BLOCK))
    ours, theirs = blake3(b"salt a").digest(), blake3(b"salt b").digest()
    put(store, path_of(tokens, ours).segment(0, BLOCK))
    assert len(store.find(blocks_of(tokens, ours))) == 1
    # Not even the keys that are asked for are the same, so there is nothing to time.
    assert store.find(blocks_of(tokens, theirs)) == []
    assert path_of(tokens, theirs).segment(0, BLOCK).name not in store


def test_forged_records_are_ignored_or_lead_to_nothing(store: RedisStore, raw: Any) -> None:
    place = path_of(range(BLOCK)).segment(4, BLOCK - 4)
    put(store, place)
    spot = spot_of(place)
    key, marks = store._index.keys_of(spot)
    good = spot.member
    span = good[: BLOCK - 8]
    other = path_of([*range(4), 4, *range(90, 99)]).segment(4, BLOCK - 4)
    put(store, other)
    nonsense = [
        b"",
        good[:-1],
        good + b"\0",
        good[:-1] + b"\x02",
        good[-33:],
        span[:-1] + good[-33:],  # another length
        span[:-1] + b"\0" + good[-33:],  # other tokens
        span + other.name + b"\0",  # another's name
        span + place.name + b"\1",  # not where its block ends
    ]
    # Some at a time: no more than a few beside the prompt are read at all.
    for value in nonsense:
        raw.zadd(key, {value: 0})
        found = {record.name for record in store.find(blocks_of(range(BLOCK)))}
        assert place.name in found <= {place.name, other.name}
        raw.zrem(key, value)
    # One may have meant another state, which is not there.
    assert (store.counters["rejected_record"], store.counters["misses_gone"]) == (8, 1)
    raw.zadd(
        marks, {b"": 5, b"s": 5, b"x5": 5, b"s-5": 5, b"s" + b"1" * 30: 5, b"s77": 5, b"c0": 0}
    )
    assert {record.name for record in store.find(blocks_of(range(BLOCK)))} <= {
        place.name,
        other.name,
    }
    assert store.counters["rejected_record"] == 8 + 5
    # Nothing is under that name; whoever notices takes the record out.
    believed = name_of("believed")
    raw.zadd(key, {span + believed + b"\0": 0})
    assert place.name in {record.name for record in store.find(blocks_of(range(BLOCK)))}
    assert raw.zscore(key, span + believed + b"\0") is None
    # Something is under it, and is not what it should be.
    raw.zadd(key, {span + believed + b"\0": 0})
    raw.set(store._keys.chunk(believed, 0), raw.get(store._keys.chunk(place.name, 0)))
    assert believed not in {record.name for record in store.find(blocks_of(range(BLOCK)))}
    first, second = store.get_many([believed, place.name])
    assert first is None
    assert second is not None
    assert store.counters["rejected_name"] == 1
    assert holds(store, place.name)


def test_what_is_under_a_name_and_is_something_else_is_dropped_unless_it_is_anothers(
    store: RedisStore, raw: Any
) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(store, place)
    key = store._keys.chunk(place.name, 0)
    whole = raw.get(key)
    changes = {
        "foreign": b"a blob",
        "truncated": whole[:100],
        "name": whole[:24] + bytes(32) + whole[56:],
        "version": whole[:8] + b"\xff" + whole[9:],
    }
    changes["foreign"] = b"a blob" * 50
    for reason, value in changes.items():
        raw.set(key, value)
        assert store.find(blocks_of(range(BLOCK))) == []
        assert store.counters[f"rejected_{reason}"] == 1
        assert raw.exists(key) == (reason == "version")


def test_a_checkpoint_that_lies_about_where_it_is_is_not_offered(
    store: RedisStore, raw: Any
) -> None:
    place = path_of(range(2 * BLOCK)).checkpoint(BLOCK + 4, BLOCK + 8)
    put(store, place)
    blocks = blocks_of(range(2 * BLOCK))
    (record,) = store.find(blocks)
    assert (record.start, record.end) == (BLOCK + 4, BLOCK + 8)
    key = store._keys.chunk(place.name, 0)
    whole = raw.get(key)
    lies = [
        whole[:96] + bytes(32) + whole[128:],
        whole[:128] + struct.pack("<Q", 0) + whole[136:],
        whole[:136] + struct.pack("<Q", BLOCK - 1) + whole[144:],
        whole[:136] + struct.pack("<Q", BLOCK + 8) + whole[144:],
    ]
    for index, value in enumerate(lies, 1):
        raw.set(key, value)
        assert store.find(blocks) == []
        assert store.counters["rejected_record"] == index


@pytest.mark.parametrize("n_bytes", [0, 1, 499, 501, 100_000])
def test_a_header_that_lies_about_the_size_does_no_harm(
    store: RedisStore, raw: Any, n_bytes: int
) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(store, place)
    key = store._keys.chunk(place.name, 0)
    whole = raw.get(key)
    raw.set(key, whole[:16] + struct.pack("<Q", n_bytes) + whole[24:])
    (record,) = store.find(blocks_of(range(BLOCK)))
    assert record.n_bytes == n_bytes
    assert store.get(place.name) is None
    put(store, place)
    assert holds(store, place.name)


def test_positions_of_a_block_are_read_in_part(store: RedisStore, raw: Any) -> None:
    tokens = np.arange(3000, dtype=np.int32)
    path = PathNames(NAMESPACE, tokens, 4096)
    for start in (1, 900, 2900):
        put(store, path.segment(start, start + 50))
    raw.zadd(store._keys.marks(path.block(0)), {f"s{at}": at for at in range(1, 3000)})
    found = store.find([Block(path.block(0), 0, tokens)])
    assert {record.start for record in found} == {1, 900}


def test_a_list_that_is_too_long_gives_up_what_names_find_and_then_what_is_old(
    store: RedisStore, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamakeep.stores.redis.writer.MAX_RECORDS", 40)
    full, old, new = (
        [path_of([0, index, which, *range(BLOCK - 3)]).segment(0, end) for index in range(n_places)]
        for which, end, n_places in ((1, BLOCK, 30), (2, BLOCK - 4, 30), (3, BLOCK - 4, 80))
    )
    enter(store, raw, [*full, *old])
    spot = spot_of(full[0])
    key = store._keys.listed(spot.block, spot.position, spot.branch)
    for place in full:
        raw.pexpire(store._keys.chunk(place.name, 0), 90_000_000)
    for place in old:
        raw.pexpire(store._keys.chunk(place.name, 0), 50_000)
    for place in new:
        put(store, place)
        assert raw.zcard(key) <= 61
    left = raw.zrange(key, 0, -1)
    assert len(left) == 40
    assert sum(spot_of(place).member in left for place in full) == 0
    # By chance, as the server itself does: nearly all that is left is new.
    assert sum(spot_of(place).member in left for place in old) <= 4
    # What is not listed is there all the same, and those who write it again have it listed.
    lost = next(place for place in new if spot_of(place).member not in left)
    assert store.put(lost.name, 500, never, lost)
    assert raw.zscore(key, spot_of(lost).member) == 0
    assert raw.zcard(key) <= 41


def test_records_whose_blobs_are_gone_are_weeded_by_those_who_write(
    store: RedisStore, raw: Any
) -> None:
    """Conversations that were begun alike and dropped do not pile up where others go on."""
    for index in range(150):
        prompt = [0, index, *range(BLOCK - 2)]
        place = path_of(prompt).segment(0, BLOCK)
        put(store, place, 10)
        raw.delete(store._keys.chunk(place.name, 0))  # as the server does when it needs room
    spot = spot_of(place)
    assert raw.zcard(store._keys.listed(spot.block, spot.position, spot.branch)) < 50


# -- what is not what was stored -------------------------------------------------------------------

SEALED = 144 + 4 * BLOCK
REGIONS = {
    "magic": (0, 0x40, "foreign"),
    "version": (8, 0x40, "version"),
    "flags": (10, 0x40, "corrupt"),
    "flags, sealed": (10, 0x01, "secret"),
    "header bytes": (12, 0x40, "corrupt"),
    "payload bytes": (16, 0x40, "corrupt"),
    "payload bytes, more": (17, 0x40, "truncated"),
    "payload bytes, high": (22, 0x40, "corrupt"),
    "name": (24, 0x40, "name"),
    "kind": (56, 0x40, "corrupt"),
    "kind, the other": (56, 0x03, "name"),
    "closes": (57, 0x01, "corrupt"),
    "key": (58, 0x40, "secret"),
    "key, end": (63, 0x40, "secret"),
    "namespace": (64, 0x40, "corrupt"),
    "block": (96, 0x40, "name"),
    "origin": (128, 0x40, "corrupt"),
    "start": (136, 0x40, "corrupt"),
    "start, a little": (136, 0x01, "name"),
    "first token": (144, 0x40, "name"),
    "last token": (SEALED - 1, 0x40, "name"),
    "seal": (SEALED, 0x40, "corrupt"),
    "seal, end": (SEALED + 31, 0x40, "corrupt"),
    "payload": (SEALED + 32, 0x40, "corrupt"),
    "payload, middle": (SEALED + 32 + 250, 0x01, "corrupt"),
    "payload, end": (SEALED + 32 + 499, 0x80, "corrupt"),
}
"""Where a byte is, which bits are flipped there, and what is said of it. Version and secret are
believed: a value that is only said to be someone else's is left to them."""


@pytest.mark.parametrize("region", REGIONS)
def test_fault_5_a_changed_byte_anywhere_is_a_miss_with_a_reason(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture, region: str
) -> None:
    offset, bits, reason = REGIONS[region]
    path = path_of(range(2 * BLOCK))
    bad, good = path.segment(0, BLOCK), path.segment(BLOCK, 2 * BLOCK)
    put(store, bad)
    put(store, good)
    key = store._keys.chunk(bad.name, 0)
    (byte,) = raw.getrange(key, offset, offset)
    raw.setrange(key, offset, bytes([byte ^ bits]))
    found = list(store.get_many([bad.name, good.name]))
    assert found[0] is None
    assert found[1] is not None
    rejected = {kind: n for kind, n in store.counters.items() if kind.startswith("rejected_")}
    assert rejected == {f"rejected_{reason}": 1}
    assert bad.name.hex()[:16] in caplog.text
    if reason in ("secret", "version"):
        # Whoever can read it may keep it.
        assert raw.exists(key)
        assert store.put(bad.name, 500, never, bad) is False
        return
    assert not raw.exists(key)
    store.check()
    assert [r.name for r in store.find(blocks_of(range(2 * BLOCK)))] == [good.name]
    put(store, bad)
    assert holds(store, bad.name)


@pytest.mark.parametrize("kept", [0, 1, 143, 144, 200, -1])
def test_fault_44_a_shortened_value_is_a_miss(store: RedisStore, raw: Any, kept: int) -> None:
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    key = store._keys.chunk(name, 0)
    raw.set(key, raw.get(key)[:kept])
    assert store.get(name) is None
    assert store.counters["rejected_truncated" if kept else "misses_gone"] == 1
    assert kept == 0 or not raw.exists(key)
    put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    assert holds(store, name)
    store.check()


def test_fault_44_a_value_with_more_behind_it_is_a_miss(store: RedisStore, raw: Any) -> None:
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    raw.append(store._keys.chunk(name, 0), b"x" * 1000)
    assert store.get(name) is None
    assert store.counters["rejected_corrupt"] == 1
    assert len(store) == 0
    store.check()


def test_fault_45_a_pickle_in_its_place_is_not_looked_at(store: RedisStore, raw: Any) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    key = store._keys.chunk(place.name, 0)
    raw.set(key, b"\x80\x04cposix\nsystem\n(S'false'\ntR." * 20)
    assert store.get(place.name) is None
    assert store.counters["rejected_foreign"] == 1
    assert not raw.exists(key)
    raw.set(key, b"\x80\x04cposix\nsystem\n(S'false'\ntR." * 20)
    put(store, place)
    assert holds(store, place.name)
    store.check()


def test_swapped_values_are_misses(store: RedisStore, raw: Any) -> None:
    path = path_of(range(2 * BLOCK))
    names = [put(store, path.segment(at, at + BLOCK)) for at in (0, BLOCK)]
    keys = [store._keys.chunk(name, 0) for name in names]
    values = raw.mget(keys)
    raw.mset(dict(zip(keys, reversed(values), strict=True)))
    assert list(store.get_many(names)) == [None, None]
    assert store.counters["rejected_name"] == 2
    assert len(store) == 0


def test_a_value_of_another_type_is_a_miss(store: RedisStore, raw: Any) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(store, place)
    for key in (store._keys.chunk(place.name, 0), *store._index.keys_of(spot_of(place))):
        raw.delete(key)
        raw.rpush(key, "a list")
    assert store.find(blocks_of(range(BLOCK))) == []
    assert store.get(place.name) is None
    assert store.put(place.name, 500, lambda: data_of(place.name, 500), place) is False
    assert store.counters["errors_other"] > 0
    assert store.state == "closed"


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("how", ["missing", "short", "long", "changed"])
def test_a_chunk_that_is_not_as_written_is_a_miss(
    make: Callable[..., RedisStore], redis_url: str, raw: Any, index: int, how: str
) -> None:
    store = make(redis_url, chunk_bytes=300, capacity_bytes=10_000)
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    key = store._keys.chunk(name, index)
    value = raw.get(key)
    changed = {"missing": b"", "short": value[:-1], "long": value + b"x"}
    raw.set(key, changed.get(how, bytes([value[0] ^ 1]) + value[1:]))
    assert store.get(name) is None
    assert store.counters["rejected_corrupt" if how == "changed" else "rejected_truncated"] == 1
    assert raw.keys(f"{store._keys.prefix}:b:*") == []
    store.check()


@pytest.mark.parametrize(
    ("written_with", "read_with"),
    [
        ({"secret": "hush"}, {"secret": "other"}),
        ({"secret": "hush"}, {"secret": None, "allow_unauthenticated": True}),
        ({"secret": None, "allow_unauthenticated": True}, {"secret": "hush"}),
    ],
)
def test_what_another_secret_sealed_is_a_miss_and_stays(
    make: Callable[..., RedisStore],
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    written_with: dict[str, Any],
    read_with: dict[str, Any],
) -> None:
    prefix = f"secrets-{next(numbers)}"
    writer = make(redis_url, prefix=prefix, **written_with)
    reader = make(redis_url, prefix=prefix, **read_with)
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(writer, place)
    (record,) = reader.find(blocks_of(range(BLOCK)))
    assert reader.get(record.name) is None
    assert reader.counters["rejected_secret"] == 1
    assert "secret" in caplog.text
    assert "hush" not in caplog.text
    assert reader.put(place.name, 500, never, place) is False
    assert holds(writer, place.name)
    writer.check()


def test_without_secrets_a_checksum_still_finds_what_is_corrupt(
    make: Callable[..., RedisStore], redis_url: str, raw: Any
) -> None:
    store = make(redis_url, secret=None, allow_unauthenticated=True)
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    assert holds(store, name)
    raw.setrange(store._keys.chunk(name, 0), 600, b"??")
    assert store.get(name) is None
    assert store.counters["rejected_corrupt"] == 1


# -- expiry ----------------------------------------------------------------------------------------


def test_expiry_is_refreshed_along_a_path(
    make: Callable[..., RedisStore], redis_url: str, raw: Any
) -> None:
    writer = make(redis_url, ttl_s=1000, chunk_bytes=300)
    path = path_of(range(2 * BLOCK))
    places = [path.segment(0, 8), path.segment(8, BLOCK), path.checkpoint(8, 12)]
    other = path.segment(BLOCK, 2 * BLOCK)
    for place in [*places, other]:
        put(writer, place)
    keys = [key for place in places for key in writer._keys.chunks(place.name, 3)]
    keys += [key for place in places for key in writer._index.keys_of(spot_of(place))]
    kept = writer._keys.chunk(other.name, 0)
    assert all(990_000 < raw.pttl(key) <= 1_000_000 for key in [*keys, kept])
    for key in [*keys, kept]:
        raw.pexpire(key, 50_000)

    reader = make(redis_url, ttl_s=1000, prefix=writer._keys.prefix)
    found = [record.name for record in reader.find(blocks_of(range(BLOCK)))]
    assert set(found) == {place.name for place in places}
    reader.touch(found)
    assert all(990_000 < raw.pttl(key) <= 1_000_000 for key in keys)
    assert raw.pttl(kept) <= 50_000
    # What is counted does not go before what it counts.
    for name in found:
        assert raw.zscore(writer._ledger.keys[0], name) >= raw.pexpiretime(
            writer._keys.chunk(name, 0)
        )


def test_a_state_that_was_not_found_here_lives_on_too(
    make: Callable[..., RedisStore], redis_url: str, raw: Any
) -> None:
    writer = make(redis_url, ttl_s=1000)
    name = put(writer, path_of(range(BLOCK)).segment(0, BLOCK))
    raw.pexpire(writer._keys.chunk(name, 0), 50_000)
    make(redis_url, ttl_s=1000, prefix=writer._keys.prefix).touch([name, name_of("unknown")])
    assert raw.pttl(writer._keys.chunk(name, 0)) > 990_000
    assert not raw.exists(writer._keys.chunk(name_of("unknown"), 0))


def test_everything_expires(make: Callable[..., RedisStore], redis_url: str, raw: Any) -> None:
    store = make(redis_url, ttl_s=0.2, capacity_bytes=1000)
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(store, place)
    store.introduce(NAMESPACE, {"model": "m"})
    wait_until(lambda: place.name not in store, "expiry")
    assert holds(store, place.name) is False
    assert store.find(blocks_of(range(BLOCK))) == []
    wait_until(lambda: len(store) == 0, "expiry of the entry")
    assert (store.used_bytes, list(store), store.namespaces()) == (0, [], {})
    store.check()
    left = {key.decode() for key in raw.keys(f"{store._keys.prefix}:*")}
    assert left <= {store._keys.ledger("used")}
    put(store, place)


# -- the ledger ------------------------------------------------------------------------------------


def test_fault_35_bytes_count_once_whoever_writes_them(
    make: Callable[..., RedisStore], redis_url: str
) -> None:
    path = path_of(range(2 * BLOCK))
    places = [path.segment(0, BLOCK), path.segment(BLOCK, 2 * BLOCK)]
    cost = envelope.header_bytes(places[0]) + 500
    one = make(redis_url, capacity_bytes=cost)
    two = make(redis_url, capacity_bytes=cost, prefix=one._keys.prefix)
    put(one, places[0])
    assert two.put(places[0].name, 500, never, places[0])  # promoted, restored: it is there
    assert two.put(places[1].name, 500, never, places[1]) is False
    assert (two.counters["refused_full"], two.used_bytes) == (1, cost)
    assert two.delete(places[0].name)
    put(two, places[1])
    assert (one.used_bytes, list(one)) == (cost, [places[1].name])
    one.check()


def test_clients_that_race_for_room_never_pass_the_limit(
    make: Callable[..., RedisStore], redis_url: str, raw: Any
) -> None:
    capacity = 10_000
    prefix = f"race-{next(numbers)}"
    stores = [
        make(redis_url, capacity_bytes=capacity, prefix=prefix, chunk_bytes=400) for _ in range(4)
    ]
    path = path_of(range(40 * BLOCK))
    places = [path.segment(at, at + BLOCK) for at in range(0, 40 * BLOCK, BLOCK)]
    done = threading.Event()
    seen: list[tuple[int, int]] = []
    failures: list[BaseException] = []

    def work(store: RedisStore, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                place = places[int(rng.integers(len(places)))]
                if rng.integers(3):
                    data = data_of(place.name, 300 + place.start)  # whoever writes it
                    store.put(place.name, data.nbytes, lambda data=data: data, place)
                else:
                    store.delete(place.name)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    def watch() -> None:
        while not done.is_set():
            counted = int(raw.get(stores[0]._keys.ledger("used")) or 0)
            keys = list(raw.scan_iter(f"{prefix}:b:*", count=1000))
            with raw.pipeline(transaction=True) as pipe:
                for key in keys:
                    pipe.strlen(key)
                seen.append((counted, sum(pipe.execute())))

    threads = [
        threading.Thread(target=work, args=(store, seed)) for seed, store in enumerate(stores)
    ]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert failures == []
    assert len(seen) > 10
    assert max(counted for counted, _ in seen) <= capacity
    assert max(kept for _, kept in seen) <= capacity
    assert sum(store.counters.get("refused_full", 0) for store in stores) > 0
    assert sum(store.counters["written"] for store in stores) > 10
    stores[0].check()
    for place in places:
        data = stores[1].get(place.name)
        assert data is None or np.array_equal(data, data_of(place.name, 300 + place.start))


def test_clients_that_race_for_a_name_leave_one_blob(
    make: Callable[..., RedisStore], redis_url: str
) -> None:
    prefix = f"race-{next(numbers)}"
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    cost = envelope.header_bytes(place) + 500
    together = threading.Barrier(6)
    results: list[tuple[bool, int]] = []
    stores = [
        make(redis_url, capacity_bytes=10 * cost, prefix=prefix, chunk_bytes=300) for _ in range(6)
    ]

    def work(fill: int) -> None:
        together.wait()
        kept = stores[fill].put(place.name, 500, lambda: np.full(500, fill, np.uint8), place)
        results.append((kept, fill))

    threads = [threading.Thread(target=work, args=(fill,)) for fill in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.counters.get("written", 0) for store in stores) == 1
    assert any(kept for kept, _ in results)
    (winner,) = [fill for fill in range(6) if stores[fill].counters.get("written")]
    for store in stores:
        data = store.get(place.name)
        assert data is not None
        assert (data == winner).all()
    assert stores[0].used_bytes == cost
    stores[0].check()


def test_a_name_that_another_client_is_writing_is_refused(
    make: Callable[..., RedisStore], redis_url: str
) -> None:
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    one = make(redis_url, capacity_bytes=10_000)
    two = make(redis_url, capacity_bytes=10_000, prefix=one._keys.prefix)

    def produce() -> Buffer:
        assert two.put(place.name, 500, never, place) is False
        assert two.counters["refused_busy"] == 1
        assert two.delete(place.name) is False
        assert len(two) == 0
        assert list(two) == []
        return data_of(place.name, 500)

    assert one.put(place.name, 500, produce, place)
    assert holds(two, place.name)
    one.check()


def dead_writer(store: RedisStore, place: Place, n_bytes: int, *, chunks: Sequence[int]) -> None:
    """Leave what a writer leaves that died after some chunks."""
    entry = Entry.new(store.cost_bytes(n_bytes, place), store._blobs.n_chunks(n_bytes, place))
    (reply,) = store._link.run([store._ledger.reserving(place.name, entry)])
    assert reply[0] == b"ok"
    whole = envelope.wrap(
        place.name, data_of(place.name, n_bytes), place, envelope.seal_key("hush")
    )
    whole += data_of(place.name, n_bytes).tobytes()
    step = store._blobs._step(place)
    for index in chunks:
        key = store._keys.chunk(place.name, index)
        store._link.run([("SET", key, whole[index * step : (index + 1) * step])])


@pytest.mark.parametrize("chunks", [(), (2,), (2, 1), (2, 1, 0)])
def test_what_a_dead_writer_left_is_cleared_away_by_another(
    make: Callable[..., RedisStore], redis_url: str, raw: Any, chunks: Sequence[int]
) -> None:
    store = make(redis_url, capacity_bytes=1500, chunk_bytes=300, lease_s=0.05)
    path = path_of(range(2 * BLOCK))
    dead, other = path.segment(0, BLOCK), path.segment(BLOCK, 2 * BLOCK)
    dead_writer(store, dead, 500, chunks=chunks)
    assert store.used_bytes == store.cost_bytes(500, dead)
    time.sleep(0.06)
    put(store, other, 300)
    assert not raw.exists(*store._keys.chunks(dead.name, 3))
    assert store.used_bytes == store.cost_bytes(300, other)
    store.check()


@pytest.mark.parametrize("chunks", [(), (2,), (2, 1, 0)])
def test_the_name_of_a_dead_writer_can_be_written_again(
    make: Callable[..., RedisStore], redis_url: str, chunks: Sequence[int]
) -> None:
    store = make(redis_url, capacity_bytes=1500, chunk_bytes=300, lease_s=0.05)
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    dead_writer(store, place, 500, chunks=chunks)
    time.sleep(0.06)
    complete = len(chunks) == 3
    produce = never if complete else lambda: data_of(place.name, 500)
    assert store.put(place.name, 500, produce, place)
    assert holds(store, place.name)
    assert len(store.find(blocks_of(range(BLOCK)))) == 1
    store.check()


def test_a_writer_that_was_too_slow_takes_back_what_it_wrote(
    make: Callable[..., RedisStore], redis_url: str, raw: Any
) -> None:
    store = make(redis_url, capacity_bytes=5000)
    place = path_of(range(BLOCK)).segment(0, BLOCK)

    def produce() -> Buffer:
        raw.delete(*store._ledger.keys)  # as if someone had cleared everything
        return data_of(place.name, 500)

    assert store.put(place.name, 500, produce, place) is False
    assert raw.keys(f"{store._keys.prefix}:b:*") == []
    store.check()


def test_what_the_server_evicted_makes_room(store: RedisStore, raw: Any) -> None:
    path = path_of(range(40 * BLOCK))
    places = [path.segment(at, at + BLOCK) for at in range(0, 11 * BLOCK, BLOCK)]
    for place in places[:10]:
        put(store, place, 100_000)
    assert store.put(places[10].name, 100_000, never, places[10]) is False
    for place in places[:3]:
        raw.delete(store._keys.chunk(place.name, 0))
    store._writer._next_ghosts = 0.0
    put(store, places[10], 100_000)
    assert len(store) == 8
    store.check()


def test_check_finds_and_mends_what_is_wrong(store: RedisStore, raw: Any) -> None:
    path = path_of(range(4 * BLOCK))
    places = [path.segment(at, at + BLOCK) for at in range(0, 4 * BLOCK, BLOCK)]
    for place in places:
        put(store, place)
    cost = store.cost_bytes(500, places[0])
    store.check()
    raw.incrby(store._keys.ledger("used"), 77)  # a wrong sum
    raw.delete(store._keys.chunk(places[0].name, 0))  # a blob that is gone
    raw.append(store._keys.chunk(places[1].name, 0), b"more")  # one of another size
    raw.set(store._keys.chunk(name_of("stray"), 0), b"stray")  # one that is not entered
    with pytest.raises(
        IntegrityError,
        match=rf"{4 * cost + 77:,} bytes are counted, {4 * cost:,} are entered; of 4 blobs 2 are "
        "not as entered, and 1 keys",
    ):
        store.check()
    store.check(fix=True)
    store.check()
    assert (len(store), store.used_bytes) == (2, 2 * cost)
    assert {record.name for record in store.find(blocks_of(range(4 * BLOCK)))} == {
        place.name for place in places[2:]
    }


def test_clear_leaves_what_belongs_to_others(
    make: Callable[..., RedisStore], redis_url: str, raw: Any
) -> None:
    one, other = make(redis_url, prefix="clear"), make(redis_url, prefix="clear-other")
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(one, place)
    put(other, place)
    one.introduce(NAMESPACE, {"model": "m"})
    raw.set("clear", 1)
    raw.set("clearly:b:{00}:0", 1)
    raw.set("clear:b:{stray}:0", 1)
    one.clear()
    assert (len(one), one.used_bytes, one.namespaces()) == (0, 0, {})
    assert {key for key in raw.keys("clear:*") if raw.get(key) != b"0"} == set()
    assert raw.mget("clear", "clearly:b:{00}:0") == [b"1", b"1"]
    assert holds(other, place.name)
    other.clear()
    raw.delete("clear", "clearly:b:{00}:0")


# -- replacing, describing, listing ----------------------------------------------------------------


def test_a_longer_tail_takes_the_place_of_a_shorter_one_once_it_is_there(store: RedisStore) -> None:
    path = path_of(range(BLOCK))
    short, long = path.segment(0, 8), path.segment(0, 12)
    put(store, short)
    store.supersede(short.name, long.name)
    store.supersede(short.name, short.name)
    assert holds(store, short.name)
    put(store, long)
    store.supersede(short.name, long.name)
    assert short.name not in store
    assert [record.name for record in store.find(blocks_of(range(BLOCK)))] == [long.name]
    assert store.counters["superseded"] == 1
    store.check()


def test_namespaces_are_described_and_their_descriptions_bounded(
    store: RedisStore, raw: Any
) -> None:
    store.introduce(NAMESPACE, {"model": "m.gguf", "n_layer": 4})
    store.introduce(name_of("b"), {"model": "é"})
    store.introduce(name_of("large"), {"text": "x" * 100_000})
    key = store._keys.namespaces
    raw.hset(key, name_of("forged"), b"x" * 100_000)
    raw.hset(key, name_of("no json"), b"{")
    raw.hset(key, name_of("no object"), b"[1]")
    raw.hset(key, name_of("deep"), b"[" * 60_000)
    raw.hset(key, name_of("deep, and an object"), b'{"a":' * 9_000 + b"1" + b"}" * 9_000)
    raw.hset(key, name_of("nested, and an object"), b'{"a":' * 99 + b"1" + b"}" * 99)
    raw.hset(key, name_of("no text"), b'{"a": "\xff"}')
    assert store.namespaces() == {
        NAMESPACE: {"model": "m.gguf", "n_layer": 4},
        name_of("b"): {"model": "é"},
    }
    assert store.counters["refused_description"] == 1
    assert store.counters["rejected_description"] == 6
    assert raw.pttl(key) > 0


def test_descriptions_are_no_more_than_are_read(store: RedisStore, raw: Any) -> None:
    key = store._keys.namespaces
    raw.hset(key, mapping={f"old {n}": "{}" for n in range(MAX_DESCRIBED + 20)})
    store.introduce(NAMESPACE, {"model": "m"})
    assert raw.hlen(key) in (MAX_DESCRIBED, MAX_DESCRIBED + 1)
    assert raw.hexists(key, NAMESPACE)
    raw.hdel(key, NAMESPACE)
    store.introduce(NAMESPACE, {"model": "m"})  # it was told: costs nothing
    assert not raw.hexists(key, NAMESPACE)
    store.introduce(NAMESPACE, {"model": "n"})
    assert raw.hexists(key, NAMESPACE)
    raw.delete(key)
    store.clear()
    store.introduce(NAMESPACE, {"model": "n"})
    assert raw.hexists(key, NAMESPACE)


def test_a_namespace_that_one_client_is_done_with_stays_for_others(store: RedisStore) -> None:
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    store.forget_namespaces([NAMESPACE])
    assert holds(store, name)


def test_what_is_kept_can_be_listed(store: RedisStore) -> None:
    path = path_of(range(2 * BLOCK))
    names = [put(store, path.segment(at, at + BLOCK), 100 + at) for at in (0, BLOCK)]
    entries = {entry.name: entry for entry in store.entries()}
    assert set(entries) == set(store) == set(names)
    for at, name in zip((0, BLOCK), names, strict=True):
        assert (
            entries[name].n_bytes == envelope.header_bytes(path.segment(at, at + BLOCK)) + 100 + at
        )
        assert 0 < entries[name].expires_at - time.time() <= 7 * 24 * 3600 + 60
    stats = store.stats()
    assert stats["used_bytes"] == sum(entry.n_bytes for entry in entries.values())
    assert (stats["capacity_bytes"], stats["blobs"], stats["state"]) == (1 << 20, 2, "closed")
    assert stats["server_used_bytes"] > 0
    assert stats["server_capacity_bytes"] is None
    assert stats["counters"]["written"] == 2


# -- a server that fails ---------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back_empty(
    make: Callable[..., RedisStore], own_server: Server, clock: Clock
) -> None:
    store = make(own_server.url, clock=clock)
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(store, place)
    own_server.stop()
    assert store.get(place.name) is None
    assert store.state == "open"
    before = asked(store)
    use(store)
    assert asked(store) == before
    assert (store.counters["errors_connection"], store.counters["breaker_opened"]) == (1, 1)
    assert store.counters["skipped"] > 10

    own_server.start()
    clock.now += 1.0
    assert store.get(place.name) is None
    assert store.put(place.name, 500, never, place) is False
    assert asked(store) == before  # neither who reads nor who writes tries it
    assert look_again(store) == "closed"
    assert (asked(store), store.counters["probes"]) == (before, 1)
    put(store, place)
    assert holds(store, place.name)
    store.check()


def test_a_dead_server_costs_nobody_anything_however_long_it_is_dead(
    make: Callable[..., RedisStore], own_server: Server, clock: Clock
) -> None:
    """Each moment asks like a request and writes like the queue; the prober alone waits."""
    store = make(own_server.url, clock=clock, timeout_s=0.1, connect_timeout_s=5.0)
    assert store.namespaces() == {}
    own_server.pause()
    try:
        before = asked(store)
        began = time.monotonic()
        assert store.namespaces() == {}
        assert time.monotonic() - began < 1.0
        assert asked(store) == before + 1
        probes = []
        for _ in range(400):
            use(store)
            store.counters.pop("probes", None)
            look_again(store)
            probes.append((clock.now, store.counters.get("probes", 0)))
            clock.now += 0.5
        assert asked(store) == before + 1
        assert all(n <= 1 for _, n in probes)
        times = [now for now, n in probes if n]
        assert np.diff([1000.0, *times]).tolist() == [1, 2, 4, 8, 16, 32, 60, 60]
    finally:
        own_server.resume()
    clock.now += 60.0
    assert look_again(store) == "closed"
    assert asked(store) == before + 1
    assert put(store, path_of(range(BLOCK)).segment(0, BLOCK)) in store


def test_a_server_that_comes_back_is_found_in_the_background(
    make: Callable[..., RedisStore], own_server: Server
) -> None:
    """By the real clock, and with nobody asking; all the while nobody waits."""
    store = make(own_server.url, timeout_s=0.3, cooldown_s=0.05, longest_cooldown_s=0.2)
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    own_server.pause()
    try:
        assert store.get(name) is None
        before = asked(store)
        slowest = 0.0
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            began = time.monotonic()
            use(store)
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.01)
        assert asked(store) == before
        assert slowest < 0.25
        assert store.counters["probes"] >= 2
    finally:
        own_server.resume()
    wait_until(lambda: store.state == "closed", "finding the server back")
    assert holds(store, name)
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "llamakeep-probe"],
        "the end of the prober's thread",
    )
    # And when it is lost again, somebody looks again.
    own_server.stop()
    assert store.get(name) is None
    own_server.start()
    wait_until(lambda: store.state == "closed", "finding the server back")
    assert store.get(name) is None  # it came back empty
    assert store.counters["misses_gone"] == 1


def test_close_ends_the_probing(make: Callable[..., RedisStore], clock: Clock) -> None:
    store = make(f"redis://127.0.0.1:{free_port()}", clock=clock)
    use(store)
    thread = store._link.prober._thread
    assert thread is not None
    assert thread.daemon
    store.close()
    assert not thread.is_alive()
    clock.now += 100
    use(store)
    assert store._link.prober._thread is thread
    assert "probes" not in store.counters


def test_where_no_thread_looks_the_next_call_starts_one(
    make: Callable[..., RedisStore], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork takes no thread along, and sometimes none can be started."""
    store = make(f"redis://127.0.0.1:{free_port()}", clock=clock)
    prober = store._link.prober
    start = threading.Thread.start

    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    use(store)
    assert prober._thread is None
    monkeypatch.setattr(threading.Thread, "start", start)
    assert store.get(name_of("a")) is None
    assert prober._thread is not None
    prober.end()
    prober.join(10)
    prober._ended.clear()
    left_behind = prober._thread
    assert left_behind is not None
    assert not left_behind.is_alive()  # as in a child process
    assert store.get(name_of("a")) is None
    assert prober._thread is not left_behind
    assert prober._thread.is_alive()
    assert asked(store) == 1


def test_a_server_that_hangs_costs_one_timeout_and_then_nothing(
    make: Callable[..., RedisStore], own_server: Server, clock: Clock
) -> None:
    store = make(own_server.url, clock=clock, timeout_s=0.1, connect_timeout_s=5.0)
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    put(store, place)
    before = asked(store)
    own_server.pause()
    try:
        assert list(store.get_many([place.name] * 5)) == [None] * 5
        assert asked(store) == before + 1
        for _ in range(3):
            use(store)
        assert asked(store) == before + 1
        assert (store.counters["errors_timeout"], store.counters["breaker_opened"]) == (1, 1)
        # It still hangs when it is tried again: each cool-down is twice as long.
        for cooldown_s in (1.0, 2.0, 4.0):
            clock.now += cooldown_s
            probes = store.counters.get("probes", 0)
            assert look_again(store) == "open"
            use(store)
            assert look_again(store) == "open"
            assert store.counters["probes"] == probes + 1
        assert asked(store) == before + 1
    finally:
        own_server.resume()
    clock.now += 8.0
    assert look_again(store) == "closed"
    assert store.put(place.name, 500, never, place)
    assert holds(store, place.name)
    assert store.counters["errors_timeout"] == 4


def test_many_threads_lose_one_timeout_together(
    make: Callable[..., RedisStore], own_server: Server, clock: Clock
) -> None:
    store = make(own_server.url, clock=clock, timeout_s=0.2, connect_timeout_s=0.2)
    assert store.get(name_of("a")) is None
    own_server.pause()
    try:
        threads = [threading.Thread(target=store.get, args=(name_of("a"),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        own_server.resume()
    assert store.counters["breaker_opened"] == 1
    clock.now += 1.0  # not two: calls that fail together count once
    assert look_again(store) == "closed"
    assert store.put(name_of("a"), 5, lambda: data_of(b"a", 5))


def test_fault_48_a_server_that_is_full_in_the_middle(
    make: Callable[..., RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    with running(maxmemory="6mb", maxmemory_policy="noeviction") as server:
        store = make(server.url, chunk_bytes=200_000)
        path = path_of(range(100 * BLOCK))
        places = [path.segment(at, at + BLOCK) for at in range(0, 100 * BLOCK, BLOCK)]
        kept = []
        for place in places[:10]:
            if store.put(
                place.name, 900_000, lambda place=place: data_of(place.name, 900_000), place
            ):
                kept.append(place.name)
        assert 1 < len(kept) < 9
        assert store.counters["errors_full"] > 0
        assert store.counters["refused_server"] + store.counters.get("refused_unreachable", 0) > 0
        assert store.state == "closed"
        assert "OOM" in caplog.text or "maxmemory" in caplog.text
        # Half a blob is gone again, and nobody counts it.
        with server.client() as raw:
            chunks = raw.keys(f"{store._keys.prefix}:b:*")
        assert len(chunks) == 5 * len(kept)
        assert set(store) == set(kept)
        store.check()
        for name in kept:
            assert holds(store, name, 900_000)
        for name in kept[:2]:
            assert store.delete(name)
        put(store, places[20], 900_000)
        store.check()


@pytest.mark.parametrize("password", ["", ":wrong-one@", "nobody:wrong-one@"])
def test_a_wrong_password_is_said_once_and_never_shown(
    make: Callable[..., RedisStore],
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    password: str,
) -> None:
    with running(requirepass="right-one") as server:
        url = f"redis://{password}127.0.0.1:{server.port}"
        store = make(url, clock=clock)
        for _ in range(3):
            use(store)
            assert look_again(store) == "open"
            clock.now += 100
        assert (asked(store), store.counters["probes"]) == (1, 2)
        assert store.counters["errors_auth"] == 3
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        (warning,) = warnings
        assert f"127.0.0.1:{server.port}" in warning
        assert "password" in warning
        assert "-one" not in caplog.text + repr(store) + str(store.stats())
        right = make(url.replace(password, "") if password else url, clock=clock)
        right.close()
        with server.client(password="right-one") as raw:
            raw.config_set("requirepass", "")
        if password == "":
            clock.now += 100
            assert look_again(store) == "closed"
            assert store.put(name_of("a"), 5, lambda: data_of(b"a", 5))


def test_the_right_password_and_the_right_user_come_in(make: Callable[..., RedisStore]) -> None:
    with running(requirepass="right-one") as server:
        with server.client(password="right-one") as raw:
            raw.execute_command("ACL", "SETUSER", "me", "on", ">my#own", "~*", "+@all")
        for user in (":right-one", "default:right-one", "me:my%23own"):
            for options in ("", "?protocol=3"):
                store = make(f"redis://{user}@127.0.0.1:{server.port}{options}")
                name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
                assert holds(store, name)


def limited(server: Server, *rules: str) -> str:
    """A URL of that server for a user who may do less."""
    with server.client() as raw:
        raw.execute_command("ACL", "SETUSER", "less", "reset", "on", ">pw", "~*", "+@all", *rules)
    return f"redis://less:pw@127.0.0.1:{server.port}"


def test_a_user_who_may_not_delete(
    make: Callable[..., RedisStore], own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(limited(own_server, "-unlink", "-del"))
    path = path_of(range(BLOCK))
    name = put(store, path.segment(0, 8))
    longer = put(store, path.segment(0, BLOCK))
    assert store.delete(name) is False
    store.supersede(name, longer)
    with pytest.raises(StoreError, match="not cleared"):
        store.clear()
    assert holds(store, name)
    assert store.counters["errors_auth"] >= 3
    assert store.state == "closed"
    assert caplog.text.count("permission") == 1  # not again and again
    store.check()  # what is still there is still counted


@pytest.mark.parametrize("rule", ["-eval", "-@write", "-@read", "-getrange", "-hset", "-set"])
def test_a_user_who_may_not_do_something_gets_misses(
    make: Callable[..., RedisStore], own_server: Server, rule: str
) -> None:
    whole = make(own_server.url, capacity_bytes=100_000)
    place = path_of(range(BLOCK)).segment(0, BLOCK)
    store = make(limited(own_server, rule), prefix=whole._keys.prefix, capacity_bytes=100_000)
    assert store.put(place.name, 500, lambda: data_of(place.name, 500), place) is False
    store.touch([place.name])
    store.find(blocks_of(range(BLOCK)))
    store.introduce(NAMESPACE, {})
    assert store.get(place.name) is None
    assert store.delete(place.name) is False
    assert store.counters["errors_auth"] > 0
    assert store.state == "closed"
    whole.check()
    assert whole.used_bytes == 0


class FakeServer:
    """Accepts connections and lets `answer` deal with each, in a thread."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.connections = 0
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._sockets.append(sock)
            thread = threading.Thread(target=self._run, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        try:
            self._answer(sock)
        except OSError:
            pass
        finally:
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@pytest.fixture
def fake() -> Iterator[Callable[[Callable[[socket.socket], None]], FakeServer]]:
    made: list[FakeServer] = []

    def make(answer: Callable[[socket.socket], None]) -> FakeServer:
        made.append(FakeServer(answer))
        return made[-1]

    yield make
    for server in made:
        server.close()


def test_a_server_that_trickles_is_cut_off(
    make: Callable[..., RedisStore],
    fake: Callable[[Callable[[socket.socket], None]], FakeServer],
    clock: Clock,
) -> None:
    """It never is silent for as long as the timeout, and would take minutes."""

    def trickle(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        for byte in itertools.chain(b"+OK\r\n+OK\r\n$100000\r\n", itertools.repeat(120)):
            sock.sendall(bytes([byte]))
            time.sleep(0.01)

    server = fake(trickle)
    store = make(server.url, clock=clock, timeout_s=0.2, connect_timeout_s=0.2, min_bytes_per_s=1e6)
    store._known.learn(name_of("a"), None, 100_000)
    began = time.monotonic()
    assert store.get(name_of("a")) is None
    assert time.monotonic() - began < 5.0
    use(store)
    assert (server.connections, asked(store)) == (1, 1)
    assert (store.counters["errors_timeout"], store.state) == (1, "open")


def test_what_is_no_redis_server_is_left_alone(
    make: Callable[..., RedisStore],
    fake: Callable[[Callable[[socket.socket], None]], FakeServer],
    clock: Clock,
) -> None:
    def talk(sock: socket.socket) -> None:
        while sock.recv(1 << 16):
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = fake(talk)
    store = make(server.url, clock=clock)
    use(store)
    assert (server.connections, asked(store), store.state) == (1, 1, "open")
    assert store.counters["errors_connection"] == 1


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_server_that_answers_anything_makes_no_error(
    make: Callable[..., RedisStore],
    fake: Callable[[Callable[[socket.socket], None]], FakeServer],
    clock: Clock,
    seed: int,
    protocol: int,
) -> None:
    """Each reply is well-formed, and none is one that the command could have."""
    rng = random.Random(seed)

    def anything(depth: int = 0) -> bytes:
        word = rng.choice([b"ok", b"kept", b"busy", b"full", b"7", b"1 2 3", b"{}", b"x" * 300])
        replies = [
            b"$-1\r\n",
            b"*-1\r\n",
            b"+OK\r\n",
            b"-ERR no\r\n",
            b"-OOM command not allowed\r\n",
            b":%d\r\n" % rng.choice([0, 1, 7, -1, 1 << 62]),
            b"$%d\r\n%b\r\n" % (len(word), word),
            b"$0\r\n\r\n",
        ]
        if depth < 3:
            size = rng.randrange(5)
            replies += [b"*%d\r\n" % size + b"".join(anything(depth + 1) for _ in range(size))] * 4
            if protocol == 3:
                replies += [b",1.5\r\n", b"#t\r\n", b"%1\r\n+a\r\n" + anything(3)]
        return rng.choice(replies)

    def babble(sock: socket.socket) -> None:
        reader = hiredis.Reader()
        while data := sock.recv(1 << 16):
            reader.feed(data)
            while command := reader.gets():
                if command[0] == b"HELLO":
                    sock.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                else:
                    sock.sendall(anything() if command[0] != b"CLIENT" else b"+OK\r\n")

    server = fake(babble)
    store = make(f"{server.url}?protocol={protocol}", clock=clock, timeout_s=0.3)
    path = path_of(range(40))
    places = [path.segment(0, 8), path.checkpoint(8, BLOCK), path.segment(BLOCK, 2 * BLOCK)]
    for _ in range(25):
        clock.now += 100
        look_again(store)
        for place in places:
            store.put(place.name, 300, lambda place=place: data_of(place.name, 300), place)
            store._known.learn(place.name, spot_of(place), 300)
        assert all(data is None for data in store.get_many([place.name for place in places]))
        store.find(blocks_of(range(40)))
        store.touch([place.name for place in places])
        store.supersede(places[0].name, places[1].name)
        store.delete(places[1].name)
        store.introduce(NAMESPACE, {})
        assert isinstance(store.namespaces(), dict)
        assert isinstance(store.used_bytes, int)
        assert isinstance(store.entries(), list)
        assert isinstance(places[0].name in store, bool)
        store.stats()
        for action in (store.check, store.clear, store.__len__):
            with contextlib.suppress(StoreError, IntegrityError):
                action()
    assert store.counters["errors_other"] > 0


def test_a_connection_that_is_cut_in_the_middle_is_a_miss(
    make: Callable[..., RedisStore],
    fake: Callable[[Callable[[socket.socket], None]], FakeServer],
    clock: Clock,
) -> None:
    def cut(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(b"+OK\r\n")
        sock.recv(1 << 16)
        sock.sendall(b"+OK\r\n")
        sock.recv(1 << 16)
        sock.sendall(b"$1000\r\nabc")

    server = fake(cut)
    store = make(server.url, clock=clock)
    use(store)
    assert (server.connections, store.state) == (1, "open")


def test_nobody_listens(make: Callable[..., RedisStore], clock: Clock) -> None:
    store = make(f"redis://127.0.0.1:{free_port()}", clock=clock)
    use(store)
    assert (asked(store), store.state, store.counters["errors_connection"]) == (1, "open", 1)
    for action in (store.check, store.clear):
        with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
            action()


def test_a_name_that_is_not_looked_up_in_time_is_a_miss(
    make: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    release = threading.Event()
    look_up = socket.getaddrinfo
    lookups = []

    def slow(host: str, *args: Any) -> Any:
        if host != "slow.invalid" or socket.AI_NUMERICHOST in args:
            return look_up(host, *args)
        lookups.append(host)
        release.wait(20)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    store = make("redis://slow.invalid", clock=clock, timeout_s=0.05, connect_timeout_s=0.05)
    try:
        for _ in range(3):
            use(store)
            look_again(store)
            clock.now += 100
        assert (asked(store), store.counters["probes"]) == (1, 2)
        assert store.counters["errors_timeout"] == 3
        assert lookups == ["slow.invalid"]  # those who come later wait for the same answer
    finally:
        release.set()
    store.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("llamakeep-resolve")]


def test_after_close_everything_is_a_miss(
    make: Callable[..., RedisStore], redis_url: str, recwarn: pytest.WarningsRecorder
) -> None:
    store = make(redis_url)
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
    threads = threading.active_count()
    store.close()
    store.close()
    before = asked(store)
    use(store)
    assert store.get(name) is None
    assert asked(store) == before
    assert threading.active_count() <= threads
    del store
    gc.collect()
    assert list(recwarn) == []


def test_closing_while_others_read_raises_nothing(
    make: Callable[..., RedisStore], redis_url: str
) -> None:
    store = make(redis_url)
    name = put(store, path_of(range(BLOCK)).segment(0, BLOCK), 100_000)
    failures: list[BaseException] = []
    started = threading.Barrier(5)

    def read() -> None:
        try:
            started.wait()
            while store.get(name) is not None:
                pass
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.05)
    store.close()
    for thread in threads:
        thread.join()
    assert failures == []


def test_many_threads_read_and_write(make: Callable[..., RedisStore], redis_url: str) -> None:
    store = make(redis_url, capacity_bytes=1 << 20)
    path = path_of(range(24 * BLOCK))
    places = [path.segment(at, at + BLOCK) for at in range(0, 24 * BLOCK, BLOCK)]
    failures: list[BaseException] = []

    def work(mine: Sequence[Place]) -> None:
        try:
            for place in mine:
                put(store, place, 1000)
                assert all(holds(store, one.name, 1000) for one in mine[: mine.index(place) + 1])
                store.touch([place.name])
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(places[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    found = store.find(blocks_of(range(24 * BLOCK)))
    assert [record.start for record in found] == list(range(0, 24 * BLOCK, BLOCK))
    assert store.counters["written"] == 24
    store.check()


# -- other ways to reach a server ------------------------------------------------------------------


def test_a_unix_socket_and_a_database(make: Callable[..., RedisStore]) -> None:
    need_redis_server()
    server = Server(unixsocket="redis.sock")
    try:
        store = make(f"unix://{server.directory}/redis.sock?db=3")
        name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
        assert holds(make(f"{server.url}/3", prefix=store._keys.prefix), name)
        assert name not in make(server.url, prefix=store._keys.prefix)
        store.check()
    finally:
        server.close()


def test_tls_and_who_is_not_trusted(
    make: Callable[..., RedisStore], tmp_path: Path, clock: Clock
) -> None:
    need_redis_server()
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-keyout", str(key), "-out", str(certificate)]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    files = {"tls_cert_file": certificate, "tls_key_file": key, "tls_ca_cert_file": certificate}
    options = {name: str(path) for name, path in files.items()}
    with running(tls_port=str(port), tls_auth_clients="no", **options):
        url = f"rediss://127.0.0.1:{port}"
        for trusting in (f"?ssl_ca_certs={certificate}", "?ssl_cert_reqs=none&protocol=3"):
            store = make(url + trusting)
            name = put(store, path_of(range(BLOCK)).segment(0, BLOCK), 300_000)
            assert holds(store, name, 300_000)
        stranger = make(url, clock=clock)
        use(stranger)
        assert (asked(stranger), stranger.counters["errors_connection"]) == (1, 1)


def test_a_sentinel_says_who_the_master_is(
    make: Callable[..., RedisStore], own_server: Server, clock: Clock
) -> None:
    config = (
        f"sentinel monitor mymaster 127.0.0.1 {own_server.port} 1\n"
        "sentinel down-after-milliseconds mymaster 300\n"
    )
    sentinel = Server(sentinel=config)
    dead = f"127.0.0.1:{free_port()}"
    try:
        hosts = f"{dead},127.0.0.1:{sentinel.port}"
        for options in ("", "?protocol=3"):
            store = make(f"redis+sentinel://{hosts}/mymaster/0{options}", clock=clock)
            name = put(store, path_of(range(BLOCK)).segment(0, BLOCK))
            assert holds(store, name)
            store.check()
        unknown = make(f"redis+sentinel://{hosts}/other", clock=clock)
        use(unknown)
        assert (asked(unknown), unknown.state) == (1, "open")
        own_server.stop()
        assert store.get(name) is None
        before = asked(store)
        use(store)
        assert asked(store) == before
        own_server.start()
        for _ in range(3):
            clock.now += 100
            look_again(store)
            if store.put(name_of("a"), 5, lambda: data_of(b"a", 5)):
                break
            time.sleep(0.5)  # the sentinel takes a moment to see that it is back
        assert name_of("a") in store
    finally:
        sentinel.close()


def test_the_nodes_of_a_cluster_share_the_load(
    make: Callable[..., RedisStore], redis_cluster: Cluster
) -> None:
    store = make(redis_cluster.url, capacity_bytes=1 << 20, chunk_bytes=300)
    path = path_of(range(30 * BLOCK))
    places = [path.segment(at, at + BLOCK) for at in range(0, 30 * BLOCK, BLOCK)]
    for place in places:
        put(store, place, 1000)
    names = [place.name for place in places]
    before = asked(store)
    assert len(store.find(blocks_of(range(30 * BLOCK)))) == 30
    for name, data in zip(names, store.get_many(names), strict=True):
        assert data is not None
        assert np.array_equal(data, data_of(name, 1000))
    store.touch(names)
    assert asked(store) - before <= 2 + 1 + 30 + 2
    counts = []
    for node in redis_cluster.nodes:
        with node.client() as raw:
            counts.append(len(raw.keys(f"{store._keys.prefix}:b:*")))
    assert all(counts)
    assert sum(counts) == 30 * store._blobs.n_chunks(1000, places[0])
    assert store.stats()["server_used_bytes"] > 0
    store.supersede(names[0], names[1])
    store.check()
    store.clear()
    assert len(store) == 0


def test_a_node_of_a_cluster_that_fails_makes_misses(
    make: Callable[..., RedisStore], clock: Clock
) -> None:
    need_redis_server()
    cluster = Cluster()
    try:
        store = make(cluster.url, clock=clock, timeout_s=1.0, connect_timeout_s=1.0)
        path = path_of(range(12 * BLOCK))
        names = [put(store, path.segment(at, at + BLOCK)) for at in range(0, 12 * BLOCK, BLOCK)]
        assert all(holds(store, name) for name in names)
        cluster.nodes[1].pause()
        try:
            found = list(store.get_many(names))
            assert any(data is None for data in found)
            assert store.state == "open"
            before = asked(store)
            use(store)
            # That the others answer does not make it worth another timeout.
            clock.now += 100
            assert look_again(store) == "open"
            use(store)
            assert asked(store) == before
        finally:
            cluster.nodes[1].resume()

        def is_back() -> bool:
            # Nodes may still refuse after one has answered, and the store waits after a refusal.
            clock.now += 100
            look_again(store)
            again = store.put(names[0], 500, never, path.segment(0, BLOCK))
            return again and all(holds(store, name) for name in names)

        wait_until(is_back, "the node's return")
    finally:
        cluster.close()
