"""Slots: which one serves, what is saved of it, where it goes on; and what fails in the middle.

Answers are compared with a cold run of the same fake model: what is reused is right, whatever was
saved, restored, copied or cut before.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamakeep.entries import Loading
from llamakeep.errors import (
    ContextOverflow,
    DecodeError,
    IntegrityError,
    InvalidValue,
    LlamakeepError,
    TokenError,
)
from llamakeep.events import CheckpointRestored, Event, SlotById, SlotByLru, SlotBySimilarity
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import OPERATIONS, FakeRuntime
from llamakeep.slots import KINDS, Served, Slots
from llamakeep.tokens import IntArray

FAMILIES = list(Family)
ROLLING = [family for family in Family if family is not Family.ATTENTION]
MODES = ["upstream", "keep"]


class Ticks:
    """A clock that goes on by a second with every look."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._ticks))


def quiet(event: Event) -> None:
    """Take an event and do nothing with it."""


def make(
    family: Family | str = Family.ATTENTION,
    *,
    n_seqs: int = 1,
    mode: str = "upstream",
    limit_bytes: int = 1 << 20,
    runtime: FakeRuntime | None = None,
    cache: dict[str, Any] | None = None,
    slots_mode: str | None = None,
    n_ctx: int = 4096,
    n_batch: int = 128,
    **options: Any,
) -> Slots:
    """Return slots over a fake model; in keep mode one token is left to evaluate, as in faults."""
    runtime = runtime or FakeRuntime(
        family, n_ctx=n_ctx, n_seqs=n_seqs, n_batch=n_batch, n_swa=16, n_vocab=10_000
    )
    clock = Ticks()
    prompt_cache = PromptCache(
        limit_bytes,
        None,
        mode=mode,
        emit=quiet,
        clock=clock,
        **(cache or {}),  # type: ignore[arg-type]
    )
    options = {
        "mode": slots_mode,
        "min_evaluated": 1,
        "checkpoint_min_step": 8,
        "n_ubatch": 8,
        "emit": quiet,
    } | options
    return Slots(runtime, prompt_cache, clock=clock, **options)


def parts(slots: Slots) -> tuple[FakeRuntime, PromptCache]:
    runtime = slots._runtime
    assert isinstance(runtime, FakeRuntime)
    return runtime, slots._cache


def span(n: int, start: int = 0) -> IntArray:
    return np.arange(start, start + n, dtype=np.int32)


def join(*arrays: IntArray) -> IntArray:
    return np.concatenate(arrays)


def cold(family: Family | str, tokens: IntArray, **options: Any) -> Any:
    runtime = FakeRuntime(family, n_ctx=300, n_swa=16, n_vocab=10_000, **options)
    runtime.evaluate(0, tokens)
    return runtime.logits()


def serve(slots: Slots, prompt: IntArray, **options: Any) -> Served:
    """Serve a prompt and see that the answer is that of a cold run, and the counts add up."""
    served = slots.serve(prompt, **options)
    slots.check()
    runtime, _ = parts(slots)
    family = runtime.traits.family
    np.testing.assert_array_equal(runtime.logits(), cold(family, prompt))
    assert served.evaluated_tokens + served.reused_tokens == prompt.size
    return served


def kinds(served: Served) -> list[str]:
    return [event.kind for event in served.events]


# -- which slot ------------------------------------------------------------------------------------


def test_the_least_recently_used_slot_serves_and_of_equals_the_last() -> None:
    slots = make(n_seqs=3, cache_idle_slots=False)
    chosen = [serve(slots, span(10, start)).slot_id for start in (0, 100, 200, 300)]
    assert chosen == [2, 1, 0, 2]
    event = serve(slots, span(10, 400)).events[0]
    assert isinstance(event, SlotByLru)
    assert event.t_last > 0
    assert make(n_seqs=1).serve(span(3)).events[0] == SlotByLru(0, -1)


def test_a_slot_must_share_more_than_a_tenth_of_the_prompt() -> None:
    for rest, kind in ((90, "slot_by_lru"), (89, "slot_by_similarity")):
        slots = make()
        serve(slots, span(10))
        served = serve(slots, join(span(10), span(rest, 500)))
        assert kinds(served)[0] == kind  # 10 of 100 is not more than 0.1
        assert served.reused_tokens == 10


