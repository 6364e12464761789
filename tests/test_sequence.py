"""`KeptSequence` on the fake runtime: every memory family, without a model.

The fake's logits are a function of all state the family attends to, so they are equal to a cold
run's only where the sequence holds exactly what it should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamakeep.errors import DecodeError, RestoreFailed, StateError
from llamakeep.modes import Mode
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import OPERATIONS, FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import IntArray
from llamakeep.tree import PrefixTree

KINDS: list[Any] = [
    *(pytest.param({"family": family}, id=family.value) for family in Family),
    pytest.param({"family": Family.SWA, "dense": True}, id="swa-dense"),
    pytest.param({"family": Family.HYBRID, "whole": True}, id="whole"),
]


def tokens_of(n: int, seed: int) -> IntArray:
    """Return `n` random tokens."""
    return np.random.default_rng(seed).integers(0, 50_000, n, dtype=np.int32)


def joined(*parts: IntArray) -> IntArray:
    """Return the parts one after the other."""
    return np.concatenate(parts)


class Served:
    """A sequence with a tree, and a second runtime for cold answers."""

    def __init__(self, kind: dict[str, Any], *, capacity: int = 1 << 24, **options: Any) -> None:
        self.runtime = FakeRuntime(**kind, n_seqs=2)
        self.cold = FakeRuntime(**kind, n_seqs=1)
        self.tree = PrefixTree(
            MemoryStore(capacity), self.runtime.traits, segment_tokens=64, max_checkpoints=8
        )
        self.sequences = [
            KeptSequence(self.runtime, self.tree, seq_id, **options) for seq_id in range(2)
        ]

    def ask(self, prompt: IntArray, seq_id: int = 0) -> int:
        """Serve a prompt, compare with a cold run, and return the reused tokens."""
        sequence = self.sequences[seq_id]
        reuse = sequence.resume(prompt)
        assert reuse.reused_tokens + reuse.evaluated_tokens == prompt.size
        assert reuse.evaluated_tokens >= 2 or not prompt.size >= 2
        sequence.advance(prompt[reuse.reused_tokens :])
        sequence.save()
        self.cold.clear(0)
        self.cold.evaluate(0, prompt)
        assert np.array_equal(self.runtime.logits(), self.cold.logits())
        self.tree.check()
        return reuse.reused_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_grow_branch_edit_repeat_and_return(kind: dict[str, Any]) -> None:
    served = Served(kind)
    system, first = tokens_of(300, 1), tokens_of(141, 2)
    prompt = joined(system, first)
    assert served.ask(prompt) == 0
    assert served.ask(prompt) == 432
    longer = joined(prompt, tokens_of(90, 3))
    assert served.ask(longer) >= 432
    served.ask(joined(system, tokens_of(77, 4)))
    assert served.ask(joined(system, tokens_of(50, 5))) == 296
    assert served.ask(longer) == 528
    served.ask(joined(longer[:400], tokens_of(60, 6)))
    assert served.ask(longer[:440]) >= 0
    assert served.ask(longer) == 528
    assert served.sequences[0].failures == {}


@pytest.mark.parametrize("kind", KINDS)
def test_fault_16_what_one_sequence_computed_serves_the_other(kind: dict[str, Any]) -> None:
    served = Served(kind)
    prompt = tokens_of(400, 1)
    served.ask(prompt, 0)
    assert served.ask(joined(prompt[:392], tokens_of(30, 2)), 1) == 392


def failing(operation: str) -> Callable[[str], None]:
    """Return a hook that lets every such operation fail."""

    def fail(current: str) -> None:
        if current == operation:
            raise RestoreFailed("broken by the test") if ":" in current else StateError("broken")

    return fail


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("re")])
def test_a_runtime_that_fails_costs_time_and_nothing_else(
    kind: dict[str, Any], operation: str
) -> None:
    served = Served(kind)
    prompts = [tokens_of(300, 1), tokens_of(200, 2)]
    prompts.append(joined(prompts[0][:150], tokens_of(80, 3)))
    served.ask(prompts[0])
    served.runtime.failures = failing(operation)
    for prompt in (*prompts, prompts[0], prompts[2]):
        served.ask(prompt)
    served.runtime.failures = None
    for prompt in prompts * 2:
        served.ask(prompt)
    assert served.ask(prompts[0]) >= 288


@pytest.mark.parametrize("kind", KINDS)
def test_any_capacity_is_enough_to_answer(kind: dict[str, Any]) -> None:
    for capacity in (0, 900, 2_500, 7_000, 20_000):
        served = Served(kind, capacity=capacity)
        store = served.tree.store
        assert isinstance(store, MemoryStore)
        for seed in (1, 2, 1, 3, 1, 4, 2):
            served.ask(joined(tokens_of(100, 0), tokens_of(60 + 17 * seed, seed)))
            assert store.peak_bytes <= capacity
            if served.runtime.traits.rolling:  # nothing is kept that leads to no checkpoint
                assert all(entry.checkpoints for entry in served.tree.entries())


@pytest.mark.parametrize("kind", KINDS)
def test_random_walks_through_prompts_are_always_right(kind: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    served = Served(kind, capacity=30_000, align=4)
    known = [tokens_of(150, 0)]
    for step in range(60):
        base = known[rng.integers(len(known))]
        kept = base[: rng.integers(1, base.size + 1)]
        prompt = joined(kept, tokens_of(int(rng.integers(1, 60)), 100 + step))[:700]
        known.append(prompt)
        served.ask(prompt, int(rng.integers(2)))


def test_live_rows_that_were_decoded_are_continued_where_they_end() -> None:
    served = Served({"family": Family.HYBRID})
    sequence = served.sequences[0]
    prompt = tokens_of(100, 1)
    served.ask(prompt)
    answer = tokens_of(7, 2)
    for token in answer:
        sequence.advance(np.array([token], np.int32))
    assert served.ask(joined(prompt, answer, tokens_of(20, 3))) == 107


def test_advance_that_fails_leaves_an_empty_or_known_sequence() -> None:
    served = Served({"family": Family.HYBRID})
    sequence, prompt = served.sequences[0], tokens_of(100, 1)
    served.runtime.fail("evaluate")
    with pytest.raises(DecodeError, match="injected"):
        sequence.advance(prompt)
    assert sequence.live.n_tokens == served.runtime.positions(0).n_tokens
    served.ask(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_6_a_failed_restore_costs_its_own_prompt_and_no_other(kind: dict[str, Any]) -> None:
    served = Served(kind, capacity=1 << 24)
    system = tokens_of(200, 0)
    prompts = [joined(system, tokens_of(100, seed)) for seed in range(1, 11)]
    for prompt in prompts * 2:
        served.ask(prompt)
    n_nodes = len(served.tree)
    served.runtime.failures = failing("restore:verify")
    served.ask(prompts[0])
    served.runtime.failures = None
    assert len(served.tree) >= n_nodes - 3
    for prompt in prompts[1:]:
        assert served.ask(prompt) == 296


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_whose_memory_was_cleared_by_another_notices(kind: dict[str, Any]) -> None:
    served = Served(kind)
    first, second = tokens_of(300, 1), tokens_of(280, 2)
    served.ask(first, 0)
    served.ask(second, 1)
    served.ask(tokens_of(90, 3), 0)
    served.runtime.fail("restore:verify", cleared_all=True)
    served.ask(first, 0)
    assert served.runtime.positions(1).n_tokens == 0
    with pytest.raises(StateError, match="no longer holds its 280 tokens"):
        served.sequences[1].advance(tokens_of(20, 4))
    more = joined(second, tokens_of(20, 4))
    served.ask(more, 1)
    assert served.ask(joined(more[:296], tokens_of(9, 5)), 0) <= 296


def test_saving_after_the_memory_was_cleared_keeps_nothing_wrong() -> None:
    served = Served({"family": Family.ATTENTION})
    prompt = tokens_of(300, 1)
    sequence = served.sequences[0]
    sequence.resume(prompt)
    sequence.advance(prompt)
    served.runtime.clear_all()
    sequence.save()
    assert len(served.tree) == 0
    assert sequence.live.n_tokens == 0


def test_a_cut_that_fails_is_not_believed() -> None:
    served = Served({"family": Family.ATTENTION})
    sequence = served.sequences[0]
    served.ask(tokens_of(100, 1))
    served.runtime.fail("rewind:cut")
    assert sequence.drop_past(60)
    assert sequence.live.n_tokens == served.runtime.positions(0).n_tokens == 0


def test_the_eviction_queue_does_not_grow_with_requests() -> None:
    served = Served({"family": Family.ATTENTION}, capacity=6_000)
    common = tokens_of(64, 0)
    for seed in range(300):
        served.ask(joined(common, tokens_of(40, seed)))
    assert len(served.tree._queue) <= 2 * len(served.tree) + 64


def test_reasons_say_why_the_rest_is_evaluated() -> None:
    served = Served({"family": Family.HYBRID})
    sequence, prompt = served.sequences[0], tokens_of(300, 1)

    def reason(prompt: IntArray) -> str:
        reuse = sequence.resume(prompt)
        sequence.advance(prompt[reuse.reused_tokens :])
        sequence.save()
        return reuse.reason

    end = "the end of a prompt is always evaluated, from a multiple of 8 on"
    assert reason(prompt) == "first time seen"
    assert reason(prompt) == end
    assert reason(joined(prompt[:296], tokens_of(50, 2))) == "new from token 296 on"
    forked = joined(prompt[:200], tokens_of(50, 3))
    leaves = "no checkpoint at token 200, where the prompt leaves what is known; there is none"
    assert reason(forked) == leaves
    assert reason(joined(prompt[:200], tokens_of(50, 4))) == "new from token 200 on"
    served.runtime.fail("restore")
    assert reason(prompt) == "a stored state could not be used: injected into restore"
    attention = Served({"family": Family.ATTENTION})
    attention.ask(prompt)
    assert attention.sequences[0].resume(forked).reason == "new from token 200 on"


@pytest.mark.parametrize("kind", KINDS)
def test_fault_70_scored_prompts_reuse_no_row_without_logits(kind: dict[str, Any]) -> None:
    served = Served(kind)
    sequence, prompt = served.sequences[0], tokens_of(100, 1)
    served.ask(prompt)
    served.ask(tokens_of(80, 2))
    assert served.ask(prompt) == 96  # restored: nobody has the logits of its rows
    for token in (5, 6):
        sequence.advance(np.array([token], np.int32))
    longer = joined(prompt, np.array([5, 6, 7, 8, 9], np.int32))
    reuse = sequence.resume(longer, scored=True)
    assert reuse.reused_tokens == 0
    assert reuse.reason == "logits of all rows are wanted, and are there for 0"


@pytest.mark.parametrize("kind", KINDS)
def test_faults_4_and_47_sequences_of_two_namespaces_share_nothing(kind: dict[str, Any]) -> None:
    served = Served(kind)
    prompt = tokens_of(200, 1)
    for sequence, namespace in zip(served.sequences, (b"a", b"b"), strict=True):
        sequence.namespace = namespace
    served.ask(prompt, 0)
    assert served.ask(prompt, 1) == 0
    for seq_id in (0, 1, 0):
        served.ask(tokens_of(90, 2 + seq_id), seq_id)
        assert served.ask(prompt, seq_id) == 192


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", ["another conversation", "nothing"])
def test_fault_14_whatever_a_sequence_holds_the_tree_is_asked(
    kind: dict[str, Any], held: str
) -> None:
    served = Served(kind)
    prompt = tokens_of(200, 1)
    served.ask(prompt, 0)
    if held == "another conversation":
        served.ask(tokens_of(60, 2), 1)
    assert served.ask(prompt, 1) == 192  # all but the end, for either
    assert served.sequences[1].failures == {}


@pytest.mark.parametrize("kind", KINDS)
def test_fault_15_no_share_of_what_is_kept_forbids_its_use(kind: dict[str, Any]) -> None:
    served = Served(kind, align=1)
    kept, sequence = tokens_of(100, 1), served.sequences[0]
    sequence.resume(kept, user_starts=[20])  # a checkpoint at 20 of 100
    sequence.advance(kept)
    sequence.save()
    served.ask(tokens_of(30, 2))
    expected = 20 if served.runtime.traits.rolling else 22
    assert served.ask(joined(kept[:22], tokens_of(30, 3))) == expected
    assert served.ask(joined(kept, tokens_of(9, 4))) >= 98  # and the rest is still there


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.READ])
def test_fault_26_what_a_task_that_never_reads_back_evaluates_is_not_stored(
    kind: dict[str, Any], mode: Mode
) -> None:
    """Who embeds or ranks says so: 300 prompts, none of which is asked for again."""
    served = Served(kind)
    prompt, sequence = tokens_of(200, 1), served.sequences[0]
    served.ask(prompt)
    before = len(served.tree), served.tree.store.used_bytes
    for seed in range(300):
        once = tokens_of(40, 100 + seed)
        reuse = sequence.resume(once, mode=mode)
        sequence.advance(once[reuse.reused_tokens :])
        sequence.save()
    served.tree.check()
    assert (len(served.tree), served.tree.store.used_bytes) == before
    assert served.ask(prompt) == 192
