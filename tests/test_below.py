"""Trees over tiers: what one process computed serves the next, whatever the tiers do meanwhile.

On the fake runtime, whose logits are a function of all state the family attends to, and on tiers
in memory that fail when told to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.states import Reuse
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import IntArray
from llamakeep.tree import PrefixTree
from tests.test_sequence import KINDS, joined, tokens_of

SEGMENT = 64


class Process:
    """A sequence with a tree of its own over tiers that others have too."""

    def __init__(
        self,
        kind: dict[str, Any],
        *tiers: FakeTier,
        ram: int = 1 << 24,
        namespace: bytes = b"",
        max_checkpoints: int = 8,
        align: int = 8,
        **options: Any,
    ) -> None:
        self.runtime = FakeRuntime(**kind, n_seqs=1)
        self.cold = FakeRuntime(**kind, n_seqs=1)
        self.store = TieredStore(MemoryStore(ram), *tiers, **options)
        self.tree = PrefixTree(
            self.store,
            self.runtime.traits,
            segment_tokens=SEGMENT,
            max_checkpoints=max_checkpoints,
        )
        self.sequence = KeptSequence(
            self.runtime, self.tree, align=align, namespace=namespace, min_step=64
        )

    def ask(self, prompt: IntArray, *, flush: bool = True) -> Reuse:
        """Serve a prompt and compare with a cold run."""
        reuse = self.sequence.resume(prompt)
        assert reuse.reused_tokens + reuse.evaluated_tokens == prompt.size
        self.sequence.advance(prompt[reuse.reused_tokens :])
        self.sequence.save()
        self.cold.clear(0)
        self.cold.evaluate(0, prompt)
        assert np.array_equal(self.runtime.logits(), self.cold.logits())
        if flush:
            done = self.store.flush(10)
            counters = self.store.counters
            assert done or any(kind.startswith(("refused_", "cut_off_")) for kind in counters)
        self.tree.check()
        return reuse

    def forget_live(self) -> None:
        """Empty the sequence, as another conversation would."""
        self.sequence.clear()


@pytest.fixture
def start() -> Iterator[Any]:
    """`start(kind, *tiers)` starts a process; all end with the test."""
    with ExitStack() as ended:

        def begin(*args: Any, **options: Any) -> Process:
            process = Process(*args, **options)
            ended.callback(process.store.close)
            return process

        yield begin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", ["disk", "shared"])
def test_fault_38_what_was_computed_before_a_restart_is_reused(
    kind: dict[str, Any], tier: str, start: Any
) -> None:
    disk = FakeTier(tier=tier)
    prompt = tokens_of(400, 1)
    start(kind, disk).ask(prompt)
    after = start(kind, disk)
    reuse = after.ask(prompt)
    assert (reuse.reused_tokens, reuse.tier) == (392, tier)
    after.forget_live()
    reuse = after.ask(prompt)
    assert (reuse.reused_tokens, reuse.tier) == (392, "ram")  # promoted
    branch = joined(prompt[:300], tokens_of(90, 2))
    assert after.ask(branch).tier in ("live", "none")
    third = start(kind, disk)
    assert third.ask(joined(branch, tokens_of(20, 3))).reused_tokens >= 384


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_grew_and_branched_is_found_whole(kind: dict[str, Any], start: Any) -> None:
    disk = FakeTier()
    first = start(kind, disk)
    system = tokens_of(150, 1)
    one, two = joined(system, tokens_of(61, 2)), joined(system, tokens_of(75, 3))
    for _ in range(3):
        one = joined(one, tokens_of(37, one.size))
        first.ask(one)
        first.ask(two)
    for prompt in (one, two):
        reuse = start(kind, disk).ask(prompt)
        assert (reuse.reused_tokens, reuse.tier) == ((prompt.size - 2) // 8 * 8, "disk")


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_did_not_see_each_other_serve_both(kind: dict[str, Any], start: Any) -> None:
    """Their spans overlap: each cut the common part where its own prompt ended or went on."""
    disk = FakeTier()
    common = tokens_of(100, 1)
    prompts = [
        joined(common, tokens_of(90, 2)),
        joined(common, tokens_of(200, 3)),
        common[:90],
        joined(common[:70], tokens_of(9, 4)),
    ]
    writers = [start(kind, disk) for _ in prompts]
    for writer, prompt in zip(writers, prompts, strict=True):
        writer.store.find_pending = lambda _: []  # type: ignore[method-assign]
        disk.failing.add("find")
        writer.ask(prompt)
        disk.failing.clear()
    for order in (prompts, prompts[::-1]):
        reader = start(kind, disk)
        for prompt in order:
            reader.forget_live()
            reuse = reader.ask(prompt)
            assert reuse.reused_tokens == (prompt.size - 2) // 8 * 8


@pytest.mark.parametrize("kind", KINDS)
def test_fault_4_and_47_another_namespace_shares_nothing(kind: dict[str, Any], start: Any) -> None:
    disk = FakeTier()
    prompt = tokens_of(300, 1)
    start(kind, disk, namespace=b"a").ask(prompt)
    other = start(kind, disk, namespace=b"b")
    looked_at = disk.calls["get"]
    assert other.ask(prompt).reused_tokens == 0
    assert disk.calls["get"] == looked_at


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ram", [0, 3000, 20_000])
def test_little_memory_still_serves_from_below(kind: dict[str, Any], ram: int, start: Any) -> None:
    disk = FakeTier()
    process = start(kind, disk, ram=ram)
    prompts = [tokens_of(250, seed) for seed in range(4)]
    for prompt in prompts:
        process.ask(prompt)
    n_puts = disk.calls["put"]
    for prompt in prompts:
        assert process.ask(prompt).reused_tokens == 248
    assert disk.calls["put"] == n_puts  # what is below is not read from the context again


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tier_lost_is_evaluated(kind: dict[str, Any], start: Any) -> None:
    prompt = tokens_of(400, 1)
    filled = FakeTier()
    start(kind, filled).ask(prompt)
    for lost in list(filled):
        disk = FakeTier()
        start(kind, disk).ask(prompt)
        reader = start(kind, disk)
        disk._blobs.delete(lost)  # found in the index, gone when it is read
        reuse = reader.ask(prompt)
        assert reuse.reused_tokens <= 392
        reader.forget_live()
        assert reader.ask(prompt).reused_tokens == 392


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_of_overlapping_spans_is_forgotten(kind: dict[str, Any], start: Any) -> None:
    """A segment that begins before its node, because another writer cut it, can be lost, too."""
    common = tokens_of(40, 1)
    prompts = [joined(common, tokens_of(90, 2)), joined(common, tokens_of(100, 3))]

    def filled() -> FakeTier:
        disk = FakeTier()
        disk.failing.add("find")  # neither sees the other
        for prompt in prompts:
            start(kind, disk).ask(prompt)
        disk.failing.clear()
        return disk

    for lost in list(filled()):
        disk = filled()
        reader = start(kind, disk)
        for prompt in prompts:
            reader.tree.discover(prompt, reader.tree.match_prefix(prompt))
        disk._blobs.delete(lost)
        for _ in range(2):
            for prompt in prompts:
                reader.ask(prompt)
                reader.forget_live()
        for prompt in prompts:
            assert reader.ask(prompt).reused_tokens == (prompt.size - 2) // 8 * 8
            reader.forget_live()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["find", "get", "put", "touch", "supersede", "delete"])
def test_a_tier_that_fails_costs_reuse_and_nothing_else(
    kind: dict[str, Any], method: str, start: Any
) -> None:
    disk = FakeTier()
    prompts = [tokens_of(300, 1), tokens_of(200, 2)]
    prompts.append(joined(prompts[0][:150], tokens_of(80, 3)))
    for prompt in prompts:
        start(kind, disk).ask(prompt)
    disk.failing.add(method)
    reader = start(kind, disk, ram=8000)
    for prompt in prompts * 2:
        reader.ask(joined(prompt, tokens_of(11, 4)))
    disk.failing.clear()
    again = start(kind, disk)
    for prompt in prompts:
        assert again.ask(prompt).reused_tokens >= 136


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupt_state_below_is_a_miss_and_goes(kind: dict[str, Any], start: Any) -> None:
    """Fault 5: what passes the tier's checksum and still is not a state is not used twice."""
    prompt = tokens_of(300, 1)
    disk = FakeTier()
    start(kind, disk).ask(prompt)
    for name in list(disk):
        data = disk._blobs.get(name)
        assert data is not None
        bad = data.copy()
        bad[:8] ^= 0x55
        disk._blobs.delete(name)
        disk._blobs.put(name, bad.nbytes, lambda bad=bad: bad)
    reader = start(kind, disk)
    n_blobs = len(disk)
    assert reader.ask(prompt).reused_tokens == 0
    assert len(disk) >= n_blobs  # the bad one went, and was computed anew
    reader.forget_live()
    reader.tree.clear()
    for _ in range(2 * n_blobs):
        reader.forget_live()
        reader.ask(prompt)
        reader.tree.clear()
    assert start(kind, disk).ask(prompt).reused_tokens == 296