@pytest.mark.parametrize("similarity", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_is_named_serves_and_is_reported_as_such(mode: str, similarity: float) -> None:
    slots = make(n_seqs=2, mode=mode, similarity=similarity, cache_idle_slots=False)
    slots.serve(span(10), slot=0)
    for prompt in (span(12), span(12, 100)):
        served = serve(slots, prompt, slot=1)
        assert served.slot_id == 1
        assert served.events[0] == SlotById(1)
        assert not {"slot_by_similarity", "slot_by_lru"} & set(kinds(served))


def test_the_slot_that_shares_most_serves() -> None:
    slots = make(n_seqs=3, cache_idle_slots=False)
    for slot, tokens in enumerate((span(10, 900), join(span(5), span(9, 700)), span(10))):
        slots.serve(tokens, slot=slot)
    served = serve(slots, span(20))
    event = served.events[0]
    assert event == SlotBySimilarity(2, 0.5, 0.1, 1.0)
    assert served.reused_tokens == 10


def test_of_slots_that_share_as_much_the_first_serves() -> None:
    slots = make(n_seqs=3, cache_idle_slots=False)
    for slot in (2, 1):
        slots.serve(span(10), slot=slot)
    assert serve(slots, span(12)).slot_id == 1


def test_what_an_embedding_left_is_not_copied() -> None:
    slots = make(n_seqs=2, mode="keep", cache_idle_slots=False)
    slots.serve(span(10), slot=0, kind="embedding")
    assert serve(slots, span(12), slot=1).reused_tokens == 0


def test_a_similarity_of_0_chooses_by_recency_alone() -> None:
    slots = make(similarity=0.0)
    slots.serve(span(10))
    assert kinds(serve(slots, span(12)))[0] == "slot_by_lru"


def test_those_who_evaluate_themselves_leave_no_events_behind() -> None:
    slots = make(n_seqs=2)

    def n_alive() -> int:
        gc.collect()
        return sum(isinstance(each, Event) for each in gc.get_objects())

    before = n_alive()
    for seed in range(1, 20):
        slot, update = slots.choose(span(20 * seed, seed))
        slots.begin(slot, span(20 * seed, seed), update=update)
    assert n_alive() == before
    assert slots.serve(span(30)).events


@pytest.mark.parametrize(("held", "saves"), [(20, False), (21, True)])
def test_a_slot_that_would_lose_more_than_half_is_saved(held: int, saves: bool) -> None:
    slots = make()
    slots.serve(span(held))
    served = serve(slots, join(span(10), span(10, 500)))
    assert ("saving_prompt" in kinds(served)) is saves
    assert len(parts(slots)[1]) == saves


def test_exactly_half_may_be_saved_by_rounding() -> None:
    # 13 of 22 tokens, in single precision, times 22 is less than 13: 0.49999997 of 26 are kept.
    slots = make()
    slots.serve(span(26))
    served = serve(slots, join(span(13), span(9, 500)))
    assert "saving_prompt" in kinds(served)
    event = served.events[0]
    assert isinstance(event, SlotBySimilarity)
    assert event.as_dict()["f_keep"] == 0.5


def test_a_slot_holds_what_was_evaluated() -> None:
    slots = make()
    slots.serve(span(10), answer=[70, 71])
    assert slots.slots[0].tokens.tolist() == [*range(10), 70, 71]
    # The answer's tokens are reused by the next turn, which has them in its prompt.
    assert serve(slots, join(span(10), span(2, 70), span(5, 90))).reused_tokens == 12
    assert repr(slots) == "Slots(upstream, Slot(0: 17 tokens, 0 checkpoints))"


# -- which tasks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("mode", MODES)
def test_only_completions_use_the_cache_and_take_checkpoints(kind: str, mode: str) -> None:
    slots = make(Family.HYBRID, mode=mode)
    _, cache = parts(slots)
    slots.serve(span(50))
    slots.serve(span(50, 100))
    assert len(cache) == 1
    counters = dict(cache.counters)
    for _ in range(2):
        served = slots.serve(join(span(50), span(5, 500)), kind=kind)
        assert served.loaded is None
        assert served.reused_tokens in (0, 54)
        # In keep what the completion held is saved before, and what such a task left is not.
        saved = counters | {"saved": 2} if mode == "keep" else counters
        assert cache.counters == saved
        assert not len(slots.slots[0].checkpoints)
    slots.check()


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_of_another_kind_does_not_cost_a_completion_its_tokens(
    family: Family, kind: str
) -> None:
    for mode, kept in (("keep", [60]), ("upstream", [])):
        slots = make(family, mode=mode)
        slots.serve(span(60))
        for _ in range(3):
            slots.serve(join(span(60), span(9, 500)), kind=kind)
        slots.serve(span(70, 1000))
        entries = [entry.n_tokens for entry in parts(slots)[1]]
        assert [n_tokens for n_tokens in entries if n_tokens == 60] == kept
        if mode == "keep":
            assert entries == kept
            assert serve(slots, span(61)).reused_tokens == 60


def test_infill_reuses_what_is_live_and_embedding_does_not() -> None:
    for kind, reused in (("infill", 10), ("embedding", 0), ("rerank", 0)):
        slots = make()
        slots.serve(span(10))
        assert serve(slots, span(12), kind=kind).reused_tokens == reused


# -- idle slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_idle_slots_are_saved_and_emptied_when_a_task_starts(mode: str) -> None:
    slots = make(n_seqs=2, mode=mode)
    runtime, cache = parts(slots)
    slots.serve(span(10))  # in slot 1
    served = serve(slots, span(10, 100))
    assert served.slot_id == 0
    assert [entry.n_tokens for entry in cache] == [10]
    assert runtime.positions(1).n_tokens == 0
    assert "saving_idle_slot" in kinds(served)
    assert serve(slots, span(12)).reused_tokens == 10


def test_without_a_unified_cache_idle_slots_are_saved_and_stay() -> None:
    slots = make(n_seqs=2, kv_unified=False)
    slots.serve(span(10))
    slots.serve(span(10, 100))
    assert [slot.n_tokens for slot in slots.slots] == [10, 10]
    # Each task saves it again, or tries to.
    assert "prompt_already_cached" in kinds(slots.serve(span(12, 100)))
    assert len(parts(slots)[1]) == 1


def test_idle_slots_are_not_saved_when_that_is_off_or_the_cache_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for options in ({"cache_idle_slots": False}, {"limit_bytes": 0}):
        slots = make(n_seqs=2, **options)
        slots.serve(span(10))
        slots.serve(span(10, 100))
        assert [slot.n_tokens for slot in slots.slots] == [10, 10]
    assert "idle slots are not saved" in caplog.text


@pytest.mark.parametrize(("mode", "held"), [("upstream", 0), ("keep", 10)])
def test_an_idle_slot_that_the_cache_refuses(mode: str, held: int) -> None:
    slots = make(n_seqs=2, mode=mode, limit_bytes=100)  # 10 tokens are 208 bytes
    slots.serve(span(10))
    slots.serve(span(10, 100))
    assert slots.slots[1].n_tokens == held  # llama-server empties it all the same
    slots.check()


@pytest.mark.parametrize(("mode", "entries"), [("upstream", 1), ("keep", 0)])
def test_idle_slots_when_another_kind_of_task_starts(mode: str, entries: int) -> None:
    slots = make(n_seqs=2, mode=mode)
    slots.serve(span(10))
    slots.serve(span(10, 100), kind="embedding")
    assert len(parts(slots)[1]) == entries
    assert slots.slots[1].n_tokens == (0 if entries else 10)
    # What an embedding left is of no use to anybody.
    slots.serve(span(10, 200), slot=1)
    assert slots.slots[0].n_tokens == 0
    assert all(100 not in entry.tokens for entry in parts(slots)[1]) is (mode == "keep")


# -- a full context --------------------------------------------------------------------------------


def full(purge: str, mode: str) -> Slots:
    """Return slots of 20, 40 and 30 tokens, used in the order 1, 2, 0, in a context of 100."""
    slots = make(n_seqs=4, n_ctx=100, purge=purge, mode=mode, cache_idle_slots=False)
    for slot, n_tokens in ((1, 40), (2, 30), (0, 20)):
        slots.serve(span(n_tokens, 100 * slot + 1000), slot=slot)
    return slots


@pytest.mark.parametrize(("purge", "victim"), [("first", 0), ("lru", 1), ("longest", 1)])
@pytest.mark.parametrize("mode", MODES)
def test_a_purged_slot_goes_into_the_cache(purge: str, victim: int, mode: str) -> None:
    slots = full(purge, mode)
    n_tokens = slots.slots[victim].n_tokens
    served = serve(slots, span(20, 5000), slot=3)
    purged = [event.line() for event in served.events if event.kind == "slot_purged"]
    assert purged == [f"purging slot {victim} with {n_tokens} tokens"]
    assert not slots.slots[victim].n_tokens
    # llama-server purges the first one, and loses it.
    kept = [] if (mode, purge) == ("upstream", "first") else [n_tokens]
    assert [entry.n_tokens for entry in parts(slots)[1]] == kept


def test_purging_goes_on_until_there_is_room_and_no_further() -> None:
    slots = full("lru", "keep")
    serve(slots, span(60, 5000), slot=3)
    assert [slot.n_tokens for slot in slots.slots] == [20, 0, 0, 60]
    served = serve(slots, span(100, 7000), slot=0)  # all of the context
    assert [slot.n_tokens for slot in slots.slots] == [100, 0, 0, 0]
    assert served.reused_tokens == 0
    slots = full("longest", "keep")
    serve(slots, span(60, 5000), slot=3)
    assert [slot.n_tokens for slot in slots.slots] == [0, 0, 0, 60] or [
        slot.n_tokens for slot in slots.slots
    ] == [20, 0, 0, 60]


@pytest.mark.parametrize("purge", ["first", "lru", "longest"])
def test_what_a_prompt_is_copied_from_is_purged_last(purge: str) -> None:
    slots = make(
        n_seqs=3, n_ctx=100, purge=purge, mode="keep", cache_idle_slots=False, limit_bytes=100
    )
    slots.serve(span(40), slot=0)  # first, longest, and used least recently; none can be saved
    slots.serve(span(38, 1000), slot=1)
    served = serve(slots, join(span(40), span(9, 500)), slot=2)
    assert served.reused_tokens == 40
    assert [slot.n_tokens for slot in slots.slots] == [40, 0, 49]
    # When it is the last one left, it goes as well.
    served = serve(slots, join(span(40), span(55, 700)), slot=1)
    assert [slot.n_tokens for slot in slots.slots] == [0, 95, 0]


# -- right answers in every family -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_a_cold_run(family: Family, mode: str) -> None:
    slots = make(family, n_seqs=2, mode=mode, ctx_checkpoints=4)
    random = np.random.default_rng(0)
    turns: list[IntArray] = [span(40), span(40, 100), join(span(30), span(10, 200))]
    for _ in range(60):
        pick = int(random.integers(len(turns)))
        action = random.integers(5)
        if action < 2 and turns[pick].size < 250:
            turns[pick] = join(turns[pick], random.integers(300, 400, 20).astype(np.int32))
        elif action == 2:
            turns[pick] = turns[pick][: max(10, int(random.integers(turns[pick].size)))]
        start = int(turns[pick].size) // 2
        serve(slots, turns[pick], user_starts=[start])
    if mode == "keep":
        assert parts(slots)[1].counters["hits"] > 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [each for each in ROLLING if each is not Family.SWA])
