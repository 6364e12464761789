"""Replays: tiny traces by hand, and the proof that sizes decide as bytes do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamakeep.errors import InvalidValue, StateRejected
from llamakeep.events import Event
from llamakeep.policy import policy_names
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.sized import SizedRuntime, of_size
from llamakeep.sequence import KeptSequence
from llamakeep.simulate.replay import Model, Outcome, PromptDriver, TraceClock, TreeDriver, replay
from llamakeep.simulate.trace import Trace, open_trace
from llamakeep.states import Segment
from llamakeep.stores.memory import MemoryStore
from tests.simulate_tools import blocks_trace, line, put_lines, random_prompts, trace_of


def counted(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.reused_tokens, outcome.requests_hit, outcome.evicted_bytes


# -- by hand ---------------------------------------------------------------------------------------

A, B, C = [1, 2], [3, 4], [1, 5]


def used_again(tmp_path: Path) -> Trace:
    """Blocks of 8 tokens; A comes again, each time with another half block behind it."""
    lines = [
        line(ids, [8] * len(ids) if ids[-1] < 90 else [8, 8, 4], 1.0)
        for ids in (A, B, [*A, 90], [5], [*A, 91])
    ]
    path = put_lines(tmp_path / "t.jsonl", *({**each, "block_size": 8} for each in lines))
    return open_trace(path)


def test_the_tree_by_hand(tmp_path: Path) -> None:
    with used_again(tmp_path) as trace:
        # Four blocks fit, a byte a token. A and B fill it. A is there, and was used after B; so
        # for 5 goes 4, and A is there again.
        outcome = replay(trace, capacity_bytes=32)
        assert (outcome.n_requests, outcome.input_tokens) == (5, 80)
        assert counted(outcome) == (16 + 16, 2, 8)
        assert outcome.evaluated_tokens == 48
        assert outcome.saved_share == 0.4
        assert outcome.restored_bytes == {"ram": 32}
        assert (outcome.cache, outcome.policy) == ("tree", "hazard")  # which begins as lru


def test_by_age_another_block_goes(tmp_path: Path) -> None:
    with used_again(tmp_path) as trace:
        # For 5 goes 2, which came before 4; half of A is left, and for the other half goes 4.
        outcome = replay(trace, capacity_bytes=32, policy="oldest")
        assert counted(outcome) == (16 + 8, 2, 16)


def test_what_does_not_fit_evicts_nothing() -> None:
    with blocks_trace(A, [7, 8, 9], A, block_tokens=8) as trace:
        outcome = replay(trace, capacity_bytes=20)
        assert counted(outcome) == (8, 1, 0)


def test_the_prompt_cache_by_hand() -> None:
    """One slot beside the cache. A whole prompt moves out when it is used."""
    with blocks_trace(A, B, A, C, B, block_tokens=8) as trace:
        outcome = replay(trace, "prompt", capacity_bytes=32)
        # B takes A's slot, which is kept; A comes back, B is kept: 15 of 16 tokens. C shares half
        # with A, in the slot: 8, and A is lost with it. B comes back: 15, and C is kept.
        assert counted(outcome) == (15 + 8 + 15, 3, 0)
        assert (outcome.cache, outcome.policy) == ("prompt", "oldest")
        assert outcome.restored_bytes == {"ram": 32}
        assert counted(replay(trace, "prompt", capacity_bytes=0)) == (8, 1, 0)


def test_warmup() -> None:
    with blocks_trace(A, A, B, A, B, block_tokens=8) as trace:
        outcome = replay(trace, capacity_bytes=100, warmup=2)
        assert (outcome.n_requests, outcome.input_tokens) == (3, 48)
        assert counted(outcome) == (16, 2, 0)
        assert outcome.restored_bytes == {"ram": 16}
        for warmup in (-1, 5):
            with pytest.raises(InvalidValue, match=f"0 to 4 requests, not {warmup}"):
                replay(trace, capacity_bytes=100, warmup=warmup)


def test_a_hybrid_resumes_at_checkpoints_only() -> None:
    model = Model(1, Family.HYBRID, 10)
    with blocks_trace([1, 2, 3], [1, 2, 4], [1, 2, 5], block_tokens=8) as trace:
        # The first leaves a checkpoint near its end, at 16 of 24. It serves the others, which
        # part there.
        outcome = replay(trace, capacity_bytes=1000, model=model)
        assert counted(outcome) == (16 + 16, 2, 0)
        assert outcome.restored_bytes == {"ram": 2 * (16 + 10)}
        # Rows without a checkpoint are worth nothing.
        assert counted(replay(trace, capacity_bytes=25, model=model)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "tier"}, "cache must be tree or prompt, not 'tier'"),
        ({"policy": "none"}, "unknown policy 'none'"),
        ({"cache": "tree", "policy": "upstream"}, "'upstream' is not for tree"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with blocks_trace(A) as trace, pytest.raises(InvalidValue, match=message):
        replay(trace, capacity_bytes=1, **options)


def test_a_model_has_checkpoints_or_not() -> None:
    with pytest.raises(InvalidValue, match="attention family has no checkpoints"):
        Model(1, Family.ATTENTION, 1)
    with pytest.raises(InvalidValue, match="hybrid family needs checkpoint_bytes"):
        Model(1, Family.HYBRID)
    with pytest.raises(InvalidValue, match="bytes_per_token must be 1 or more"):
        Model(0)


def test_the_clock_follows_the_trace_and_never_stands() -> None:
    clock = TraceClock()
    seen = []
    for timestamp in (-5.0, -5.0, 3.0, 2.0, 3.0, 9.0):
        clock.go_to(timestamp)
        seen.append(clock())
    assert seen == sorted(set(seen))
    assert (seen[0], seen[2], seen[-1]) == (-5.0, 3.0, 9.0)


# -- sizes decide as bytes do ----------------------------------------------------------------------


class Watched(MemoryStore[Any]):
    """Remembers what went, in order."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.gone: list[bytes] = []

    def delete(self, name: bytes) -> bool:
        self.gone.append(name)
        return super().delete(name)


