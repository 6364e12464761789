"""docs/scale.md: its options exist, its arithmetic holds, and its smallest tables are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer

from llamakeep.cli import app
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.simulate.fleet import Fleet, FleetOutcome, SharedUse, replay_fleet
from llamakeep.simulate.replay import Model
from llamakeep.simulate.routing import ROUTES, Route
from llamakeep.simulate.tiers import parse_tiers
from llamakeep.simulate.trace import Trace, open_trace
from llamakeep.states import Block
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.redis import RedisStore
from llamakeep.stores.redis.index import MAX_RECORDS, SAMPLED
from llamakeep.stores.redis.lookup import MAX_MARKS, NEIGHBOURS
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import PathNames
from llamakeep.tree import PrefixTree
from tests.published import trace_path
from tests.redis_servers import Server

TEXT = (Path(__file__).parent.parent / "docs" / "scale.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())
GIB = 1 << 30
TOKEN_BYTES = 128 << 10
SMALL_TOKEN_BYTES = 23_040
TURNS_A_SECOND = 1_000_000 * 0.1 / 60
BLOCK = 256


def rows_under(title: str) -> list[list[str]]:
    """The cells of the table behind a title, without its head."""
    lines = TEXT[TEXT.index(title) :].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|")) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in cell.split(", ")]


def test_its_options_are_there() -> None:
    command = typer.main.get_command(app).commands["simulate"]  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in parameter.opts}
    used = set(re.findall(r"--[a-z][a-z-]+", TEXT)) - {"--cache-dir", "--redis-prefix"}
    assert {"--replicas", "--route"} <= used <= known
    assert [cells[0].strip("`") for cells in rows_under("## Routers")] == list(ROUTES)


def test_the_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(snippet, "docs/scale.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "random:seed=1",
        "conversation",
        "prefix:blocks=1000",
    ]
    assert all("'shared': " in line for line in lines[:1])


def test_the_fields_of_its_table_are_those_of_a_report() -> None:
    named = {
        name
        for cells in rows_under("## In Python, and in JSON")
        for name in re.findall(r"`(\w+)`", " ".join(cells))
    }
    said = {*FleetOutcome("tree", "lru", 1, 0, 0, 0, 0).to_json(), *SharedUse().to_json()}
    assert named - {"capacity_bytes"} == said


# -- replays ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agents() -> Iterator[Trace]:
    path = trace_path("lmcache_agent")
    if path is None:
        pytest.skip(
            "the trace lmcache_agent is not in a directory shared/traces beside the project"
        )
    with open_trace(path) as trace:
        yield trace


def replayed(trace: Trace, fleet: Fleet, tiers: str) -> FleetOutcome:
    memory, *below = parse_tiers(tiers)
    return replay_fleet(
        trace,
        fleet,
        capacity_bytes=memory.capacity_bytes,
        below=below,
        model=Model(TOKEN_BYTES),
        policy="lru",
    )


def row_of(fleet: Fleet) -> list[str]:
    route = "" if fleet.n_replicas == 1 else fleet.route.name
    return next(
        cells
        for cells in rows_under("**LMCache, agents**")
        if cells[:2] == [str(fleet.n_replicas), route]
    )


@pytest.mark.parametrize("fleet", [Fleet(1), *(Fleet(4, Route(name)) for name in ROUTES)], ids=str)
def test_the_agents_in_memory_alone(agents: Trace, fleet: Fleet) -> None:
    found, row = replayed(agents, fleet, "ram=2GiB"), row_of(fleet)
    assert row[2] == f"{100 * found.saved_share:.1f}"
    assert row[3] == f"{found.uneven_requests:.2f}, {found.uneven_evaluated:.2f}"


def test_the_agents_over_a_shared_tier(agents: Trace) -> None:
    fleet = Fleet(16, Route("conversation"))
    found, row = replayed(agents, fleet, "ram=2GiB,shared=24GiB"), row_of(fleet)
    use = found.shared
    assert use is not None
    assert row[4:] == [
        f"{100 * found.saved_share:.1f}",
        f"{found.reused_by_tier['shared'] / found.n_requests:,.0f}",
        f"{use.read_bytes / GIB:,.1f}",
        f"{use.mean_read_bytes_per_s / GIB:.3f}",
        f"{use.peak_read_bytes_per_s / GIB:.3f}",
        f"{use.written_bytes / GIB:,.1f}",
    ]


def test_the_agents_with_drives(agents: Trace) -> None:
    fleet = Fleet(4, Route("conversation"))
    use = replayed(agents, fleet, "ram=2GiB,disk=16GiB,shared=24GiB").shared
    (row,) = (
        cells
        for cells in rows_under("A drive in each replica")
        if cells[:2] == ["agents", "conversation"]
    )
    assert use is not None
    assert row[4:] == [
        f"{use.read_bytes / GIB:,.1f}",
        f"{use.peak_read_bytes_per_s / GIB:.3f}",
    ]
    assert row[2:4] == [row_of(fleet)[6], row_of(fleet)[8]]


# -- arithmetic ------------------------------------------------------------------------------------


def test_a_million_conversations() -> None:
    table = {cells[0]: cells[1:] for cells in rows_under("## A million conversations")}
    assert f"T = {TURNS_A_SECOND:,.0f}" in TEXT
    titles = ("tau-bench, airline", "LMCache, agents", "Mooncake, synthetic")
    for column, title in enumerate(titles):
        cells = {name: numbers(row[column]) for name, row in table.items()}
        replays = {tuple(row[:2]): row for row in rows_under(f"**{title}**")}
        reads = [numbers(replays["16", route][5])[0] for route in ROUTES]
        assert cells["tokens read a turn: random, conversation, prefix"] == reads
        n_requests = int(re.search(rf"{title}\*\* \(([\d,]+) requests", TEXT)[1].replace(",", ""))  # type: ignore[index]
        written = numbers(replays["16", "prefix"][9])[0] * GIB / TOKEN_BYTES / n_requests
        assert cells["tokens written a turn"] == [pytest.approx(written, rel=1e-2)]
        for size, at in ((TOKEN_BYTES, 0), (SMALL_TOKEN_BYTES, 1)):

            def gigabytes(tokens: float, size: int = size) -> float:
                return round(TURNS_A_SECOND * tokens * size / 1e9, 1)

            total = 1e6 * cells["tokens of a conversation"][0] * size
            assert cells["size, TB"][at] == round(total / 1e12, 1)
            assert cells["written, GB/s"][at] == gigabytes(cells["tokens written a turn"][0])
            for route, tokens in zip(
                ("at random", "by conversation", "by prefix"), reads, strict=True
            ):
                assert cells[f"read {route}, GB/s"][at] == gigabytes(tokens)


def test_bandwidth_against_prefill() -> None:
    for rate_cell, small, large, gigabits in rows_under("**Bandwidth against prefill.**"):
        rate = float(rate_cell.split(" ")[0].replace(",", ""))
        assert numbers(small) == [round(rate * SMALL_TOKEN_BYTES / 1e6)]
        assert numbers(large) == [round(rate * TOKEN_BYTES / 1e6)]
        assert numbers(gigabits) == [round(rate * TOKEN_BYTES * 8 / 1e9, 1)]
    assert f"{12.5e9 / TOKEN_BYTES:,.0f}".startswith("95,")
    assert "carries 95,000 tokens a second of an 8B model" in PROSE


def test_checkpoints_resizing_and_prices() -> None:
    checkpoint_bytes = 149.6 * (1 << 20)
    assert f"as much as {checkpoint_bytes / TOKEN_BYTES:,.0f} tokens" in PROSE
    assert f"{TURNS_A_SECOND * checkpoint_bytes / 1e9:.1f} GB/s for T turns" in PROSE
    assert f"{checkpoint_bytes * 1e6 / 1e12:.1f} TB for one checkpoint" in PROSE
    moved_bytes = 100_000 / 17 * 3_092 * TOKEN_BYTES
    assert f"{moved_bytes / 1e12:.1f} TB, {moved_bytes / 12.5e9:.0f} s of a link" in PROSE
    month_s = 30 * 24 * 3600
    puts, gets = TURNS_A_SECOND * 190 / BLOCK, TURNS_A_SECOND * 48 / BLOCK
    assert f"{304_742.4 * 0.023:,.0f} $ a month for 304.7 TB" in PROSE
    assert f"{puts * month_s / 1000 * 0.005:,.0f} $ for the {puts:,.0f} full segments" in PROSE
    assert f"{gets * month_s / 1000 * 0.0004:,.0f} $ for {gets + 0.5:,.0f} reads" in PROSE


# -- what a real server is asked -------------------------------------------------------------------


@pytest.fixture
def store(redis_server: Server) -> Iterator[RedisStore]:
    store = RedisStore(
        redis_server.url, secret="s", timeout_s=10, connect_timeout_s=10, prefix="scale-docs"
    )
    store.clear()
    yield store
    store.clear()
    store.close()


class Asked:
    """Round trips of a store, and commands that its server ran, scripts' own ones left out."""

    def __init__(self, store: RedisStore, server: Server) -> None:
        self._store, self._client = store, server.client()

    def __call__(self) -> tuple[int, dict[str, int]]:
        trips = self._store.counters.get("round_trips", 0)
        ran = self._client.info("commandstats")
        self._client.config_resetstat()
        calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in ran.items()}
        return trips, calls

    def close(self) -> None:
        self._client.close()


