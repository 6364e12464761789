"""Fleets: replicas of their own over one shared tier, and what moves between them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from llamakeep.errors import InvalidValue
from llamakeep.policy import policy_names
from llamakeep.runtime.base import Family
from llamakeep.runtime.sized import of_size
from llamakeep.simulate.bound import bound
from llamakeep.simulate.experiment import Experiment, run
from llamakeep.simulate.fleet import (
    MOST_REPLICAS,
    WINDOW_S,
    Fleet,
    FleetDriver,
    FleetOutcome,
    SharedUse,
    replay_fleet,
    total_bytes,
    uneven,
)
from llamakeep.simulate.replay import Model, Outcome, TraceClock, TreeDriver, drive, replay
from llamakeep.simulate.routing import Route
from llamakeep.simulate.tiers import TierSize, open_store
from llamakeep.simulate.trace import Request, Trace, open_trace
from llamakeep.stores.sized import SizedTier
from llamakeep.tokens import PathNames
from tests.simulate_tools import put_lines, random_prompts, trace_of

BLOCK = 128
"""More than the 64 tokens that must be to be gained for a shared tier to be asked."""

ROUTES = (Route("random", seed=3), Route("conversation"), Route("prefix"))


class Listed:
    """A router that was told beforehand."""

    remembered = 0

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)

    def route(self, request: Request) -> int:
        return next(self._numbers)


def shared_of(capacity_bytes: int) -> TierSize:
    return TierSize("shared", capacity_bytes, 1.0)


def trace_with(*requests: tuple[str, float, Sequence[int]]) -> Trace:
    """Prompts of full blocks: session, timestamp, ids."""
    with tempfile.TemporaryDirectory() as directory:
        lines = [
            {
                "timestamp": timestamp,
                "session_id": session,
                "block_size": BLOCK,
                "hash_ids": list(ids),
                "block_tokens": [BLOCK] * len(ids),
                "input_length": BLOCK * len(ids),
            }
            for session, timestamp, ids in requests
        ]
        return open_trace(put_lines(Path(directory) / "t.jsonl", *lines))


def grown(n: int = 40, seed: int = 1) -> Trace:
    """Random prompts of hundreds of tokens that grow, part and come again."""
    rng = np.random.default_rng(seed)
    return trace_of([np.repeat(prompt, 48).tolist() for prompt in random_prompts(rng, n=n)])


def routed(
    trace: Trace, *numbers: int, capacity_bytes: int, below: Sequence[TierSize], warmup: int = 0
) -> FleetOutcome:
    """Replay with two replicas behind a router that was told."""
    clock = TraceClock()
    common = next((each for each in below if each.tier == "shared"), None)
    shared = None if common is None else SizedTier(common.capacity_bytes, "shared", clock=clock)
    stores = [
        open_store(capacity_bytes, below, policy="lru", clock=clock, shared=shared)
        for _ in range(2)
    ]
    try:
        replicas = [
            TreeDriver(
                Model().runtime(trace.longest_tokens),
                store,
                segment_tokens=trace.block_tokens,
                policy="lru",
                clock=clock,
            )
            for store in stores
        ]
        openings = [tier for store in stores for tier in store.below if tier.tier == "shared"]
        driver = FleetDriver(
            replicas,
            Listed(*numbers),
            shared,
            [tier for tier in openings if isinstance(tier, SizedTier)],
            warmup=warmup,
        )
        blank = FleetOutcome("tree", "lru", capacity_bytes, 0, 0, 0, 0, fleet=Fleet(2))
        found = drive(trace, driver, clock, blank, warmup=warmup)
        assert isinstance(found, FleetOutcome)
        return driver.outcome(found)
    finally:
        for store in stores:
            store.close()


def plain(outcome: Outcome) -> dict[str, object]:
    return {each.name: getattr(outcome, each.name) for each in fields(Outcome)}


# -- one replica -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Family.ATTENTION, Family.HYBRID, Family.RECURRENT])
@pytest.mark.parametrize("policy", policy_names("tree"))
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_one_replica_is_one_cache(family: Family, policy: str, route: Route) -> None:
    model = Model(2, family, 0 if family is Family.ATTENTION else 100)
    with grown(24) as trace:
        for below in ((), (TierSize("disk", 3000, 1.0), shared_of(4000))):
            alone = replay(trace, capacity_bytes=1200, policy=policy, model=model, below=below)
            found = replay_fleet(
                trace, Fleet(1, route), capacity_bytes=1200, policy=policy, model=model, below=below
            )
            assert plain(found) == plain(alone)
            assert sum(found.reused_by_tier.values()) == found.reused_tokens
            assert found.requests_of == (24,)
            assert found.evaluated_of == (found.evaluated_tokens,)


# -- the shared tier -------------------------------------------------------------------------------


def test_what_one_replica_made_another_one_uses() -> None:
    with trace_with(("a", 0.0, [1, 2]), ("b", 1.0, [1, 2]), ("b", 2.0, [1, 2])) as trace:
        apart = routed(trace, 0, 1, 1, capacity_bytes=10_000, below=())
        assert (apart.reused_tokens, apart.reused_by_tier) == (248, {"ram": 248})
        assert apart.shared is None
        found = routed(trace, 0, 1, 1, capacity_bytes=10_000, below=(shared_of(10_000),))
    # All but the last 8 tokens, twice: first from the tier, then from memory, where they are now.
    assert found.reused_by_tier == {"shared": 248, "ram": 248}
    assert found.restored_bytes == {"shared": 256, "ram": 256}
    assert found.shared is not None
    assert (found.shared.read_bytes, found.shared.written_bytes) == (256, 256)
    assert (found.shared.states_read, found.shared.states_written) == (2, 2)
    # Each replica asked once, in two blocks, before it had anything.
    assert (found.shared.lookups, found.shared.blocks_asked) == (2, 4)
    assert found.shared.used_bytes == found.shared.peak_bytes == 256
    assert found.requests_of == (1, 2)
    assert found.evaluated_of == (256, 16)


def test_a_disk_is_each_replicas_own() -> None:
    with trace_with(("a", 0.0, [1]), ("a", 1.0, [2]), ("b", 2.0, [1]), ("a", 3.0, [1])) as trace:
        disk = TierSize("disk", 10_000, 1.0)
        # Memory has room for one block: the first one is on the disk of replica 0 alone.
        found = routed(trace, 0, 0, 1, 0, capacity_bytes=BLOCK, below=(disk,))
    assert found.reused_by_tier == {"disk": 120}
    assert found.requests_of == (3, 1)


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("policy", policy_names("tree"))
def test_all_replicas_keep_to_one_budget(route: Route, policy: str) -> None:
    with grown() as trace:
        found = replay_fleet(
            trace, Fleet(3, route), capacity_bytes=400, policy=policy, below=(shared_of(1500),)
        )
        assert found.shared is not None
        assert found.shared.used_bytes <= found.shared.peak_bytes <= 1500
        assert found.shared.evicted_bytes > 0
        assert found.shared.written_bytes - found.shared.evicted_bytes >= found.shared.used_bytes
        assert found.reused_by_tier["shared"] > 0
        assert sum(found.reused_by_tier.values()) == found.reused_tokens
        assert found.restored_bytes["shared"] == found.shared.read_bytes
        total = total_bytes(400, (shared_of(1500),), 3)
        assert total == 2700
        assert found.reused_tokens <= bound(trace, capacity_bytes=total).reused_tokens


def test_tokens_are_counted_by_the_tier_where_states_are_whole() -> None:
    model = Model(1, Family.RECURRENT, 50)
    with trace_with(("a", 0.0, [1, 2]), ("b", 1.0, [1, 2, 3]), ("b", 2.0, [1, 2, 3])) as trace:
        found = replay_fleet(
            trace,
            Fleet(8, Route("conversation")),
            capacity_bytes=1000,
            model=model,
            below=(shared_of(1000),),
        )
    assert sorted(found.requests_of) == [0] * 6 + [1, 2]
    assert set(found.reused_by_tier) == {"ram", "shared"}
    assert sum(found.reused_by_tier.values()) == found.reused_tokens


def test_openings_of_a_tier_count_their_own_and_number_together() -> None:
    first = SizedTier(100, "shared", policy="oldest", clock=lambda: 0.0)
    one, other = first.another(), first.another()
    places = [PathNames(b"n", np.array([n], np.int32), 4).segment(0, 1) for n in range(4)]
    for tier, place in zip((one, one, other), places[:3], strict=True):
        assert tier.put(place.name, 40, lambda: of_size(40), place)
        if place is places[0]:
            assert other.delete(place.name)
    # The second one is the oldest, though it is the first that the other opening has put.
    assert other.put(places[3].name, 40, lambda: of_size(40), places[3])
    assert [place.name in first for place in places] == [False, False, True, True]
    assert one.get(places[2].name) is not None
    assert one.get(places[1].name) is None
    assert (first.read_bytes, first.written_bytes, first.evicted_bytes) == (0, 0, 0)
    assert (one.read_bytes, one.written_bytes, one.evicted_bytes) == (40, 80, 0)
    assert (other.read_bytes, other.written_bytes, other.evicted_bytes) == (0, 80, 40)
    first.check()


# -- what is counted -------------------------------------------------------------------------------


def test_bandwidth_is_that_of_windows_of_the_trace() -> None:
    requests = [
        ("a", 100.0, [1, 2]),  # written: 256
        ("b", 101.0, [3]),  # written: 128
        ("a", 100.0 + WINDOW_S, [1, 2]),  # read by the other one: 256
        ("b", 100.0 + 4 * WINDOW_S, [3]),  # read: 128
    ]
    with trace_with(*requests) as trace:
        found = routed(trace, 0, 0, 1, 1, capacity_bytes=1000, below=(shared_of(1000),))
    use = found.shared
    assert use is not None
    assert use.span_s == 4 * WINDOW_S
    assert (use.peak_written_bytes_per_s, use.peak_read_bytes_per_s) == (
        384 / WINDOW_S,
        256 / WINDOW_S,
    )
    assert (use.mean_written_bytes_per_s, use.mean_read_bytes_per_s) == (
        384 / (4 * WINDOW_S),
        384 / (4 * WINDOW_S),
    )
    assert use.to_json()["mean_read_bytes_per_s"] == use.mean_read_bytes_per_s
    assert SharedUse(read_bytes=50).mean_read_bytes_per_s == 50 / WINDOW_S  # of a single request


def test_nothing_of_the_warmup_is_counted() -> None:
    with trace_with(("a", 0.0, [1, 2]), ("b", 1.0, [1, 2]), ("b", 2.0, [1, 2])) as trace:
        found = routed(trace, 0, 1, 1, capacity_bytes=1000, below=(shared_of(1000),), warmup=1)
        late = routed(trace, 0, 1, 1, capacity_bytes=1000, below=(shared_of(1000),), warmup=2)
    assert found.shared is not None
    assert (found.shared.written_bytes, found.shared.read_bytes) == (0, 256)
    assert found.reused_by_tier == {"shared": 248, "ram": 248}
    assert (found.requests_of, found.evaluated_of) == ((0, 2), (0, 16))
    assert late.shared is not None
    assert (late.shared.read_bytes, late.reused_by_tier) == (0, {"ram": 248})
    assert late.shared.used_bytes == late.shared.peak_bytes == 256


def test_unevenness() -> None:
    assert uneven([0, 0]) == uneven([7]) == 1.0
    assert uneven([4, 0, 0, 0]) == 4.0
    found = FleetOutcome("tree", "lru", 1, 4, 0, 9, 0, requests_of=(3, 1), evaluated_of=(4, 5))
    assert (found.uneven_requests, found.uneven_evaluated) == (1.5, 10 / 9)


# -- routes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_replay_of_a_fleet_is_the_same_each_time(route: Route) -> None:
    with grown() as trace:
        first, again = (
            replay_fleet(trace, Fleet(4, route), capacity_bytes=500, below=(shared_of(3000),))
            for _ in range(2)
        )
    assert first == again


def test_another_seed_is_another_fleet() -> None:
    with grown() as trace:
        found = {
            replay_fleet(trace, Fleet(4, Route(seed=seed)), capacity_bytes=500).requests_of
            for seed in range(4)
        }
    assert len(found) == 4


def test_routing_by_conversation_needs_no_shared_tier_and_random_does() -> None:
    turns = [
        (f"s{talk}", float(turn), [talk * 100 + block for block in range(turn + 1)])
        for turn in range(6)
        for talk in range(1, 9)
    ]
    with trace_with(*turns) as trace:

        def saved(route: str, below: Sequence[TierSize] = ()) -> FleetOutcome:
            fleet = Fleet(4, Route(route))
            return replay_fleet(trace, fleet, capacity_bytes=10**6, below=below)

        whole = bound(trace, capacity_bytes=10**6).reused_tokens
        for route in ("conversation", "prefix"):
            assert saved(route).reused_tokens == whole
            use = saved(route, (shared_of(10**6),)).shared
            assert use is not None
            assert use.read_bytes == 0
        assert saved("random").reused_tokens < whole
        shared = saved("random", (shared_of(10**6),))
        assert shared.reused_tokens == whole
        assert shared.shared is not None
        assert shared.shared.read_bytes > 0
        # Nothing is written twice, whoever computes it.
        assert shared.shared.written_bytes == trace.footprint_tokens


def test_what_a_router_remembers_is_bounded_by_what_a_replica_can_keep() -> None:
    with grown() as trace:
        capacity_bytes = 3 * trace.block_tokens
        found = replay_fleet(trace, Fleet(2, Route("prefix")), capacity_bytes=capacity_bytes)
        assert 0 < found.remembered <= 2 * 3
        told = replay_fleet(trace, Fleet(2, Route("prefix", blocks=1)), capacity_bytes=10**6)
        assert told.remembered <= 2


# -- what cannot be meant --------------------------------------------------------------------------


@pytest.mark.parametrize("n_replicas", [0, -1, MOST_REPLICAS + 1, 1.5])
def test_how_many_replicas_there_can_be(n_replicas: int) -> None:
    with pytest.raises(InvalidValue, match="replicas must be "):
        Fleet(n_replicas)


def test_only_trees_have_replicas() -> None:
    with grown(4) as trace, pytest.raises(InvalidValue, match="only trees have replicas"):
        run(trace, Experiment("prompt", capacities=["1"], fleets=[Fleet(2)]))


def test_a_report_of_fleets() -> None:
    with grown(12) as trace:
        fleets = [Fleet(1), Fleet(2), Fleet(2, Route("prefix"))]
        report = run(
            trace,
            Experiment(
                policies=["lru", "oldest"],
                capacities=["600"],
                below=[shared_of(900)],
                fleets=fleets,
            ),
        )
    rows = report.to_json()["results"]
    assert [(row["policy"], row["replicas"], row["route"]) for row in rows] == [
        (policy, fleet.n_replicas, str(fleet.route))
        for policy in ("lru", "oldest")
        for fleet in fleets
    ]
    assert all(row["shared"]["used_bytes"] <= 900 for row in rows)
    assert [each.capacity_bytes for each in report.best] == [1500, 2100]
    assert report.best[0].reused_tokens <= report.best[1].reused_tokens