@pytest.mark.parametrize("kind", KINDS)
def test_disk_over_shared_reads_fall_through_and_come_up(kind: dict[str, Any], start: Any) -> None:
    shared = FakeTier(tier="shared")
    prompt = tokens_of(400, 1)
    start(kind, FakeTier(), shared).ask(prompt)
    disk = FakeTier()
    here = start(kind, disk, shared)
    reuse = here.ask(prompt)
    assert (reuse.reused_tokens, reuse.tier) == (392, "shared")
    here.forget_live()
    assert here.ask(prompt).tier == "ram"
    assert here.store.flush(10)
    shared.failing.update({"find", "get"})
    reuse = start(kind, disk, shared).ask(prompt)
    assert (reuse.reused_tokens, reuse.tier) == (392, "disk")


def test_a_round_trip_is_made_only_where_there_is_much_to_gain(start: Any) -> None:
    kind = KINDS[0].values[0]
    shared = FakeTier(tier="shared")
    process = start(kind, shared)
    prompt = tokens_of(300, 1)
    process.ask(prompt)
    asked = shared.calls["find"]
    process.ask(joined(prompt, tokens_of(40, 2)))
    assert shared.calls["find"] == asked
    process.ask(joined(prompt, tokens_of(200, 3)))
    assert shared.calls["find"] > asked