def put(store: RedisStore, path: PathNames, start: int, end: int) -> bytes:
    place = path.segment(start, end)
    assert store.put(place.name, 100, lambda: np.zeros(100, np.uint8), place)
    return place.name


def test_what_a_look_up_costs(store: RedisStore, redis_server: Server) -> None:
    tokens = np.arange(4 * BLOCK, dtype=np.int32)
    path = PathNames(bytes(32), tokens, BLOCK)
    origins = range(0, tokens.size, BLOCK)
    blocks = [Block(path.block(at), at, tokens[at : at + BLOCK]) for at in origins]
    asked = Asked(store, redis_server)
    before, _ = asked()
    names = [put(store, path, at, at + BLOCK) for at in origins]
    trips, calls = asked()
    assert (trips - before, calls["eval"]) == (3 * 4, 2 * 4)
    # Of the sorted sets, scripts add to two of the ledger's.
    counts = {name: calls[name] for name in ("getrange", "set", "zcard", "zrandmember")}
    assert sum(counts.values()) + calls["pexpireat"] + calls["zadd"] - 2 * 4 == 8 * 4
    before = trips
    assert len(store.find(blocks)) == 4
    trips, calls = asked()
    assert trips - before == 1
    assert (calls["getrange"], calls["zrange"]) == (4, (1 + 2) * 4)
    before = trips
    assert all(data is not None for data in store.get_many(names))
    trips, calls = asked()
    assert (trips - before, calls["getrange"]) == (1, 4)
    before = trips
    assert store.touch(names) == []
    trips, calls = asked()
    assert (trips - before, calls["eval"], calls["pexpireat"]) == (2, 1, 3 * 4 + 1)
    asked.close()
    table = {cells[0]: cells[1:] for cells in rows_under("## What a look-up costs")}
    assert table["finding what there is along a prompt"][0].startswith("1; 2")
    assert table["noting a use"] == ["2", "one script, 3 others a state and 1"]
    assert table["writing a state"] == ["3; 4 where others begin like it", "2 scripts, 8 others"]


