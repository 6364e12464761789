"""Real disks and servers that go wrong under a real model: the next answer is right every time."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamakeep
from llamakeep.stores import envelope
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.redis import RedisStore
from tests.disk_tools import Failing, files_below
from tests.redis_servers import Cluster, Server, need_redis_server, wait_until
from tests.test_durable import TEXT, run

pytestmark = pytest.mark.model

COMMON = "The bridge over the river was older than the town that had grown on both its banks. " * 9
PROMPTS = [COMMON + "One.", COMMON + "Two, and a little more.", "Quite another text. " * 20]


class Asked:
    """A model that is asked the same prompts cold and with keepers."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.expected = [self.answer(prompt) for prompt in PROMPTS]

    def answer(self, prompt: str) -> str:
        self.llm.reset()
        text: str = self.llm(prompt, max_tokens=10, temperature=0)["choices"][0]["text"]
        return text

    def with_keeper(
        self, during: Callable[[int, llamakeep.Keeper], None] | None = None, **attach: Any
    ) -> tuple[list[llamakeep.Reuse], dict[str, Any]]:
        """Ask everything of a fresh keeper, compare with the cold answers, and let it go."""
        served = []
        with llamakeep.attach(self.llm, **attach) as keeper:
            for index, prompt in enumerate(PROMPTS):
                if during is not None:
                    during(index, keeper)
                assert self.answer(prompt) == self.expected[index]
                assert keeper.last is not None
                served.append(keeper.last)
                keeper.check()
            keeper.flush(30)
            stats = keeper.stats()
        return served, stats


def total(counters: dict[str, int], *kinds: str) -> int:
    """How often something happened whose name begins so."""
    return sum(n for key, n in counters.items() if key.startswith(kinds))


@pytest.fixture(params=["attention", "hybrid"])
def asked(request: pytest.FixtureRequest, tiny_llama: Callable[..., Any]) -> Asked:
    return Asked(tiny_llama(request.param))


# -- disk ------------------------------------------------------------------------------------------


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x20
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 99
    path.write_bytes(bytes(data))


def link_away(path: Path) -> None:
    elsewhere = path.parent.parent.parent.parent / f"outside-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