def test_a_hit_in_memory_asks_nobody(start: Any) -> None:
    kind = KINDS[0].values[0]
    disk = FakeTier()
    process = start(kind, disk)
    prompt = tokens_of(300, 1)
    process.ask(prompt)
    disk.calls.clear()
    process.forget_live()
    assert process.ask(prompt).tier == "ram"
    assert disk.calls.keys() <= {"touch"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_runtime_that_fails_takes_nothing_from_others(kind: dict[str, Any], start: Any) -> None:
    shared = FakeTier(tier="shared")
    prompts = [tokens_of(300, seed) for seed in range(3)]
    for prompt in prompts:
        start(kind, shared).ask(prompt)
    kept = set(shared)
    reader = start(kind, shared, ram=5000)
    for operation in ("restore", "restore:verify"):
        for prompt in prompts:
            reader.forget_live()
            reader.runtime.fail(operation)
            reader.ask(prompt)
    assert kept <= set(shared)


def test_fault_31_no_second_limit_evicts_while_memory_is_free(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamakeep import forest

    monkeypatch.setattr(forest, "_MAX_COLD", 20)
    kind = KINDS[0].values[0]
    disk = FakeTier()
    writer = start(kind, disk)
    others = [tokens_of(200, 100 + seed) for seed in range(12)]
    for prompt in others:
        writer.ask(prompt)
    process = start(kind, disk)
    process.store._promote_later = lambda *_: None  # type: ignore[method-assign]
    warm = [tokens_of(200, seed) for seed in range(5)]
    for prompt in warm:
        process.ask(prompt)
    for prompt in others:
        process.ask(prompt)
    assert len(process.tree._cold) <= 24  # a prompt's own are let be until it is served
    assert process.tree.counters.evicted_segments == 0
    for prompt in warm:
        process.forget_live()
        assert process.ask(prompt).tier == "ram"


turns = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 220), st.integers(0, 9)),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(turns=turns, ram=st.sampled_from([0, 2500, 9000, 1 << 24]), align=st.sampled_from([1, 8]))
def test_any_order_of_prompts_restarts_losses_and_failures(
    kind: dict[str, Any], turns: list[tuple[int, int, int, int]], ram: int, align: int
) -> None:
    """Three processes over one tier, each step compared with a cold run."""
    disk = FakeTier()
    tails = [tokens_of(300, seed) for seed in range(3)]
    base = tokens_of(300, 99)
    processes: list[Process | None] = [None, None, None]
    try:
        for who, shared, n_tokens, trouble in turns:
            process = processes[who]
            if process is None or trouble == 0:
                if process is not None:
                    process.store.close()
                process = processes[who] = Process(kind, disk.another(), ram=ram, align=align)
            if trouble == 1 and len(disk):
                disk.delete(sorted(disk)[n_tokens % len(disk)])
            [tier] = process.store.below
            tier.failing = {2: {"find"}, 3: {"get"}, 4: {"put"}}.get(trouble, set())  # type: ignore[attr-defined]
            prompt = joined(base[: shared * 50], tails[n_tokens % 3][:n_tokens])
            if trouble == 5:
                process.forget_live()
            process.ask(prompt, flush=trouble != 6)
    finally:
        for process in processes:
            if process is not None:
                process.store.close()