def test_what_is_said_of_lists(store: RedisStore) -> None:
    assert f"{NEIGHBOURS} records are read on either side" in PROSE
    assert f"A list has {MAX_RECORDS:,} records at most, of 345 bytes" in PROSE
    assert f"looks at {SAMPLED} by chance" in PROSE
    assert f"told its first {MAX_MARKS:,} positions" in PROSE
    assert f"{3 * (BLOCK - 1)} at most where blocks have {BLOCK} tokens" in PROSE
    tiers = (Path(__file__).parent.parent / "docs" / "tiers.md").read_text(encoding="utf-8")
    assert f"{2 * NEIGHBOURS} are read of each" in " ".join(tiers.split())
    # What lies between the block's begin and the position is a part of what is listed.
    one, other = (
        np.array([*range(100), between, 7, 8, last], np.int32)
        for between, last in ((500, 1), (600, 2))
    )
    for tokens in (one, other):
        put(store, PathNames(bytes(32), tokens, BLOCK), 101, 104)
    path = PathNames(bytes(32), one, BLOCK)
    assert len(store.find([Block(path.block(0), 0, one)])) == 1


def test_what_a_turn_costs(redis_server: Server) -> None:
    """A conversation of 3,000 tokens that grows by 200 a turn, and moves in between."""
    stores = [
        RedisStore(
            redis_server.url, secret="s", timeout_s=10, connect_timeout_s=10, prefix="scale-turns"
        )
        for _ in range(2)
    ]
    runtimes = [FakeRuntime("attention", n_ctx=8192) for _ in stores]
    tiers = [TieredStore(MemoryStore(1 << 30), store) for store in stores]
    trees = [
        PrefixTree(tier, runtime.traits, segment_tokens=BLOCK)
        for tier, runtime in zip(tiers, runtimes, strict=True)
    ]
    prompt = np.random.default_rng(0).integers(0, 200, 5000).astype(np.int32)
    found = []
    for turn, at in enumerate((0, 0, 0, 1, 0)):
        tokens = prompt[: 3000 + 200 * turn]
        sequence = KeptSequence(runtimes[at], trees[at])
        begin = stores[at].counters.get("round_trips", 0)
        reuse = sequence.resume(tokens)
        answered = stores[at].counters.get("round_trips", 0)
        sequence.advance(tokens[reuse.reused_tokens :])
        sequence.save()
        sequence.clear()
        assert tiers[at].flush()
        behind = stores[at].counters["round_trips"] - answered
        found.append((reuse.tier, reuse.reused_tokens, answered - begin, behind))
        trees[at].check()
    for tier in tiers:
        tier.close()
    assert [each[:2] for each in found] == [
        ("none", 0),
        ("ram", 3000),
        ("ram", 3200),
        ("shared", 3400),
        ("shared", 3600),
    ]
    assert [each[2] for each in found[1:3]] == [2, 2]
    assert all(3 <= each[2] <= 4 for each in found[3:])
    assert all(12 <= each[3] <= 15 for each in found[1:])