def runtimes(family: Family, n_ctx: int) -> tuple[FakeRuntime, SizedRuntime]:
    """One that holds bytes and one that holds sizes, of the same sizes."""
    fake = FakeRuntime(family, n_ctx=n_ctx, n_vocab=2**31, n_swa=2, row_bytes=16)
    fixed = fake.segment_bytes(1) - 16 if fake.traits.segments else 0
    checkpoint_bytes = 0
    if fake.traits.rolling:
        fake.evaluate(0, np.arange(8, dtype=np.int32))
        checkpoint_bytes = fake.checkpoint_bytes(0)
        fake.clear(0)
    sized = SizedRuntime(
        family,
        n_ctx=n_ctx,
        n_swa=2,
        bytes_per_token=16,
        fixed_bytes=fixed,
        checkpoint_bytes=checkpoint_bytes,
    )
    return fake, sized


@pytest.mark.parametrize("policy", policy_names("tree"))
@pytest.mark.parametrize("family", list(Family))
def test_the_tree_decides_by_sizes_as_it_does_by_bytes(family: Family, policy: str) -> None:
    """What is reused, what is evicted and in which order, and what is left: all the same."""
    evicted = reused = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prompts = random_prompts(rng, n=30, longest=120)
        prompts = [np.repeat(prompt, 4).tolist() for prompt in prompts]
        capacity_bytes = int(rng.integers(1_000, 8_000))
        with trace_of(prompts) as trace:
            drivers, stores, clock = [], [], TraceClock()
            for runtime in runtimes(family, trace.longest_tokens):
                stores.append(Watched(capacity_bytes))
                drivers.append(
                    TreeDriver(runtime, stores[-1], segment_tokens=16, policy=policy, clock=clock)
                )
            for request in trace:
                clock.go_to(request.timestamp * 1800)
                served = [driver.serve(request) for driver in drivers]
                assert served[0] == served[1]
                assert stores[0].gone == stores[1].gone
                assert list(stores[0]) == list(stores[1])
                reused += served[0]
            full, sizes = drivers
            assert full.tree.counters == sizes.tree.counters
            assert full.tree.entries() == sizes.tree.entries()
            assert full.restored_bytes == sizes.restored_bytes
            for driver in drivers:
                driver.check()
            evicted += full.tree.counters.evicted_bytes
    assert evicted > 0
    assert reused > 0