def test_a_checkpoint_that_saw_another_first_token_is_restored_by_upstream_alone(
    family: Family, mode: str
) -> None:
    """llama-server drops checkpoints beyond the position that is evaluated next, not at it."""
    slots = make(family, mode=mode, limit_bytes=0, n_batch=16, checkpoint_min_step=0)
    runtime, _ = parts(slots)
    for prompt in (span(12), span(5), span(12, 20)):
        serve(slots, prompt)  # each is right: only the second leaves a checkpoint at 1
    prompt = join(span(3, 20), span(9, 40))
    slots.serve(prompt)
    right = np.array_equal(runtime.logits(), cold(family, prompt))
    assert right is (mode == "keep")


@pytest.mark.parametrize("options", [{"dense": True}, {"whole": True}])
@pytest.mark.parametrize("mode", MODES)
def test_dense_windows_and_whole_states_answer_as_a_cold_run(mode: str, options: Any) -> None:
    runtime = FakeRuntime("swa", n_swa=16, n_seqs=2, n_batch=64, **options)
    slots = make(runtime=runtime, mode=mode)
    for prompt in (span(60), span(60, 100), span(70), join(span(65), span(9, 300)), span(65)):
        slots.serve(prompt)
        slots.check()
        plain = FakeRuntime("swa", n_swa=16, n_batch=64, **options)
        plain.evaluate(0, prompt)
        np.testing.assert_array_equal(runtime.logits(), plain.logits())
    assert not slots.failures


def test_a_draft_model_follows() -> None:
    for family in (Family.ATTENTION, Family.HYBRID):
        runtime = FakeRuntime("attention", n_batch=64, n_vocab=10_000)
        draft = runtime.draft = FakeRuntime(family, seed=1)
        slots = make(runtime=runtime, mode="keep")
        for prompt in (span(60), span(60, 100), span(70), join(span(33), span(9, 300)), span(65)):
            serve(slots, prompt)
            expected = FakeRuntime(family, seed=1)
            expected.evaluate(0, prompt)
            np.testing.assert_array_equal(draft.logits(), expected.logits())
            assert draft.positions(0).n_tokens == prompt.size
        slots.clear(0)
        assert draft.positions(0).n_tokens == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swa_full", [False, True])
def test_real_models_answer_as_in_a_cold_run(
    family: str, tiny_model: Callable[[str], Path], mode: str, swa_full: bool
) -> None:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    if swa_full and family not in ("swa", "hybrid-swa"):
        pytest.skip("only a window can be kept in full")
    sizes = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "segment_tokens": 16}
    runtime = LlamaCppRuntime.load(tiny_model(family), n_seqs=2, swa_full=swa_full, **sizes)
    plain = LlamaCppRuntime.load(tiny_model(family), swa_full=swa_full, **sizes)
    cache = PromptCache(64 << 20, mode=mode, emit=quiet)  # type: ignore[arg-type]
    slots = Slots(
        runtime, cache, checkpoint_min_step=16, ctx_checkpoints=6, n_ubatch=16, emit=quiet
    )
    random = np.random.default_rng(0)
    chats = [random.integers(300, 4000, 90).astype(np.int32) for _ in range(2)]
    chats.append(join(chats[0][:70], chats[1][:30]))
    reused = 0
    for turn in range(18):
        pick = int(random.integers(3))
        if turn % 3:
            more = random.integers(300, 4000, 20).astype(np.int32)
            chats[pick] = join(chats[pick], more)
        elif turn % 2:
            chats[pick] = chats[pick][: int(random.integers(40, 90))]
        prompt = chats[pick]
        served = slots.serve(
            prompt, user_starts=[30, prompt.size - 15], slot=[None, 0, 1][turn % 3]
        )
        slots.check()
        reused += served.reused_tokens
        plain.clear(0)
        plain.evaluate(0, prompt)
        np.testing.assert_allclose(runtime.logits(), plain.logits(), atol=5e-3)
    assert reused > (200 if mode == "keep" else 50)
    assert not slots.failures
    runtime.close()
    plain.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_is_updated_after_each_idle_slot_that_was_saved(mode: str) -> None:
    slots = make(n_seqs=3, mode=mode, kv_unified=False)
    slots.serve(span(10), slot=0)
    slots.serve(span(10, 100), slot=1)
    found = kinds(slots.serve(span(10, 200), slot=2))
    idle = found[found.index("saving_idle_slot") :]
    assert idle == [
        *("saving_idle_slot", "saving_prompt", "prompt_already_cached"),
        *("saving_idle_slot", "saving_prompt", "cache_state", "cached_prompt", "cached_prompt"),
    ]


