"""Tiers below a simulated tree, and the tier of sizes by itself."""

from __future__ import annotations

import numpy as np
import pytest

from llamakeep.errors import InvalidValue
from llamakeep.policy import policy_names
from llamakeep.runtime.base import Family
from llamakeep.runtime.sized import of_size
from llamakeep.simulate.bound import bound
from llamakeep.simulate.replay import Model, replay
from llamakeep.simulate.tiers import TierSize, parse_tiers, saved_ms
from llamakeep.stores.sized import SizedTier
from llamakeep.tokens import PathNames, Place
from tests.simulate_tools import blocks_trace, random_prompts, trace_of

BLOCK = 4


def below(capacity_bytes: int) -> tuple[TierSize, ...]:
    return (TierSize("disk", capacity_bytes, 1.0),)


def test_what_memory_evicted_comes_back_from_below() -> None:
    with blocks_trace([1], [2], [3], [1], [2], [3], block_tokens=16) as trace:
        alone = replay(trace, capacity_bytes=16)
        assert (alone.reused_tokens, alone.restored_bytes) == (0, {"ram": 0})
        found = replay(trace, capacity_bytes=16, below=below(1000))
        assert (found.reused_tokens, found.requests_hit) == (3 * 8, 3)
        assert found.restored_bytes == {"ram": 0, "disk": 3 * 16}
        small = replay(trace, capacity_bytes=16, below=below(32))
        assert small.reused_tokens < 3 * 8


def test_tiers_are_counted_after_the_warmup_only() -> None:
    with blocks_trace([1], [2], [1], [2], block_tokens=16) as trace:
        found = replay(trace, capacity_bytes=16, below=below(1000), warmup=3)
        assert found.restored_bytes == {"ram": 0, "disk": 16}


@pytest.mark.parametrize("family", [Family.ATTENTION, Family.HYBRID, Family.RECURRENT])
@pytest.mark.parametrize("policy", policy_names("tree"))
def test_a_replay_over_tiers_is_the_same_each_time(family: Family, policy: str) -> None:
    model = Model(4, family, 0 if family is Family.ATTENTION else 60)
    prompts = [
        np.repeat(prompt, 8).tolist() for prompt in random_prompts(np.random.default_rng(1), n=40)
    ]
    with trace_of(prompts) as trace:
        found = [
            replay(trace, capacity_bytes=600, policy=policy, model=model, below=below(1500))
            for _ in range(2)
        ]
        assert found[0] == found[1]
        alone = replay(trace, capacity_bytes=600, policy=policy, model=model)
        assert found[0].reused_tokens > alone.reused_tokens
        assert found[0].restored_bytes["disk"] > 0
        if family is Family.ATTENTION:
            assert (
                found[0].reused_tokens
                <= bound(trace, capacity_bytes=2100, model=model).reused_tokens
            )


def test_the_prompt_cache_has_no_tiers() -> None:
    with blocks_trace([1]) as trace, pytest.raises(InvalidValue, match="only the tree has tiers"):
        replay(trace, "prompt", capacity_bytes=1, below=below(1))


# -- what is written -------------------------------------------------------------------------------


def test_tiers_are_written_like_this() -> None:
    ram, disk, shared = parse_tiers("ram=4GiB@12GiB/s, shared=1TiB,disk=64GiB@1.5GiB")
    assert disk == TierSize("disk", 64 << 30, 1.5 * (1 << 30))
    assert (ram.tier, ram.capacity_bytes, ram.bytes_per_s) == ("ram", 4 << 30, 12 << 30)
    assert (shared.tier, shared.capacity_bytes, shared.bytes_per_s) == ("shared", 1 << 40, 1 << 29)
    assert parse_tiers("ram=1") == (TierSize("ram", 1, 10 << 30),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "NAME=SIZE"),
        ("ram", "not 'ram'"),
        ("ram=1,ram=2", "not 'ram=2'"),
        ("tape=1", "of ram, disk, shared, not 'tape=1'"),
        ("disk=1", "must begin with memory"),
        ("ram=x", "a size is written like"),
        ("ram=1@0", "tier ram: nothing comes back at '0' a second"),
    ],
)
def test_what_names_no_tiers(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_tiers(text)


def test_milliseconds() -> None:
    moved = {"ram": 4 << 30, "disk": 1 << 30}
    speeds = {"ram": float(4 << 30), "disk": float(1 << 29)}
    assert saved_ms(1000, moved, prefill_tokens_per_s=100, bytes_per_s=speeds) == 1e3 * (10 - 1 - 2)
    for rate in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidValue, match="prefill rate must be above 0"):
            saved_ms(1, {}, prefill_tokens_per_s=rate)


# -- the tier --------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def places(tokens: list[int]) -> list[Place]:
    """The segments of a prompt."""
    names = PathNames(b"n", np.array(tokens, np.int32), BLOCK)
    return [
        names.segment(start, min(start + BLOCK, len(tokens)))
        for start in range(0, len(tokens), BLOCK)
    ]


def put(tier: SizedTier, *wanted: Place, n_bytes: int = 10) -> list[bool]:
    return [tier.put(each.name, n_bytes, lambda: of_size(n_bytes), each) for each in wanted]


def test_it_evicts_leaves_first_and_never_what_is_being_extended() -> None:
    tier = SizedTier(40, clock=Clock())
    one, other = places(list(range(12))), places([90, *range(7)])
    assert put(tier, *one) == [True] * 3
    assert put(tier, other[0]) == [True]
    assert tier.touch([place.name for place in one[:2]]) == []
    # The leaves are one[2] and other[0]; the latter is what the next one hangs off.
    assert put(tier, other[1]) == [True]
    assert [place.name in tier for place in one] == [True, True, False]
    assert tier.evicted_bytes == 10
    # What is larger than all there is evicts nothing.
    assert put(tier, *places([55]), n_bytes=41) == [False]
    assert (len(tier), tier.counters["refused_full"]) == (4, 1)
    # When all of one is gone, other's first block is the only thing that may not go.
    assert put(tier, *places([77]), n_bytes=40) == [True]
    assert len(tier) == 1
    tier.check()


def test_states_in_the_middle_of_a_block_hang_off_what_is_before_them() -> None:
    tier = SizedTier(100, clock=Clock())
    names = PathNames(b"n", np.array([1, 2, 3, 4], np.int32), BLOCK)
    other = PathNames(b"n", np.array([1, 2, 9, 9], np.int32), BLOCK)
    first, checkpoint = names.segment(0, 2), names.checkpoint(0, 2)
    behind, beside = names.segment(2, 4), other.segment(2, 4)
    put(tier, first, checkpoint, behind, beside)
    assert tier.restorable_before(names.checkpoint(2, 4)) == 2
    assert tier.restorable_before(other.checkpoint(2, 4)) == 2
    assert tier.restorable_before(checkpoint) == 0
    order = []
    while len(tier):
        held = set(tier)
        assert put(tier, *places([500 + len(order)] * 4), n_bytes=101) == [False]
        victim = tier._queue.pop(lambda held: not tier._has_children(held))
        assert victim is not None
        order.append(victim.name)
        tier.delete(victim.name)
        assert set(tier) == held - {victim.name}
    assert order[-1] == first.name  # all others are of no use without it
    assert [tier._by_begin, tier._by_first, tier._in_block, tier._closing] == [{}] * 4


def test_reading_is_counted() -> None:
    tier = SizedTier(100, clock=Clock())
    (place,) = places([1, 2])
    put(tier, place)
    assert tier.get(place.name) is of_size(10)
    assert (tier.get(b"none"), tier.read_bytes) == (None, 10)