@pytest.mark.parametrize("policy", policy_names("prompts"))
@pytest.mark.parametrize("family", [Family.ATTENTION, Family.HYBRID, Family.RECURRENT])
def test_the_prompt_cache_decides_by_sizes_as_it_does_by_bytes(family: Family, policy: str) -> None:
    evicted = reused = 0
    capacity_bytes = 1_200 if family is Family.RECURRENT else 9_000
    for seed in range(4):
        rng = np.random.default_rng(seed)
        prompts = [np.repeat(each, 4).tolist() for each in random_prompts(rng, n=30, longest=120)]
        with trace_of(prompts) as trace:
            clock, drivers, heard = TraceClock(), [], []
            for runtime in runtimes(family, trace.longest_tokens):
                events: list[Event] = []
                driver = PromptDriver(runtime, capacity_bytes, policy=policy, clock=clock)
                driver.cache._emit_to = _both(driver._hear, events.append)
                heard.append(events)
                drivers.append(driver)
            for request in trace:
                clock.go_to(request.timestamp * 1800)
                served = [driver.serve(request) for driver in drivers]
                assert served[0] == served[1]
                assert heard[0] == heard[1]
                reused += served[0]
            for driver in drivers:
                driver.check()
            one, other = ([(e.tokens.tolist(), e.n_bytes) for e in d.cache] for d in drivers)
            assert one == other
            evicted += drivers[0].evicted_bytes
            assert drivers[0].evicted_bytes == drivers[1].evicted_bytes
    assert evicted > 0
    assert reused > 0


def _both(*listeners: Any) -> Any:
    def hear(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return hear


# -- the runtime of sizes --------------------------------------------------------------------------


def test_states_have_a_size_and_no_bytes() -> None:
    data = of_size(1 << 50)
    assert (data.nbytes, data.base.nbytes if data.base is not None else 0) == (1 << 50, 1)
    assert not data.flags.writeable


def test_it_refuses_what_is_no_state_of_that_position() -> None:
    runtime = SizedRuntime("hybrid", bytes_per_token=2, checkpoint_bytes=5)
    runtime.evaluate(0, np.arange(8, dtype=np.int32))
    segment, checkpoint = runtime.read_segment(0, 0, 8), runtime.read_checkpoint(0)
    assert (segment.data.nbytes, checkpoint.data.nbytes) == (16, 5)
    runtime.restore(0, 8, [segment], checkpoint)
    assert runtime.calls.written_bytes == 21
    with pytest.raises(StateRejected, match="the checkpoint is at 8, not 7"):
        runtime.restore(0, 7, [segment], checkpoint)
    with pytest.raises(StateRejected, match="the checkpoint is at None, not 8"):
        runtime.restore(0, 8, [segment])
    with pytest.raises(StateRejected, match="segments reach to 8, not to 9"):
        runtime.restore(0, 9, [segment], checkpoint)
    with pytest.raises(StateRejected, match="does not continue from 0"):
        runtime.restore(0, 8, [Segment(0, 8, of_size(15))], checkpoint)
    with pytest.raises(StateRejected, match="the checkpoint is at None, not 4"):
        runtime.rewind(0, 4)
    assert runtime.positions(0).n_tokens == 8


def test_it_has_no_outputs_and_no_device() -> None:
    runtime = SizedRuntime("hybrid", checkpoint_bytes=5)
    refused = [
        runtime.logits,
        lambda: runtime.decode([]),
        lambda: runtime.read_device_checkpoint(0),
        lambda: runtime.read_segment(0, 0, 1),
        lambda: runtime.read_checkpoint(0),
        lambda: runtime.copy(0, 0, 1),
        lambda: runtime.rewind(0, 1),
    ]
    for call in refused:
        with pytest.raises(InvalidValue):
            call()


def test_a_sequence_keeps_its_rows_when_it_is_cut() -> None:
    runtime = SizedRuntime("swa", n_ctx=64, n_swa=8, checkpoint_bytes=5)
    runtime.evaluate(0, np.arange(32, dtype=np.int32))
    assert runtime.positions(0).pos_min == 24
    assert runtime.can_rewind(0, 31)
    runtime.rewind(0, 31)
    assert (runtime.positions(0).pos_min, runtime.positions(0).n_tokens) == (24, 31)
    assert not runtime.can_rewind(0, 20)


def test_live_sequences_can_be_used_with_it() -> None:
    """A keeper's sequence goes on from what is live, as with any runtime."""
    from llamakeep.tree import PrefixTree

    runtime = SizedRuntime(n_ctx=64, bytes_per_token=1)
    tree = PrefixTree(MemoryStore(100), runtime.traits)
    sequence = KeptSequence(runtime, tree)
    prompt = np.arange(40, dtype=np.int32)
    for n_tokens, expected in itertools.chain([(32, 0), (40, 32), (20, 16)]):
        reuse = sequence.resume(prompt[:n_tokens])
        assert (reuse.reused_tokens, reuse.tier) == (expected, "live" if expected else "none")
        sequence.advance(prompt[reuse.reused_tokens : n_tokens])