# -- what fails in the middle ----------------------------------------------------------------------


def test_room_is_made_before_an_entry_is_loaded() -> None:
    slots = make(n_seqs=2, n_ctx=100, mode="keep", cache_idle_slots=False)
    slots.serve(span(60), slot=0)
    slots.serve(span(30, 1000), slot=0)
    slots.serve(span(60, 2000), slot=1)
    served = serve(slots, join(span(60), span(9, 500)), slot=0)
    assert (served.loaded, served.reused_tokens) == (Loading.RESTORED, 60)
    assert not slots.failures
    assert slots.slots[1].n_tokens == 0


@pytest.mark.parametrize("family", [Family.ATTENTION, Family.HYBRID])
@pytest.mark.parametrize(
    ("operation", "failure"),
    [("rewind:cut", "rewind"), ("copy:rows", "copy"), ("restore:verify", "load")],
)
@pytest.mark.parametrize("idle", [False, True])
def test_a_failure_that_empties_all_sequences_is_told_to_every_slot_at_once(
    family: Family, operation: str, failure: str, idle: bool
) -> None:
    slots = make(family, n_seqs=3, mode="keep", cache_idle_slots=idle, kv_unified=False)
    runtime, _ = parts(slots)
    if failure == "load":
        slots.serve(span(60), slot=1, user_starts=[50])
        slots.serve(span(60, 2000), slot=1)
    slots.serve(span(40), slot=0, user_starts=[30])  # what the prompt could be copied from
    slots.serve(span(60, 1000), slot=2, user_starts=[50])
    runtime.fail(operation, cleared_all=True)
    start = 1000 if failure == "rewind" else 0
    prompt = join(span(50, start), span(9, 500))
    served = serve(slots, prompt, slot=2 if failure == "rewind" else 1)
    assert (served.reused_tokens, slots.failures) == (0, {failure: 1})
    assert [slot.n_tokens for slot in slots.slots if slot.slot_id != served.slot_id] == [0, 0]
    for prompt, slot in itertools.product((span(50), span(59, 1000)), (0, 1, 2)):
        serve(slots, prompt, slot=slot)


def test_a_copy_has_all_that_its_source_has() -> None:
    for family in FAMILIES:
        slots = make(family, n_seqs=2, mode="keep", cache_idle_slots=False)
        source, target = slots.slots
        slots.serve(span(60), slot=0, user_starts=[20, 40])
        slots.serve(span(30, 1000), slot=1, kind="infill")
        target.copy_from(source, 60)
        assert target.tokens.tolist() == source.tokens.tolist()
        assert target.kind == "completion"
        for ours, theirs in zip(target.checkpoints, source.checkpoints, strict=True):
            assert ours is not theirs
            assert ours.data is theirs.data
        assert len(target.checkpoints) == (0 if family is Family.ATTENTION else 3)
        slots.check()
        # It is worth as much as what was evaluated: saved, and looked up for another slot.
        slots.clear(0)
        assert serve(slots, span(61), slot=0).reused_tokens == 60


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("operation", "cleared_all"),
    [
        *((each, False) for each in OPERATIONS),
        *((each, True) for each in OPERATIONS if ":" in each),
    ],
)
def test_a_failure_anywhere_leaves_slots_whole_or_empty(
    operation: str, family: Family, mode: str, cleared_all: bool
) -> None:
    slots = make(family, n_seqs=2, mode=mode, ctx_checkpoints=4)
    runtime, _ = parts(slots)
    prompts = [span(60), span(60, 100), span(70), join(span(65), span(9, 300)), span(40)]
    for prompt, slot in itertools.product(prompts, (0, 1)):
        runtime.fail(operation, cleared_all=cleared_all)
        try:
            slots.serve(prompt, slot=slot, user_starts=[30])
        except DecodeError:
            assert operation == "evaluate"
            assert slots.slots[slot].n_tokens == 0
        slots.check()
    runtime._planned.clear()
    for prompt in prompts:
        serve(slots, prompt, user_starts=[30])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_anywhere_leaves_slots_whole_or_empty(operation: str, mode: str) -> None:
    slots = make(Family.HYBRID, n_seqs=2, mode=mode, ctx_checkpoints=4)
    runtime, _ = parts(slots)
    prompts = [span(60), span(60, 100), span(70), join(span(65), span(9, 300)), span(40)]
    for prompt, slot in itertools.product(prompts, (0, 1)):
        runtime.fail(operation, error=KeyboardInterrupt())
        try:
            slots.serve(prompt, slot=slot, user_starts=[30])
        except KeyboardInterrupt:
            slots.check()
        runtime._planned.clear()
        serve(slots, prompt, slot=slot)