ON_FILES: dict[str, Callable[[Path], None]] = {
    "header flipped": lambda path: flip(path, 0.0001),
    "payload flipped": lambda path: flip(path, 0.6),
    "last byte flipped": lambda path: flip(path, 1.0),
    "truncated": truncate,
    "empty": lambda path: os.truncate(path, 0),
    "foreign": lambda path: path.write_bytes(b"GGUF, or a pickle, or anything" * 99) and None,
    "newer version": newer,
    "a symlink": link_away,
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("fault", ON_FILES)
def test_fault_5_44_46_damaged_files_are_misses(asked: Asked, fault: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    asked.with_keeper(cache_dir=cache)
    for path in sorted(cache.glob("blobs/*/*")):
        ON_FILES[fault](path)
    served, stats = asked.with_keeper(cache_dir=cache)
    assert all(reuse.tier != "disk" for reuse in served)
    disk = stats["below"]["tiers"]["disk"]
    assert total(disk, "rejected", "lost") > 0
    if fault not in ("newer version", "a symlink"):  # what took their place serves again
        served, _ = asked.with_keeper(cache_dir=cache)
        assert served[0].tier == "disk"


def test_files_under_each_others_names_are_misses(asked: Asked, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    asked.with_keeper(cache_dir=cache)
    paths = sorted(cache.glob("blobs/*/*"))
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    served, stats = asked.with_keeper(cache_dir=cache)
    assert all(reuse.tier != "disk" for reuse in served)
    assert stats["below"]["tiers"]["disk"]["rejected_name"] > 0


def test_the_index_can_be_lost(asked: Asked, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    asked.with_keeper(cache_dir=cache)
    for path in cache.glob("index*"):
        path.unlink()
    served, _ = asked.with_keeper(cache_dir=cache)
    assert served[0].tier == "disk"  # made again from the files


def test_the_directory_can_go_while_it_is_used(asked: Asked, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    asked.with_keeper(cache_dir=cache)

    def remove(index: int, _: llamakeep.Keeper) -> None:
        if index == 1:
            shutil.rmtree(cache)

    asked.with_keeper(remove, cache_dir=cache)
    asked.with_keeper(cache_dir=cache)
    served, _ = asked.with_keeper(cache_dir=cache)
    assert served[0].tier == "disk"


def test_a_limit_that_is_too_small_costs_nothing_but_reuse(asked: Asked, tmp_path: Path) -> None:
    _, stats = asked.with_keeper(cache_dir=tmp_path / "cache", disk_bytes=9_000)
    disk = stats["below"]["tiers"]["disk"]
    assert disk["used_bytes"] <= 9_000
    assert total(disk, "refused") > 0
    asked.with_keeper(cache_dir=tmp_path / "cache", disk_bytes=9_000)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """The file system of the disk tiers that keepers open in this test."""
    files = Failing()

    def open_store(*args: Any, **options: Any) -> DiskStore:
        return DiskStore(*args, files=files, **options)

    monkeypatch.setattr("llamakeep.stores.disk.DiskStore", open_store)
    return files


def test_fault_48_a_disk_that_is_full_in_the_middle(
    asked: Asked, files: Failing, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"

    def fill(index: int, keeper: llamakeep.Keeper) -> None:
        if index == 1:
            assert keeper.flush(30)
            assert len(files_below(cache)) > 0
            files.room = 3_000  # less than a state: it ends while one is written

    _, stats = asked.with_keeper(fill, cache_dir=cache)
    disk = stats["below"]["tiers"]["disk"]
    assert files.room == 0
    assert disk["refused_disk_full"] > 0
    assert disk["written"] > 0
    with DiskStore(cache) as store:
        store.check()  # half a state is gone again, and nobody counts it
        n_before = len(store)
        assert len(files_below(cache)) == n_before == disk["written"] - disk.get("superseded", 0)
    served, stats = asked.with_keeper(cache_dir=cache)  # still full
    assert served[0].tier == "disk"
    assert stats["below"]["tiers"]["disk"]["refused_disk_full"] > 0
    files.room = None
    asked.with_keeper(cache_dir=cache)
    served, _ = asked.with_keeper(cache_dir=cache)
    assert [served[0].tier, served[2].tier] == ["disk", "disk"]


def test_a_directory_that_may_only_be_read_is_read(
    asked: Asked, files: Failing, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with llamakeep.attach(asked.llm, cache_dir=cache):
        assert asked.answer(PROMPTS[0]) == asked.expected[0]
    before = {path: path.read_bytes() for path in files_below(cache)}
    assert before
    files.is_writable = False
    for method in ("create", "rename", "unlink"):
        files.errors[method] = OSError(errno.EROFS, os.strerror(errno.EROFS))
    for _ in range(2):
        files.calls.clear()
        served, stats = asked.with_keeper(cache_dir=cache)
        assert served[0].tier == "disk"
        assert stats["below"]["tiers"]["disk"]["refused_read_only"] > 0
        assert stats["below"]["tiers"]["disk"].get("written", 0) == 0
        assert files.calls["create"] == files.calls["unlink"] == 0  # it is not even tried
    assert {path: path.read_bytes() for path in files_below(cache)} == before


def test_a_directory_that_becomes_read_only_in_the_middle(
    asked: Asked, files: Failing, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"

    def remount(index: int, keeper: llamakeep.Keeper) -> None:
        if index == 1:
            assert keeper.flush(30)
            for method in ("create", "rename", "unlink"):
                files.errors[method] = OSError(errno.EROFS, os.strerror(errno.EROFS))

    _, stats = asked.with_keeper(remount, cache_dir=cache)
    assert stats["below"]["tiers"]["disk"]["errors_write"] > 0
    served, _ = asked.with_keeper(cache_dir=cache)
    assert served[0].tier == "disk"
    files.errors.clear()
    asked.with_keeper(cache_dir=cache)
    served, _ = asked.with_keeper(cache_dir=cache)
    assert [served[0].tier, served[2].tier] == ["disk", "disk"]
    with DiskStore(cache) as store:
        store.check()


def test_a_clock_that_goes_back(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a day with each look at it: what was used last still goes last."""
    cache = tmp_path / "cache"
    days = itertools.count()

    def clock() -> float:
        return 2e9 - 86_400.0 * next(days)

    def open_store(*args: Any, **options: Any) -> DiskStore:
        return DiskStore(*args, clock=clock, **options)

    monkeypatch.setattr("llamakeep.stores.disk.DiskStore", open_store)
    monkeypatch.setattr("time.time", clock)
    asked.with_keeper(cache_dir=cache)
    served, stats = asked.with_keeper(cache_dir=cache)
    assert [served[0].tier, served[2].tier] == ["disk", "disk"]
    assert next(days) > 10
    used = stats["below"]["tiers"]["disk"]["used_bytes"]
    with llamakeep.attach(asked.llm, cache_dir=cache) as keeper:
        assert asked.answer(PROMPTS[0]) == asked.expected[0]
        keeper.check()
    with DiskStore(cache, min_free_bytes=0) as store:
        store.check()
        store.trim(used - 1)
        store.check()
    served, _ = asked.with_keeper(cache_dir=cache)
    assert served[0].tier == "disk"  # not what goes first


def test_another_secret_is_a_miss_and_leaves_the_files_alone(asked: Asked, tmp_path: Path) -> None:
    attach = {"cache_dir": tmp_path / "cache", "secret": "one"}
    asked.with_keeper(**attach)
    served, _ = asked.with_keeper(**attach | {"secret": "two"})
    assert all(reuse.tier != "disk" for reuse in served)
    served, _ = asked.with_keeper(**attach | {"secret": ""})
    assert all(reuse.tier != "disk" for reuse in served)
    served, _ = asked.with_keeper(**attach)
    assert served[0].tier == "disk"


# -- shared ----------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and keepers that bear with it: a busy machine stops it for a quarter second."""
    need_redis_server()
    monkeypatch.setitem(RedisStore.__init__.__kwdefaults__, "timeout_s", 5.0)
    running = Server()
    yield running
    running.close()


def shared(server: Server, **options: Any) -> dict[str, Any]:
    return {"redis_url": server.url, "secret": "of the test"} | options


def test_a_second_machine_answers_from_the_shared_tier(asked: Asked, server: Server) -> None:
    asked.with_keeper(**shared(server))
    served, _ = asked.with_keeper(**shared(server))
    assert [served[0].tier, served[2].tier] == ["shared", "shared"]
    for reuse, at_least in zip(served, (150, 150, 80), strict=True):
        assert reuse.reused_tokens > at_least


def test_fault_38_a_second_process_answers_from_the_shared_tier(
    family: str, tiny_model: Callable[[str], Path], server: Server
) -> None:
    model, attach = tiny_model(family), shared(server)
    prompts = [TEXT + "One.", TEXT + "Two."]
    cold = run(model=model, prompts=prompts)
    first = run(model=model, prompts=prompts, attach=attach)  # ends without detaching
    second = run(model=model, prompts=prompts, attach=attach)
    assert [a[0] for a in cold] == [a[0] for a in first] == [a[0] for a in second]
    assert first[0][1] == 0
    assert second[0][2] == "shared"
    assert min(second[0][1], second[1][1]) > 150


def test_a_server_that_dies_and_comes_back_empty(asked: Asked, server: Server) -> None:
    asked.with_keeper(**shared(server))

    def trouble(index: int, keeper: llamakeep.Keeper) -> None:
        (tier,) = keeper._tree.store.below
        if index == 1:
            server.stop()
        elif index == 2:
            assert tier.state != "closed"  # type: ignore[attr-defined]
            server.start()
            wait_until(lambda: tier.state == "closed", "finding it back")  # type: ignore[attr-defined]

    served, stats = asked.with_keeper(trouble, **shared(server))
    assert served[0].tier == "shared"
    counters = stats["below"]["tiers"]["shared"]
    assert counters["breaker_opened"] >= 1
    assert counters["probes"] >= 1
    served, _ = asked.with_keeper(**shared(server))
    assert served[2].tier == "shared"  # which was kept when it was back


def test_a_server_that_hangs(asked: Asked, server: Server) -> None:
    asked.with_keeper(**shared(server))

    def hang(index: int, _: llamakeep.Keeper) -> None:
        if index == 0:
            server.pause()

    try:
        served, stats = asked.with_keeper(hang, **shared(server))
    finally:
        server.resume()
    assert served[0].reused_tokens == 0
    assert stats["below"]["tiers"]["shared"]["breaker_opened"] >= 1


def test_a_server_that_is_full(asked: Asked, server: Server) -> None:
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 20_000)
        client.config_set("maxmemory-policy", "noeviction")
    for _ in range(2):
        served, stats = asked.with_keeper(**shared(server))
        assert all(reuse.tier != "shared" for reuse in served)
        counters = stats["below"]["tiers"]["shared"]
        assert counters["errors_full"] > 0
        assert total(counters, "refused") > 0
        assert counters.get("written", 0) == 0
        assert counters.get("breaker_opened", 0) == 0  # it did answer


def test_a_wrong_password(asked: Asked, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with server.client() as client:
        client.config_set("requirepass", "right")
    url = server.url.replace("://", "://:wrong-password@")
    served, stats = asked.with_keeper(redis_url=url, secret="of the test")
    assert all(reuse.tier != "shared" for reuse in served)
    assert stats["below"]["tiers"]["shared"]["errors_auth"] > 0
    assert "wrong-password" not in caplog.text


@pytest.mark.parametrize("where", [0.01, 0.3, 0.999])
def test_tampered_values_are_misses(asked: Asked, server: Server, where: float) -> None:
    asked.with_keeper(**shared(server))
    with server.client() as client:
        n_changed = 0
        for key in client.scan_iter():
            if client.type(key) == b"string" and client.strlen(key) > 1000:
                value = bytearray(client.get(key))
                value[int(where * len(value))] ^= 1
                client.set(key, bytes(value), keepttl=True)
                n_changed += 1
    assert n_changed
    served, stats = asked.with_keeper(**shared(server))
    assert all(reuse.tier != "shared" for reuse in served)
    assert total(stats["below"]["tiers"]["shared"], "rejected") > 0


def test_a_wrong_secret_is_a_miss(asked: Asked, server: Server) -> None:
    asked.with_keeper(**shared(server))
    served, _ = asked.with_keeper(**shared(server, secret="another"))
    assert all(reuse.tier != "shared" for reuse in served)
    assert served[0].reused_tokens == 0
    served, _ = asked.with_keeper(**shared(server))
    assert served[0].tier == "shared"


def test_disk_and_server_and_each_alone(asked: Asked, server: Server, tmp_path: Path) -> None:
    both = shared(server, cache_dir=tmp_path / "one")
    asked.with_keeper(**both)
    served, _ = asked.with_keeper(**shared(server, cache_dir=tmp_path / "two"))
    assert served[0].tier == "shared"
    server.stop()
    served, _ = asked.with_keeper(**shared(server, cache_dir=tmp_path / "two"))
    assert served[0].tier == "disk"  # what came from the server went to disk, too
    server.start()


def test_a_cluster_of_three(tiny_llama: Callable[..., Any]) -> None:
    need_redis_server()
    asked = Asked(tiny_llama("attention"))
    cluster = Cluster()
    try:
        attach = {"redis_url": cluster.url, "secret": "of the test"}
        asked.with_keeper(**attach)
        served, _ = asked.with_keeper(**attach)
        assert served[0].tier == "shared"
        assert served[0].reused_tokens > 100
        cluster.nodes[1].stop()
        asked.with_keeper(**attach)
    finally:
        cluster.close()


# -- sealed, and still wrong -----------------------------------------------------------------------


def reseal(path: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change a state on disk and seal it again, as whoever has no secret to know can."""
    data = path.read_bytes()
    n_header, n_payload = envelope.total_bytes(data[: envelope.FIXED_BYTES])
    before = envelope.parse(data[:n_header])
    payload = np.frombuffer(data, np.uint8, n_payload, n_header).copy()
    change(payload)
    header = envelope.wrap(before.name, payload, before.place, None)
    path.write_bytes(header + payload.tobytes())


def set_u32(at: int, value: int) -> Callable[[np.ndarray], None]:
    def change(payload: np.ndarray) -> None:
        payload[at : at + 4] = np.frombuffer(np.uint32(value).tobytes(), np.uint8)

    return change


FORGED: dict[str, Callable[[np.ndarray], None]] = {
    "magic": set_u32(0, 0x12345678),
    "sequence": set_u32(4, 3),
    "streams or recurrent cells": set_u32(8, 2),
    "cells": set_u32(12, 0x7FFFFFFF),
    "first cell's position": set_u32(16, 5),
    "first cell's sequences": set_u32(20, 9),
    "no cells": set_u32(12, 0),
    "all ones": lambda payload: payload[8:64].fill(0xFF),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("of", ["attention", "recurrent", "hybrid", "swa"])
def test_fault_69_forged_states_are_refused_before_native_code_sees_them(
    forged: str, of: str, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    asked = Asked(tiny_llama(of))
    asked.with_keeper(cache_dir=cache)
    for path in sorted(cache.glob("blobs/*/*")):
        reseal(path, FORGED[forged])
    _, stats = asked.with_keeper(cache_dir=cache)
    disk = stats["below"]["tiers"]["disk"]
    assert total(disk, "rejected") == 0  # the seal is right: nobody noticed before
    assert stats["lost_blobs"] > 0
    assert stats["failures"]["restore"] > 0
    asked.with_keeper(cache_dir=cache)


def test_fault_39_nothing_is_saved_of_nothing_and_files_that_are_gone_cost_only_reuse(
    asked: Asked, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with llamakeep.attach(asked.llm, cache_dir=cache) as keeper:
        asked.llm.reset()
        keeper._sequence.save()
        assert keeper.flush(30)
        assert keeper.stats()["below"]["tiers"]["disk"]["used_bytes"] == 0
        assert asked.answer(PROMPTS[0]) == asked.expected[0]
        assert keeper.flush(30)
        live = keeper.stats()["live_tokens"]
        for path in cache.glob("blobs/*/*"):
            path.unlink()
        keeper._tree.clear()
        assert keeper.stats()["live_tokens"] == live  # what is live is untouched
        for index in (1, 0, 2, 0):
            assert asked.answer(PROMPTS[index]) == asked.expected[index]
        keeper.check()


def test_fault_40_a_text_for_a_model_that_sees_is_kept_as_text(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """A chat handler as picture models have: it evaluates text through the `Llama`."""

    def handler(*, llama: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
        prompt = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        wanted = {key: options[key] for key in ("max_tokens", "temperature")}
        return llama.create_completion(prompt=prompt, **wanted)

    llm = tiny_llama("attention")
    llm.chat_handler = handler
    chat = {"messages": [{"role": "user", "content": COMMON}], "max_tokens": 8, "temperature": 0.0}
    expected = llm.create_chat_completion(**chat)["choices"][0]["text"]
    for tier in ("none", "disk"):
        with llamakeep.attach(llm, cache_dir=tmp_path / "cache") as keeper:
            assert llm.create_chat_completion(**chat)["choices"][0]["text"] == expected
            assert keeper.last is not None
            assert keeper.last.tier == tier