@contextmanager
def interrupted(module: str, function: str, nth: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the nth line that `function` runs; yield [lines to go]."""
    left, before = [nth], sys.gettrace()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return line

    def call(frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        return line if code.co_name == function and module in code.co_filename else None

    sys.settrace(call)
    try:
        yield left
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("slot.py", "evaluate"),
        ("slot.py", "_cut"),
        ("slot.py", "copy_from"),
        ("slot.py", "forget"),
        ("slots.py", "_load"),
    ],
)
@pytest.mark.parametrize("family", [Family.ATTENTION, Family.HYBRID])
def test_an_interrupt_between_any_two_lines_leaves_no_half_slot(
    family: Family, module: str, function: str
) -> None:
    for nth in itertools.count(1):
        slots = make(family, n_seqs=2, mode="keep", cache_idle_slots=False)
        slots.serve(span(60), slot=0, user_starts=[30])
        slots.serve(span(60, 100), slot=0)
        slots.serve(span(50, 300), slot=1)
        try:
            with interrupted(f"/{module}", function, nth) as left:
                slots.serve(join(span(70, 100), span(9, 400)), slot=1)  # copies
                slots.serve(join(span(40), span(9, 400)), slot=0)  # loads
                slots.serve(join(span(30), span(9, 500)), slot=0)  # cuts
                slots.clear(1)
        except KeyboardInterrupt:
            pass
        serve(slots, span(20, 1000), slot=1)
        serve(slots, span(20, 2000), slot=0)
        serve(slots, join(span(45), span(9, 600)), slot=1)
        serve(slots, join(span(45), span(9, 700)), slot=0)
        if left[0] > 0:
            break


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("prompt_cache.py", "save"),
        ("prompt_cache.py", "alloc"),
        ("prompt_cache.py", "fill"),
        ("prompt_cache.py", "cancel"),
        ("prompt_cache.py", "_remove"),
        ("prompt_cache.py", "load"),
        ("entry_list.py", "add"),
        ("entry_list.py", "remove"),
        ("checkpoint_list.py", "take"),
        ("checkpoint_list.py", "_remove"),
        ("checkpoint_list.py", "clear"),
    ],
)
def test_an_interrupt_between_any_two_lines_lets_no_count_drift(module: str, function: str) -> None:
    for nth in itertools.count(1):
        slots = make(Family.HYBRID, mode="keep", limit_bytes=2000, ctx_checkpoints=2)
        slots.serve(span(40), user_starts=[10, 20])
        try:
            with interrupted(f"/{module}", function, nth) as left:
                slots.serve(span(60, 100), user_starts=[10, 20, 30])
                slots.serve(join(span(40), span(9, 400)))
                slots.serve(span(70, 700), user_starts=[20])
        except KeyboardInterrupt:
            pass
        parts(slots)[1].check()
        for slot in slots.slots:
            slot.checkpoints.check()
        for start in (1000, 2000):
            serve(slots, span(60, start), user_starts=[30])
        if left[0] > 0:
            break


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each != "evaluate"])
def test_memory_that_is_not_there_costs_time_alone(
    operation: str, draft: bool, family: Family, mode: str
) -> None:
    options: dict[str, Any] = {"n_ctx": 300, "n_seqs": 2, "n_swa": 16, "n_vocab": 10_000}
    runtime = FakeRuntime(family, **options)
    runtime.draft = FakeRuntime(family, **options)
    failing = runtime.draft if draft else runtime
    assert isinstance(failing, FakeRuntime)
    slots = make(runtime=runtime, mode=mode, ctx_checkpoints=4)
    prompts = [span(60), span(60, 100), span(70), join(span(65), span(9, 300)), span(40)]
    for prompt, slot in itertools.product(prompts, (0, 1)):
        failing.fail(operation, error=MemoryError())
        serve(slots, prompt, slot=slot, user_starts=[30])
    failing._planned.clear()
    for prompt in prompts:
        serve(slots, prompt, user_starts=[30])


@pytest.mark.parametrize(
    ("operation", "failure"),
    [
        ("read_checkpoint", "checkpoint"),
        ("restore:checkpoint", "load"),
        ("rewind:checkpoint", "rewind"),
        ("copy:checkpoint", "copy"),
    ],
)
def test_memory_that_is_not_there_is_counted_and_logged(
    operation: str, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    slots = make(Family.HYBRID, n_seqs=2, mode="keep", cache_idle_slots=False)
    runtime, _ = parts(slots)
    slots.serve(span(60), slot=0, user_starts=[30])
    if failure == "load":
        slots.serve(span(60, 1000), slot=0)
    # What the slot loses is saved first.
    runtime.fail(operation, after=int(failure == "checkpoint"), error=MemoryError())
    with caplog.at_level(logging.WARNING, "llamakeep"):
        prompt = join(span(30), span(9, 500))
        served = serve(slots, prompt, slot=1 if failure == "copy" else 0)
    assert slots.failures == {failure: 1}
    assert "out of memory" in caplog.text
    assert served.reused_tokens == (30 if failure == "checkpoint" else 0)


def test_a_failed_load_clears_the_slot_and_says_so() -> None:
    slots = make()
    runtime, cache = parts(slots)
    slots.serve(span(50))
    slots.serve(span(50, 100))
    runtime.fail("restore:segment")
    served = serve(slots, span(60))
    assert served.loaded is Loading.FAILED
    assert kinds(served)[-5:] == [
        "load_failed",
        "prompt_cleared",
        "cache_state",
        "cached_prompt",
        "cached_prompt",
    ]
    assert (served.reused_tokens, slots.failures) == (0, {"load": 1})
    assert len(cache) == 2


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, TokenError),
        ([-1], {}, TokenError),
        ([50_000], {}, TokenError),
        ([1, 2], {"kind": "chat"}, InvalidValue),
        ([1, 2], {"slot": 1}, InvalidValue),
        ([1, 2], {"slot": -1}, InvalidValue),
        (list(range(4097)), {}, ContextOverflow),
        ([1, 2], {"answer": [60_000]}, TokenError),
        ([1, 2], {"user_starts": [2]}, InvalidValue),
        ([1, 2], {"user_starts": [-1]}, InvalidValue),
        ([1, 2], {"user_starts": [1, 0]}, InvalidValue),
        ([1, 2], {"user_starts": [0.5]}, InvalidValue),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_request_changes_nothing(prompt: Any, options: Any, error: Any, mode: str) -> None:
    slots = make(mode=mode)
    slots.serve(span(10))
    with pytest.raises(error):
        slots.serve(prompt, **options)
    slots.check()
    assert slots.slots[0].n_tokens == 10
    assert serve(slots, span(12)).reused_tokens == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("options", "prompt", "answer", "error", "words"),
    [
        ({"n_ctx": 60}, span(61), [], ContextOverflow, "61 tokens .* context of 60, .* of 300"),
        ({"n_ctx": 60}, span(60), [1], ContextOverflow, "61 tokens .* context of 60, .* of 300"),
        ({"n_vocab": 90}, span(3, 88), [], TokenError, "token 90 .* of 90, .* of 10000"),
        ({"n_vocab": 90}, span(3), [91], TokenError, "token 91 .* of 90, .* of 10000"),
    ],
)
def test_what_a_smaller_draft_cannot_follow_is_refused(
    options: Any, prompt: IntArray, answer: Any, error: Any, words: str, mode: str
) -> None:
    sizes = {"n_ctx": 300, "n_vocab": 10_000}
    runtime = FakeRuntime("attention", **sizes)
    runtime.draft = FakeRuntime("attention", **sizes | options)
    slots = make(runtime=runtime, mode=mode)
    slots.serve(span(10))
    with pytest.raises(error, match=words):
        slots.serve(prompt, answer=answer)
    slots.check()
    assert slots.slots[0].n_tokens == 10
    assert serve(slots, span(12)).reused_tokens == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [Family.ATTENTION, Family.RECURRENT])
def test_room_is_made_in_a_drafts_smaller_context(family: Family, mode: str) -> None:
    sizes = {"n_seqs": 3, "n_vocab": 10_000}
    runtime = FakeRuntime(family, n_ctx=300, **sizes)
    draft = runtime.draft = FakeRuntime("attention", n_ctx=100, **sizes, seed=1)
    slots = make(runtime=runtime, mode=mode, cache_idle_slots=False)
    for slot in (0, 1, 2, 0):
        serve(slots, span(60, 1000 * slot), slot=slot, answer=())
        assert draft.positions(slot).n_tokens == 60


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "both"},
        {"purge": "all"},
        {"similarity": 2},
        {"similarity": -0.1},
        {"n_ubatch": 0},
        {"ctx_checkpoints": -1},
        {"checkpoint_min_step": -1},
        {"checkpoint_policy": "nonsense"},
        {"restore": "all"},
    ],
)
def test_arguments_that_cannot_be_meant(options: Any) -> None:
    with pytest.raises(InvalidValue):
        Slots(FakeRuntime("attention"), PromptCache(1), **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_one_token(family: Family, mode: str) -> None:
    slots = make(family, mode=mode)
    for _ in range(3):
        assert serve(slots, span(1)).evaluated_tokens == 1
    # llama-server does not go on from one token of a window, though all of it is there: the
    # threshold is 0 as long as the prompt is shorter than the window, and nothing is below it.
    lost = mode == "upstream" and family.has_window
    assert serve(slots, span(2)).reused_tokens == (0 if lost else 1)
    serve(slots, span(1))


@pytest.mark.parametrize("mode", MODES)
def test_no_checkpoints_means_none_is_read(mode: str) -> None:
    slots = make(Family.HYBRID, mode=mode, ctx_checkpoints=0, limit_bytes=0)
    runtime, _ = parts(slots)
    serve(slots, span(50))
    serve(slots, span(60))
    assert runtime.calls.reads == 0


def test_check_says_what_does_not_add_up() -> None:
    slots = make()
    slots.serve(span(10))
    slots.slots[0].tokens = span(9)
    with pytest.raises(IntegrityError, match="its sequence holds 10"):
        slots.check()


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_leaves_nothing_of_the_old_conversation_in_the_draft(family: Family) -> None:
    runtime = FakeRuntime(family, n_ctx=300, n_seqs=2, n_swa=16, n_vocab=10_000)
    draft = runtime.draft = FakeRuntime(
        family, n_ctx=300, n_seqs=2, n_swa=16, n_vocab=10_000, seed=7
    )
    slots = make(runtime=runtime, mode="keep", cache_idle_slots=False)
    serve(slots, span(100, 1000), slot=1)
    serve(slots, span(60), slot=0)
    prompt = join(span(60), span(1, 5000))
    assert serve(slots, prompt, slot=1).reused_tokens >= 58
    np.testing.assert_array_equal(draft.logits(), cold(family, prompt, seed=7))


@pytest.mark.parametrize("options", [{"mode": "upstream"}, {"mode": "keep", "restore": "upstream"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_restored_by_position_is_loaded_by_no_one_who_asks_for_proof(
    family: Family, options: dict[str, Any]
) -> None:
    """It may be wrong as a whole, by llama-server's own fault: no digest would tell."""
    cache = PromptCache(1_000_000, mode="keep", emit=quiet)

    def another(**options: Any) -> Slots:
        runtime = FakeRuntime(family, n_ctx=300, n_swa=16, n_vocab=10_000)
        return Slots(runtime, cache, min_evaluated=1, emit=quiet, **options)

    for writer, reader, result in [
        (options, {"mode": "keep"}, Loading.NO_MATCH),
        ({"mode": "keep"}, {"mode": "keep"}, Loading.RESTORED),
        ({"mode": "keep"}, options, Loading.NO_MATCH),
        (options, options, Loading.RESTORED),
    ]:
        cache.clear()
        slots = another(**writer)
        slots.serve(span(100))
        slots.serve(span(60, 1000))
        assert len(cache) == 1
        assert another(**reader).serve(join(span(100), span(9, 500))).loaded is result


@pytest.mark.parametrize(
    "limits", [{"ctx_checkpoints": 2}, {"checkpoint_bytes": 400}, {"ctx_checkpoints": 0}]
)
def test_what_a_slot_loads_is_under_its_own_limits_and_told_to_its_own_emit(
    limits: dict[str, int],
) -> None:
    told: list[Any] = []
    first = make(Family.HYBRID, mode="keep", emit=told.append)
    _, cache = parts(first)
    first.serve(span(200), user_starts=list(range(10, 200, 20)))
    first.serve(span(100, 5000))
    before = len(told)
    runtime = FakeRuntime(Family.HYBRID, n_ctx=4096, n_batch=128, n_vocab=10_000)
    second = Slots(
        runtime, cache, mode="keep", min_evaluated=1, checkpoint_min_step=8, emit=quiet, **limits
    )
    assert second.serve(join(span(200), span(1, 9000))).loaded is Loading.RESTORED
    for turn in range(3):
        second.serve(join(span(100), span(5, 9000 + 10 * turn)), user_starts=[10, 100])
        second.check()
        held = second.slots[0].checkpoints
        assert (held.restore, held._policy_name) == ("prefix", "neighbor-gap")
        assert len(held) <= limits.get("ctx_checkpoints", 32)
        assert held.n_bytes <= held.limit_bytes <= limits.get("checkpoint_bytes", sys.maxsize)
    assert len(told) == before > 0


@pytest.mark.parametrize("family", ROLLING)
@pytest.mark.parametrize("way", ["load", "copy", "live"])
def test_a_checkpoint_of_other_tokens_is_reached_by_no_way(family: Family, way: str) -> None:
    """llama-server keeps one that has seen another first token; a keep cache may be given it."""
    options: dict[str, Any] = {"checkpoint_min_step": 0, "n_ubatch": 1}
    first = make(family, mode="keep", slots_mode="upstream", **options)
    runtime, cache = parts(first)
    first.serve(span(6, 1), user_starts=[1])
    first.serve(np.array([9, 2, 3, 4, 5, 6], np.int32))
    slot, prompt = first.slots[0], np.array([9, 50, 51], np.int32)
    assert 1 in [each.n_tokens for each in slot.checkpoints]
    if way == "load":
        first.serve(span(30, 100))
        runtime = FakeRuntime(family, n_ctx=300, n_swa=16, n_vocab=10_000)
        second = Slots(runtime, cache, mode="keep", min_evaluated=1, emit=quiet)
        second._prefix = first._prefix
        assert serve(second, prompt).reused_tokens == 0
        assert all(entry.checkpoint_at(1) is None for entry in cache if entry.tokens[0] == 9)
    elif way == "copy":
        assert slot.copyable(prompt, 2) == 0
    else:
        runtime.can_rewind = lambda *_: False  # type: ignore[method-assign]
        assert slot.reach(prompt, 2) == 0


@pytest.mark.parametrize("restore", ["upstream", "exact", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_promised_that_resume_does_not_reach(family: Family, restore: Any) -> None:
    random = np.random.default_rng(1)
    slots = make(
        family, n_seqs=2, mode="keep", restore=restore, cache_idle_slots=False, min_evaluated=3
    )
    one, other = slots.slots
    prompts, promised = [span(60)], 0
    for turn in range(80):
        base = prompts[-1 if turn % 3 else int(random.integers(len(prompts)))]
        more = random.integers(300, 400, int(random.integers(1, 30))).astype(np.int32)
        cuts = [int(random.integers(1, base.size + 1)), base.size // 2, base.size]
        prompt = join(base[: cuts[int(random.integers(3))]], more)[:250]
        prompts.append(prompt)
        most = max(0, prompt.size - 3)
        if turn % 2:
            reach = one.reach(prompt, most)
            assert one.resume(prompt, int(prompt.size)) >= reach
        else:
            copyable = one.copyable(prompt, most)
            if copyable:
                other.copy_from(one, copyable)
            reach = other.reach(prompt, most)
            # llama-server's rule searches a window again that ends where the prompt goes on.
            if restore != "upstream" or not family.has_window:
                assert reach >= copyable
            assert other.resume(prompt, int(prompt.size)) >= reach
        promised += reach
        slots.serve(prompt, slot=0, user_starts=[prompt.size // 2])
        slots.clear(1)
        slots.check()
    assert promised > 100


def test_a_list_of_exact_positions_lets_an_entry_go_first() -> None:
    slots = make(Family.HYBRID, mode="keep", restore="exact")
    slots.serve(span(30))
    slots.serve(span(60), user_starts=[40])
    slots.serve(span(20, 1000))
    slots.serve(join(span(50), span(9, 700)), user_starts=[40])
    slot, prompt = slots.slots[0], join(span(45), span(9, 800))
    assert 40 in [each.n_tokens for each in slot.checkpoints]
    assert slot.reach(prompt, 53) == slot.copyable(prompt, 53) == 0  # not at 45
    assert slot.reach(join(span(40), span(9, 800)), 48) == 40
    # The entry of 60 tokens has one at 40: what is loaded ends there.
    assert serve(slots, prompt).reused_tokens == 40


@pytest.mark.parametrize("family", ROLLING)
def test_what_is_loaded_or_copied_in_part_has_no_checkpoint_beyond_it(family: Family) -> None:
    slots = make(family, n_seqs=2, mode="keep", cache_idle_slots=False)
    slots.serve(span(60), slot=0, user_starts=[20, 40])
    slots.slots[1].namespace = slots.slots[0].namespace
    slots.slots[1].copy_from(slots.slots[0], 40)
    slots.check()
    assert [each.n_tokens for each in slots.slots[1].checkpoints] == [20, 40]
    slots.serve(span(30, 1000), slot=0)
    slots.clear(1)
    assert slots._load(slots.slots[1], join(span(45), span(3, 7)), 0).result is Loading.RESTORED
    slots.check()
    assert [each.n_tokens for each in slots.slots[1].checkpoints] == [20, 40]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lost", ["all", "some", "in a failure"])
def test_a_draft_behind_its_target_is_as_if_it_were_absent(
    family: Family, mode: str, lost: str
) -> None:
    options: dict[str, Any] = {"n_ctx": 300, "n_seqs": 2, "n_swa": 16, "n_vocab": 10_000}
    runtime = FakeRuntime(family, **options)
    draft = runtime.draft = FakeRuntime(family, **options, seed=7)
    slots = make(runtime=runtime, mode=mode)
    prompts = [span(60), span(20, 1000), span(61), join(span(30), span(9, 500)), span(62)]
    for prompt, slot in itertools.product(prompts, (0, 1, 0)):
        if lost == "in a failure":
            draft.fail("rewind:cut", cleared_all=True)
        else:
            draft.clear(0)
            if lost == "some":
                draft.evaluate(0, span(5))
        serve(slots, prompt, slot=slot)
        np.testing.assert_array_equal(draft.logits(), cold(family, prompt, seed=7))
        parts(slots)[1].check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fault_1_a_slot_that_another_prompt_takes_keeps_nothing_of_the_first(
    family: Family, mode: str
) -> None:
    slots = make(family, mode=mode)
    serve(slots, span(50, 1))
    served = serve(slots, np.array([90, 91], np.int32))
    assert served.loaded is Loading.NO_MATCH
    assert slots.slots[0].tokens.tolist() == [90, 91]


def fault_14(mode: str, held: IntArray | None, similarity: float = 0.1) -> Served:
    """The cache holds the prompt; slot 0 is pinned, and holds something else, or nothing."""
    slots = make(mode=mode, similarity=similarity)
    slots.serve(span(50))
    slots.serve(span(20, 100))
    if held is None:
        slots.clear(0)
    return serve(slots, span(60), slot=0)


@pytest.mark.parametrize("empty", [False, True])
def test_fault_14_a_pinned_slot_is_looked_up_for_like_any_other(empty: bool) -> None:
    assert fault_14("keep", None if empty else span(1)).reused_tokens == 50
    assert fault_14("keep", None if empty else span(1), 0.0).reused_tokens == 50


def test_fault_14_is_reproduced_by_upstream_when_the_slot_is_empty() -> None:
    assert fault_14("upstream", None).loaded is None  # 0/0 is not below one half
    assert fault_14("upstream", span(1)).reused_tokens == 50
    assert fault_14("upstream", span(1), similarity=0.0).loaded is None


def fault_15(family: Family, mode: str) -> Served:
    """Cached: 100 tokens with a checkpoint at 20; the request shares 22."""
    slots = make(family, mode=mode)
    slots.serve(span(100), user_starts=[20])
    slots.serve(span(30, 500))
    entry = next(iter(parts(slots)[1]))
    assert entry.checkpoints is not None
    assert 20 in [each.n_tokens for each in entry.checkpoints]
    return serve(slots, join(span(22), span(30, 700)))


@pytest.mark.parametrize("family", ROLLING)
def test_fault_15_no_share_forbids_a_checkpoint(family: Family) -> None:
    assert fault_15(family, "keep").reused_tokens == 20


@pytest.mark.parametrize("family", ROLLING)
def test_fault_15_is_reproduced_by_upstream(family: Family) -> None:
    served = fault_15(family, "upstream")
    assert (served.loaded, served.reused_tokens) == (Loading.NO_MATCH, 0)


def fault_16(family: Family, mode: str) -> int:
    """A checkpoint at 20 was made in slot 0; the same prefix comes to slot 1."""
    slots = make(family, n_seqs=2, mode=mode, cache_idle_slots=False)
    slots.serve(span(40), user_starts=[20], slot=0)
    return serve(slots, join(span(22), span(30, 700)), slot=1).reused_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_16_what_one_slot_holds_another_can_use(family: Family) -> None:
    assert fault_16(family, "keep") == (22 if family is Family.ATTENTION else 20)
    assert fault_16(family, "upstream") == 0  # reproduced


def fault_17(mode: str) -> list[int]:
    """One slot; two conversations of 241 tokens with 193 in common take turns."""
    slots = make(mode=mode)
    chats = [join(span(193), span(48, start)) for start in (500, 700)]
    return [serve(slots, chats[turn % 2]).reused_tokens for turn in range(4)]


def test_fault_17_a_return_visit_reuses_all_but_one() -> None:
    assert fault_17("keep") == [0, 193, 240, 240]


def test_fault_17_is_reproduced_by_upstream() -> None:
    assert fault_17("upstream") == [0, 193, 193, 193]


@pytest.mark.parametrize("family", ROLLING)
def test_fault_17_in_families_with_checkpoints(family: Family) -> None:
    slots = make(family, mode="keep")
    chats = [join(span(193), span(48, start)) for start in (500, 700)]
    reused = [serve(slots, chats[turn % 2]).reused_tokens for turn in range(4)]
    assert reused[2:] == [240, 240]  # the checkpoint near the end


@pytest.mark.parametrize("min_evaluated", [1, 2, 5, 9, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeat_evaluates_as_few_tokens_as_it_may(family: Family, min_evaluated: int) -> None:
    slots = make(family, mode="keep", min_evaluated=min_evaluated)
    prompt, least = span(241), min(min_evaluated, 241)
    assert serve(slots, prompt).reused_tokens == 0
    assert serve(slots, prompt).evaluated_tokens == least  # cut back
    serve(slots, span(100, 1000))
    assert serve(slots, prompt).evaluated_tokens == least  # loaded


def test_fault_26_what_is_never_asked_for_again_is_not_stored() -> None:
    for mode, stored in (("keep", [9000, 9500]), ("upstream", [20 * 299, 9500])):
        slots = make(mode=mode)
        slots.serve(span(30, 9000))
        for number in range(300):
            slots.serve(span(10, 20 * number), kind=("embedding", "rerank")[number % 2])
            assert len(parts(slots)[1]) == int(mode == "keep")  # the completion before them
        slots.serve(span(30, 9500))
        slots.serve(span(30, 9900))
        # llama-server saves what the last of them left when a completion takes the slot.
        assert [entry.tokens[0] for entry in parts(slots)[1]] == stored


def test_fault_27_the_same_prompt_six_times_is_one_entry_and_five_hits() -> None:
    slots = make(mode="keep")
    _, cache = parts(slots)
    for turn in range(6):
        served = serve(slots, span(50))
        assert served.reused_tokens == (49 if turn else 0)
        serve(slots, span(50, 100 * turn + 1000))
    assert [entry.hits for entry in cache if entry.tokens[0] == 0] == [5]


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_28_and_30_the_limit_holds_at_every_instant(family: Family) -> None:
    for mode in MODES:
        slots = make(family, mode=mode, limit_bytes=3000, ctx_checkpoints=4)
        for turn in range(40):
            slots.serve(span(20 + 5 * (turn % 7), 100 * (turn % 5)), user_starts=[10])
            slots.check()
        assert parts(slots)[1].peak_bytes <= 3000


def test_fault_6_a_restore_that_is_refused_evaluates_the_prompt() -> None:
    for operation in ("restore", "restore:segment", "restore:verify"):
        slots = make(mode="keep")
        runtime, _ = parts(slots)
        slots.serve(span(50))
        slots.serve(span(50, 100))
        runtime.fail(operation)
        assert serve(slots, span(60)).reused_tokens == 0
        assert serve(slots, span(60)).reused_tokens == 59


# -- anything in any order -------------------------------------------------------------------------


class SlotsMachine(RuleBasedStateMachine):
    """Requests, failures and limits in any order, in either mode and every family."""

    @initialize(
        family=st.sampled_from(FAMILIES),
        mode=st.sampled_from(MODES),
        limit=st.sampled_from([0, 700, 3000, 1 << 20]),
        policy=st.sampled_from(["oldest", "lru", "tokens-per-byte", "marginal"]),
        purge=st.sampled_from(["first", "lru", "longest"]),
        idle=st.booleans(),
        slots_mode=st.sampled_from([None, *MODES]),
    )
    def start(
        self,
        family: Family,
        mode: str,
        limit: int,
        policy: str,
        purge: str,
        idle: bool,
        slots_mode: str | None,
    ) -> None:
        self.may_err = False
        self.slots = make(
            family,
            n_seqs=3,
            n_ctx=120,
            n_batch=16,
            mode=mode,
            limit_bytes=limit,
            cache={"policy": policy},
            ctx_checkpoints=3,
            purge=purge,
            cache_idle_slots=idle,
            slots_mode=slots_mode,
        )

    @rule(
        pieces=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        cut=st.integers(1, 12),
        kind=st.sampled_from(KINDS + KINDS[:1] * 4),
        slot=st.sampled_from([None, None, 0, 1, 2]),
        operation=st.sampled_from([None, None, None, *OPERATIONS]),
        after=st.integers(0, 2),
    )
    def request(
        self,
        pieces: list[int],
        cut: int,
        kind: str,
        slot: int | None,
        operation: str | None,
        after: int,
    ) -> None:
        prompt = join(*(span(12, 20 * piece) for piece in pieces))
        prompt = prompt[: prompt.size - cut + 1]
        runtime, _ = parts(self.slots)
        if operation is not None:
            runtime.fail(operation, after=after)
        try:
            starts = [start for start in (12, 36) if start < prompt.size]
            served = self.slots.serve(prompt, kind=kind, slot=slot, user_starts=starts)
        except LlamakeepError:
            assert operation == "evaluate"
        else:
            assert served.evaluated_tokens >= 1
            # What llama-server restores by position may be wrong, and so is what comes of it.
            restored = any(isinstance(event, CheckpointRestored) for event in served.events)
            self.may_err |= restored and self.slots.mode == "upstream"
            if not self.may_err:
                expected = cold(runtime.traits.family, prompt)
                np.testing.assert_array_equal(runtime.logits(), expected)
        runtime._planned.clear()

    @rule(limit=st.sampled_from([0, 500, 5000]))
    def resize(self, limit: int) -> None:
        parts(self.slots)[1].resize(limit)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check()


logging.getLogger("llamakeep").setLevel(logging.WARNING)
TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
