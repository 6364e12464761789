"""The checkpoints of a slot: by llama-server's rules, and by better ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.checkpoint_list import CheckpointList, ListedCheckpoint
from llamakeep.errors import IntegrityError, InvalidValue
from llamakeep.events import Event
from llamakeep.policy import Kept
from llamakeep.states import Checkpoint, DeviceCheckpoint, frozen
from llamakeep.tokens import as_tokens
from tests.slot_player import STATE_BYTES, Recorder, SlotPlayer, at, put, state_of

RECORDING = Path(__file__).parent / "data" / "upstream" / "checkpoints_hybrid.json.gz"
PROVEN: list[Any] = ["exact", "prefix"]
MODES: list[Any] = ["upstream", *PROVEN]
POLICIES = [
    "oldest",
    "lru",
    "upstream",
    "tokens-per-byte",
    "neighbor-distance",
    "neighbor-gap",
    "marginal",
]

proven = pytest.mark.parametrize("restore", PROVEN)
everywhere = pytest.mark.parametrize("restore", MODES)


def quiet(event: Event) -> None:
    """Take an event and say nothing."""


def made(limit: int = 8, min_step: int = 8192, restore: Any = "upstream", **more: Any) -> Any:
    more.setdefault("emit", quiet)
    return CheckpointList(limit, min_step, restore=restore, **more)


def run(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def filled(positions: Sequence[int], tokens: Sequence[int] | None = None, **how: Any) -> Any:
    kept = made(**how)
    tokens = run(max(positions)) if tokens is None else tokens
    for position in positions:
        assert put(kept, tokens[:position])
    return kept


# -- llama-server's rules, against what a llama-server did -----------------------------------------


def recording() -> list[dict[str, Any]]:
    with gzip.open(RECORDING, "rt") as file:
        requests: list[dict[str, Any]] = json.load(file)["requests"]
    return requests


def test_every_checkpoint_event_of_the_recording_comes_in_order() -> None:
    requests = recording()
    assert len(requests) == 16
    recorder = Recorder()
    player = SlotPlayer(CheckpointList(4, 256, emit=recorder))
    for number, request in enumerate(requests):
        recorder.clear()
        resume = player.serve(request["tokens"], request["user_starts"])
        expected = [e for e in request["events"] if not e["event"].startswith("slot_")]
        assert list(recorder) == expected, f"request {number}: {request['note']}"
        assert resume.n_past == request["reused"], f"request {number}"
        evaluated = sum(end - start for start, end in player.batches)
        assert evaluated == request["evaluated"], f"request {number}"
        player.kept.check()
    assert not player.wrong


@pytest.mark.parametrize(
    ("restore", "limit", "policy", "expected"),
    [
        ("upstream", 4, "upstream", 8205),
        (
            "exact",
            4,
            "neighbor-gap",
            9757,
        ),  # one position only: the search costs more than it saves
        ("prefix", 4, "upstream", 8393),
        ("prefix", 4, "neighbor-gap", 8191),
        ("prefix", 4, "neighbor-distance", 7702),
        ("prefix", 4, "marginal", 7127),
        ("prefix", 16, "neighbor-gap", 6773),
        ("prefix", 16, "marginal", 6773),
    ],
)
def test_tokens_that_each_way_evaluates_of_the_recording(
    restore: Any, limit: int, policy: str, expected: int
) -> None:
    """An infinite cache would evaluate 5,042."""
    kept = made(limit, 256, restore, policy=policy, clock=lambda: 0.0)
    player, evaluated = SlotPlayer(kept), 0
    for request in recording():
        player.serve(request["tokens"], request["user_starts"])
        evaluated += sum(end - start for start, end in player.batches)
    assert not player.wrong
    assert evaluated == expected


@pytest.mark.parametrize(
    ("n_tokens", "n_prompt", "batch_end", "starts", "kept", "expected"),
    [
        pytest.param(836, 904, 900, [], [300], True, id="the batch ends near the end"),
        pytest.param(819, 904, 836, [], [300], False, id="it ends 68 before, ubatch 64"),
        pytest.param(700, 764, 701, [], [300], True, id="63 before"),
        pytest.param(700, 764, 700, [], [300], False, id="64 before: strictly within"),
        pytest.param(700, 900, 828, [], [], False, id="an empty list alone is no reason"),
        pytest.param(300, 900, 428, [300, 600], [], True, id="a message, an empty list"),
        pytest.param(600, 900, 728, [300, 600], [599], True, id="the last message, any distance"),
        pytest.param(600, 900, 728, [600, 800], [344], False, id="a message 256 past: strictly"),
        pytest.param(600, 900, 728, [600, 800], [343], True, id="a message 257 past"),
        pytest.param(600, 900, 728, [600, 800], [200, 590], False, id="past the one added last"),
        pytest.param(601, 900, 728, [600, 800], [300], False, id="not where a message starts"),
        pytest.param(0, 9, 9, [0], [], False, id="nothing is evaluated yet"),
        pytest.param(9, 9, 9, [9], [], False, id="nothing is left"),
    ],
)
def test_when_llama_server_takes_one(
    n_tokens: int,
    n_prompt: int,
    batch_end: int,
    starts: list[int],
    kept: list[int],
    expected: bool,
) -> None:
    checkpoints = filled(kept, min_step=256) if kept else made(8, 256)
    assert expected == checkpoints.wants(
        n_tokens, n_prompt=n_prompt, n_ubatch=64, user_starts=starts, batch_end=batch_end
    )


def walk(
    kept: CheckpointList, n_past: int, n_prompt: int, n_batch: int, n_ubatch: int, starts: list[int]
) -> list[int]:
    """Fill the batches token by token."""
    newest = [item.n_tokens for item in kept][-1:]
    splits, position = [], n_past
    while position < n_prompt:
        begin = position
        while position < n_prompt and position - begin < n_batch:
            position += 1
            far = not newest or position > newest[0] + kept.min_step
            if position in starts and (position == starts[-1] or far):
                splits.append(position)
                break
            if n_prompt - position in (min(n_batch, 4 + n_ubatch), min(n_batch, 4)):
                splits.append(position)
                break
        near_end = n_prompt < position + n_ubatch
        far = not newest or begin > newest[0] + kept.min_step
        if begin and (near_end or (begin in starts and (begin == starts[-1] or far))):
            newest = [begin]
    return [split for split in splits if split < n_prompt]


@given(data=st.data())
def test_splits_are_those_of_a_walk_token_by_token(data: st.DataObject) -> None:
    n_prompt = data.draw(st.integers(1, 120))
    n_past = data.draw(st.integers(0, n_prompt))
    n_batch, n_ubatch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    starts = data.draw(st.lists(st.integers(0, n_prompt - 1), unique=True, max_size=8).map(sorted))
    kept = made(8, data.draw(st.integers(0, 40)))
    if n_past and data.draw(st.booleans()):
        put(kept, run(data.draw(st.integers(1, n_past))))
    assert walk(kept, n_past, n_prompt, n_batch, n_ubatch, starts) == kept.split_points(
        n_past, n_prompt, n_batch=n_batch, n_ubatch=n_ubatch, user_starts=starts
    )


def test_the_three_steps_in_order() -> None:
    """Close ones of other tasks, then the oldest, then the same position."""
    recorder = Recorder()
    kept = made(4, 10, emit=recorder)
    tokens = run(200)
    for position in (50, 58, 66, 100):
        put(kept, tokens[:position], task=1)
    recorder.clear()
    put(kept, tokens[:100], task=2)
    assert [event["event"] for event in recorder] == [
        "checkpoint_evicted_close",
        "checkpoint_superseded",
        "checkpoint_created",
    ]
    # 58 lies within 10 of 50 and is another task's; then 66 lies 16 past 50, the one kept last.
    assert at(kept) == [50, 66, 100]
    # One short of full is enough for the first step. 105 lies close to 100, and 66 is far enough.
    put(kept, tokens[:105], task=3)
    put(kept, tokens[:108], task=4)
    assert at(kept) == [50, 66, 100, 108]
    put(kept, tokens[:150], task=4)
    assert at(kept) == [66, 100, 108, 150]


def test_a_close_one_survives_in_a_list_that_is_two_short_of_full() -> None:
    kept = made(5, 10)
    for task, position in enumerate([20, 22, 24]):
        put(kept, run(position), task=task)
    assert at(kept) == [20, 22, 24]
    put(kept, run(26), task=3)
    assert at(kept) == [20, 22, 24, 26]
    put(kept, run(28), task=4)  # without 22 the list is short enough: the pass stops there
    assert at(kept) == [20, 24, 26, 28]


def test_exactly_a_step_apart_is_too_close() -> None:
    kept = made(2, 10)
    put(kept, run(20), task=1)
    put(kept, run(30), task=2)
    put(kept, run(41), task=3)
    assert at(kept) == [20, 41]
    kept = made(2, 9)
    put(kept, run(20), task=1)
    put(kept, run(30), task=2)
    put(kept, run(41), task=3)
    assert at(kept) == [30, 41]


def test_both_ends_of_one_task_live_side_by_side() -> None:
    kept = made(3, 8192)
    for position in (100, 132, 196):
        put(kept, run(position), task=1)
    assert at(kept) == [100, 132, 196]
    put(kept, run(200), task=1)
    assert at(kept) == [132, 196, 200]


def test_with_room_for_one_the_newest_stays() -> None:
    kept = made(1, 10)
    for position in (10, 20, 20, 30):
        put(kept, run(position))
        assert at(kept) == [position]
    kept.check()


@pytest.mark.parametrize(
    ("kept", "common", "n_prompt", "live", "n_swa", "expected"),
    [
        # kept: (pos_min, n_tokens); expected: n_past, restored, what is left
        pytest.param([(9, 10)], 12, 20, 30, 0, (10, 10, [10]), id="recurrent"),
        pytest.param([(9, 10), (11, 12)], 12, 20, 30, 0, (12, 12, [10, 12]), id="at its end"),
        pytest.param([(9, 10), (11, 12)], 12, 12, 30, 0, (10, 10, [10]), id="the same prompt"),
        pytest.param([(9, 10), (12, 13)], 12, 20, 30, 0, (10, 10, [10]), id="one too far"),
        pytest.param([(9, 10)], 20, 30, 19, 0, (20, None, [10]), id="only continued"),
        pytest.param([(9, 10)], 0, 30, 19, 0, (0, None, []), id="nothing in common"),
        pytest.param([(9, 10)], 5, 30, 19, 0, (0, None, []), id="nothing leads there"),
        pytest.param([], 20, 20, 0, 0, (19, None, []), id="known to its end: the last one again"),
        pytest.param([], 1, 1, 0, 0, (0, None, []), id="one token"),
        pytest.param([(0, 20)], 25, 60, 50, 8, (19, 20, [20]), id="a window that starts at 0"),
        pytest.param([(12, 20)], 25, 60, 50, 8, (19, 20, [20]), id="a window, one token again"),
        pytest.param([(17, 20)], 25, 60, 50, 8, (0, None, []), id="a window that starts too late"),
        pytest.param([], 25, 60, 17, 8, (0, None, []), id="live just not far enough back"),
        pytest.param([], 25, 60, 16, 8, (25, None, []), id="live far enough back"),
    ],
)
def test_where_llama_server_goes_on(
    kept: list[tuple[int, int]],
    common: int,
    n_prompt: int,
    live: int,
    n_swa: int,
    expected: tuple[int, int | None, list[int]],
) -> None:
    checkpoints = made()
    for pos_min, n_tokens in kept:
        put(checkpoints, run(n_tokens), pos_min=pos_min)
    resume = checkpoints.resume(common, as_tokens(run(n_prompt)), live_pos_min=live, n_swa=n_swa)
    restored = resume.checkpoint.n_tokens if resume.checkpoint else None
    assert (resume.n_past, restored, at(checkpoints)) == expected


def test_the_newest_that_fits_is_taken_not_the_deepest() -> None:
    kept = filled([30, 10])
    resume = kept.resume(40, as_tokens(run(50)), live_pos_min=60)
    assert resume.n_past == 10
    kept = filled([30, 10], restore="prefix")
    assert kept.resume(40, as_tokens(run(50)), live_pos_min=60).n_past == 30


# -- limits ----------------------------------------------------------------------------------------


@everywhere
def test_a_limit_of_0_turns_checkpoints_off(restore: Any) -> None:
    for kept in (made(0, 1, restore), made(4, 1, restore, limit_bytes=0)):
        player = SlotPlayer(kept)
        player.serve(run(300), [10, 50])
        assert player.batches == [(0, 128), (128, 256), (256, 300)]
        assert not player.taken
        assert not put(kept, run(10))
        assert player.serve(run(200), [10, 50]).n_past == 0
        assert (len(kept), kept.n_bytes) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": -1},
        {"limit": 1.5},
        {"min_step": -1},
        {"limit_bytes": -1},
        {"restore": "newest"},
        {"policy": "best"},
        {"min_evaluated": 0},
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        made(**wrong)


def test_a_list_is_there_even_when_it_is_empty() -> None:
    assert made()
    assert len(made()) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_is_too_large_is_refused_and_drops_nothing(policy: str) -> None:
    events: list[Event] = []
    kept = made(8, 0, "prefix", limit_bytes=250, policy=policy, emit=events.append)
    assert put(kept, run(10), n_bytes=100)
    assert put(kept, run(20), n_bytes=100)
    assert not put(kept, run(30), n_bytes=251)
    assert at(kept) == [10, 20]
    assert events[-1].kind == "checkpoint_refused"
    assert put(kept, run(40), n_bytes=250)
    assert at(kept) == [40]
    assert kept.n_bytes == 250
    kept.check()


@proven
def test_after_a_refusal_the_prompt_is_split_no_more(restore: Any) -> None:
    player = SlotPlayer(made(8, 1, restore, limit_bytes=10))
    player.serve(run(100), [20, 40, 60])
    # The batch behind 20 was cut before the checkpoint at 20 was refused.
    assert player.batches == [(0, 20), (20, 40), (40, 100)]


def test_room_is_made_and_counted_before_a_checkpoint_is_read() -> None:
    kept = made(8, limit_bytes=300)
    for position in (10, 20, 30):
        put(kept, run(position), n_bytes=100)
    seen: list[tuple[int, int]] = []

    def read() -> Checkpoint:
        seen.append((len(kept), kept.n_bytes))
        return state_of(run(40), 150)

    how: Any = {"id_task": 1, "pos_min": 39, "pos_max": 39, "n_tokens": 40}
    assert kept.take(150, read, tokens=as_tokens(run(40)), **how)
    assert seen == [(1, 250)]
    assert at(kept) == [30, 40]


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda: state_of(run(40), 149), IntegrityError),
        (lambda: state_of(run(39), 150), IntegrityError),
        (lambda: 1 // 0, ZeroDivisionError),
    ],
)
def test_a_read_that_fails_is_not_counted(read: Callable[[], Any], error: type[Exception]) -> None:
    kept = filled([10, 20])
    how: Any = {"id_task": 1, "pos_min": 39, "pos_max": 39, "n_tokens": 40}
    with pytest.raises(error):
        kept.take(150, read, tokens=as_tokens(run(40)), **how)
    assert at(kept) == [10, 20]
    kept.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_tokens": 0},
        {"n_tokens": 11},
        {"pos_min": -1},
        {"pos_min": 10},
        {"tokens": as_tokens(run(9))},
        {"data": state_of(run(9))},
    ],
)
def test_positions_that_do_not_fit_together_are_refused(wrong: dict[str, Any]) -> None:
    kept = made()
    how: dict[str, Any] = {"id_task": 0, "pos_min": 9, "pos_max": 9, "n_tokens": 10}
    how |= {"tokens": as_tokens(run(10)), "data": state_of(run(10))}
    with pytest.raises(InvalidValue):
        kept.create(**how | wrong)
    assert len(kept) == 0


@everywhere
@pytest.mark.parametrize(
    ("common", "n_prompt", "live"), [(5, 4, 9), (-1, 4, 9), (0, 0, 9), (3, 4, -1)]
)
def test_resume_refuses_what_does_not_fit(
    common: int, n_prompt: int, live: int, restore: Any
) -> None:
    kept = filled([10], restore=restore)
    with pytest.raises(InvalidValue):
        kept.resume(common, as_tokens(run(n_prompt)), live_pos_min=live)
    assert at(kept) == [10]


@proven
def test_a_refusal_is_forgotten_with_the_next_prompt(restore: Any) -> None:
    kept = made(8, 1, restore, limit_bytes=100)
    how: Any = {"n_prompt": 60, "n_ubatch": 8, "user_starts": [20, 40]}
    assert kept.wants(20, **how)
    assert not put(kept, run(20), n_bytes=101)
    assert not kept.wants(40, **how)
    kept.resume(0, as_tokens(run(60)), live_pos_min=-1)
    assert kept.wants(40, **how)


@proven
def test_one_where_the_prompt_goes_on_counts_as_a_step(restore: Any) -> None:
    """It is taken without a split; the message right behind it needs none then."""
    player = SlotPlayer(made(8, 20, restore))
    player.serve(run(30))
    player.answer(run(22, 30))
    player.serve(run(112), [52, 60, 80])
    assert [end for _, end in player.batches[:-1]] == [80, 110]
    assert player.taken == [52, 80, 110]


# -- media, copies, the rest -----------------------------------------------------------------------


@everywhere
def test_nothing_is_wanted_after_media(restore: Any) -> None:
    kept = made(8, 1, restore)
    how: Any = {"n_ubatch": 64, "user_starts": [20, 60]}
    splits = kept.split_points(0, 100, n_batch=128, **how)
    assert 20 in splits
    assert splits[-1] > 60
    assert kept.split_points(0, 100, n_batch=128, media_at=30, **how) == [
        split for split in splits if split <= 30
    ]
    assert kept.wants(60, n_prompt=100, batch_end=96, **how)
    assert not kept.wants(60, n_prompt=100, batch_end=96, media_before=True, **how)


@everywhere
def test_a_copy_shares_the_states_and_nothing_else(restore: Any) -> None:
    kept = filled([10, 30, 20], restore=restore)
    kept.resume(25, as_tokens(run(26)), live_pos_min=40)
    other = kept.copy()
    assert at(other) == at(kept)
    assert [item.data for item in other] == [item.data for item in kept]
    assert all(a.data.data is b.data.data for a, b in zip(other, kept, strict=True))
    assert [item.hits for item in other] == [item.hits for item in kept]
    assert (other.n_bytes, other.restore) == (kept.n_bytes, restore)
    before = at(kept)
    put(other, run(70))
    other.invalidate(11)
    assert at(kept) == before
    assert put(kept, run(80))
    kept.clear()
    assert (len(kept), kept.n_bytes) == (0, 0)
    assert at(other) == [10]
    other.check()


class Backwards:
    """Drops the deepest first."""

    name = "backwards"

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        return -float(kept.n_tokens), kept.sequence


@proven
@pytest.mark.parametrize("how", ["copy", "taking_over"])
def test_a_list_made_of_another_has_its_settings(how: str, restore: Any) -> None:
    recorder, ticks = Recorder(), iter(range(1, 100))
    policy = Backwards()
    kept = made(
        3,
        7,
        restore,
        limit_bytes=3 * STATE_BYTES,
        policy=policy,
        min_evaluated=5,
        emit=recorder,
        clock=lambda: float(next(ticks)),
    )
    kept.resume(0, as_tokens(run(50)), live_pos_min=-1)
    for position in (10, 20, 30):
        put(kept, run(position))
    # Of another list only the checkpoints are taken over, with what they say of each other.
    other = kept.copy() if how == "copy" else kept.taking_over(filled([10, 20, 30]), 40)
    recorder.clear()
    assert (other.limit, other.min_step, other.limit_bytes) == (3, 7, 3 * STATE_BYTES)
    assert other.restore == restore
    assert other.n_bytes == 3 * STATE_BYTES
    before = next(ticks)
    put(other, run(40))
    assert at(other) == [10, 20, 40]  # by the policy
    newest = list(other)[-1]
    assert newest.created == newest.last_used == before + 2  # the policy looked at it too
    assert [event["event"] for event in recorder] == ["checkpoint_created"]
    found = other.resume(42, as_tokens(run(44)), live_pos_min=50, commit=False)
    assert found.n_past == (20 if restore == "prefix" else 0)  # 39 at most
    other.check()


@pytest.mark.parametrize("how", ["copy", "taking_over"])
def test_a_list_made_of_another_goes_on_where_that_one_was(how: str) -> None:
    kept = made(8, restore="prefix")
    kept.resume(0, as_tokens(run(50)), live_pos_min=-1)
    for position in (10, 20, 30):
        put(kept, run(position))
    kept.resume(30, as_tokens(run(50)), live_pos_min=40)
    other = kept.copy() if how == "copy" else made(restore="prefix").taking_over(kept, 40)
    for name in ("sequence", "hits", "created", "last_used", "prefix", "gap_before", "gap_after"):
        ours, theirs = ([getattr(each, name) for each in each_of] for each_of in (other, kept))
        assert ours == theirs, name
    assert [each.gap_after for each in other] == [10, 10, 20]  # to the end of the prompt
    put(other, run(47))
    assert [each.prompt_end for each in other] == [False, False, False, True]
    sequences = [each.sequence for each in other]
    assert sequences == sorted(set(sequences))


def test_a_part_of_a_list_knows_its_new_neighbours() -> None:
    kept = made(8, restore="prefix")
    kept.resume(0, as_tokens(run(50)), live_pos_min=-1)
    for position in (10, 20, 30):
        put(kept, run(position))
    assert [(each.gap_before, each.gap_after) for each in kept.copy("last")] == [(30, 20)]
    part = made(restore="prefix").taking_over(kept, 20)
    assert [(each.gap_before, each.gap_after) for each in part] == [(10, 10), (10, 30)]
    assert [each.gap_after for each in kept] == [10, 10, 20]
    for other in (kept.copy(), made(restore="prefix").taking_over(kept, 40)):
        for ours, theirs in zip(other, kept, strict=True):
            assert ours is not theirs
            assert ours.data is theirs.data


@everywhere
def test_what_cannot_be_taken_over_stays_behind_and_drops_nothing(restore: Any) -> None:
    kept = made(restore="prefix")
    for position, n_bytes in ((10, 50), (20, 101), (30, 50)):
        put(kept, run(position), n_bytes=n_bytes)
    data = on_device(run(40), 1)
    kept.create(data, id_task=0, pos_min=39, pos_max=39, n_tokens=40, tokens=as_tokens(run(40)))
    taken = made(restore=restore, limit_bytes=100).taking_over(kept, 50)
    assert at(taken) == [10, 30]
    taken.check()
    for limits in ({"limit": 0}, {"limit_bytes": 0}):
        assert not len(made(restore=restore, **limits).taking_over(kept, 50))
    assert at(kept) == [10, 20, 30, 40]


def test_a_copy_can_be_smaller() -> None:
    kept = filled([10, 30, 20])
    assert at(kept.copy("last")) == [30]
    assert at(kept.copy("none")) == []
    assert at(made().copy("last")) == []
    with pytest.raises(InvalidValue, match="keep"):
        kept.copy("some")


def test_hits_are_recorded_on_restore() -> None:
    times = iter(range(100))
    kept = made(8, 0, "prefix", clock=lambda: next(times))
    put(kept, run(10))
    put(kept, run(20))
    kept.resume(15, as_tokens(run(30)), live_pos_min=40)
    used = {item.n_tokens: (item.hits, item.created, item.last_used) for item in kept}
    assert used == {10: (1, 0, 2), 20: (0, 1, 1)}


def test_an_iteration_is_not_disturbed_by_a_drop() -> None:
    kept = filled([10, 20, 30])
    seen = []
    for item in kept:
        seen.append(item.n_tokens)
        kept.invalidate(5)
    assert seen == [10, 20, 30]
    assert "at []" in repr(kept)


def test_check_notices_what_does_not_add_up() -> None:
    kept = filled([10, 20])
    kept._budget.reserve(1)
    with pytest.raises(IntegrityError, match=r"2 checkpoints of 8 hold 8,192 bytes, 8,193"):
        kept.check()
    kept = filled([10, 20])
    kept._items[0].n_tokens = 20
    with pytest.raises(IntegrityError, match="two checkpoints at one position"):
        kept.check()


# -- policies --------------------------------------------------------------------------------------


def dropped_by(policy: Any, positions: Sequence[int], coming: int, **how: Any) -> int:
    kept = filled(positions, run(500), limit=len(positions), restore="prefix", policy=policy, **how)
    put(kept, run(coming))
    (gone,) = {*positions} - {*at(kept)}
    return gone


@pytest.mark.parametrize(
    ("policy", "positions", "coming", "expected"),
    [
        ("oldest", [30, 10, 40, 20], 50, 30),
        ("lru", [30, 10, 40, 20], 50, 30),
        ("upstream", [30, 10, 40, 20], 50, 30),
        ("tokens-per-byte", [30, 10, 40, 20], 50, 10),
        ("marginal", [30, 10, 45, 25], 60, 30),
        ("neighbor-distance", [10, 40, 47, 80], 100, 40),
        ("neighbor-distance", [10, 40, 50, 80], 99, 40),
        ("neighbor-distance", [10, 50, 70, 98], 99, 98),
        ("neighbor-gap", [10, 20, 50, 52], 100, 50),
        ("neighbor-gap", [10, 15, 60, 80], 100, 15),
    ],
)
def test_who_goes_by_hand(policy: str, positions: list[int], coming: int, expected: int) -> None:
    assert dropped_by(policy, positions, coming) == expected


def test_lru_spares_what_was_restored() -> None:
    times = iter(range(100))
    kept = made(3, 0, "prefix", policy="lru", clock=lambda: next(times))
    for position in (10, 20, 30):
        put(kept, run(position))
    assert kept.resume(12, as_tokens(run(50)), live_pos_min=60).n_past == 10
    put(kept, run(40))
    assert at(kept) == [10, 30, 40]


def test_a_policy_can_be_anyones() -> None:
    class Deepest:
        name = "deepest"

        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            return -kept.n_tokens, kept.sequence

    events: list[Event] = []
    assert dropped_by(Deepest(), [10, 40, 20], 30, emit=events.append) == 40
    assert "by policy deepest" in events[-2].line()


@st.composite
def lists(draw: st.DrawFn) -> tuple[list[tuple[int, bool]], int, bool]:
    positions = draw(st.lists(st.integers(1, 60), min_size=2, max_size=9, unique=True))
    *before, coming = positions
    return [(p, draw(st.booleans())) for p in before], coming, draw(st.booleans())


@given(case=lists(), policy=st.sampled_from(["neighbor-distance", "neighbor-gap"]))
def test_neighbour_policies_against_brute_force(
    case: tuple[list[tuple[int, bool]], int, bool], policy: str
) -> None:
    before, coming, coming_is_end = case
    kept = made(len(before), 0, "prefix", policy=policy)
    for position, is_end in before:
        put(kept, run(position), prompt_end=is_end)
    put(kept, run(coming), prompt_end=coming_is_end)
    (gone,) = {position for position, _ in before} - {*at(kept)}

    everything = [*before, (coming, coming_is_end)]
    positions = sorted(position for position, _ in everything)
    spared = {positions[0], positions[-1]}
    spared |= set([position for position, is_end in everything if is_end][-1:])
    free = [position for position, _ in before if position not in spared]

    def cost(position: int) -> int:
        """Without looking at a list's own gaps."""
        lower = position - max((p for p in positions if p < position), default=0)
        upper = min((p for p in positions if p > position), default=positions[-1]) - position
        return min(lower, upper) if policy == "neighbor-distance" else lower * upper

    assert gone in free or not free
    choice = free or [position for position, _ in before]
    assert gone == min(choice, key=cost)  # of equals, the one made first


@given(case=lists())
def test_marginal_drops_what_costs_least(
    case: tuple[list[tuple[int, bool]], int, bool],
) -> None:
    before, coming, _ = case
    kept = made(len(before), 0, "prefix", policy="marginal", clock=lambda: 0.0)
    for position, _ in before:
        put(kept, run(position))
    put(kept, run(coming))
    (gone,) = {position for position, _ in before} - {*at(kept)}
    positions = {coming, *(position for position, _ in before)}
    costs = [p - max([q for q in positions if q < p], default=0) for p, _ in before]
    assert gone == before[costs.index(min(costs))][0]


def test_a_list_tells_its_checkpoints_their_gaps() -> None:
    kept = filled([30, 10, 45], run(60))
    kept.wants(50, n_prompt=60, n_ubatch=8)
    kept.invalidate(60)
    gaps = [(c.n_tokens, c.gap_before, c.gap_after, c.marginal_tokens) for c in kept]
    assert gaps == [(30, 20, 15, 20), (10, 10, 20, 10), (45, 15, 15, 15)]


# -- whatever comes --------------------------------------------------------------------------------


class Watched:
    """Looks at a list at every event."""

    def __init__(self) -> None:
        self.kept: Any = None

    def __call__(self, event: Event) -> None:
        assert len(self.kept) <= self.kept.limit
        assert self.kept.n_bytes <= self.kept.limit_bytes


@st.composite
def visits(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts that grow, rewind and change, with message starts and answers."""
    prompts: list[list[int]] = [[1]]
    out = []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(prompts))
        cut = draw(st.integers(0, len(base)))
        more = draw(st.lists(st.integers(1, 3), max_size=30))
        prompt = [*base[:cut], *more] or [1]
        starts = draw(st.lists(st.integers(0, len(prompt) - 1), unique=True, max_size=4))
        answer = draw(st.lists(st.integers(1, 3), max_size=5))
        prompts += [prompt, prompt + answer]
        out.append((prompt, sorted(starts), answer))
    return out


@settings(max_examples=300)
@given(
    visits=visits(),
    restore=st.sampled_from(MODES),
    policy=st.sampled_from(POLICIES),
    limit=st.integers(0, 5),
    limit_bytes=st.sampled_from([None, 0, 63, 64, 150, 200]),
    min_step=st.integers(0, 20),
    n_batch=st.integers(1, 16),
    n_ubatch=st.integers(1, 16),
)
def test_a_list_holds_what_is_promised(
    visits: list[tuple[list[int], list[int], list[int]]],
    restore: Any,
    policy: str,
    limit: int,
    limit_bytes: int | None,
    min_step: int,
    n_batch: int,
    n_ubatch: int,
) -> None:
    watched = Watched()
    kept = made(limit, min_step, restore, limit_bytes=limit_bytes, policy=policy, emit=watched)
    watched.kept = kept
    player = SlotPlayer(kept, n_batch=n_batch, n_ubatch=min(n_ubatch, n_batch), n_bytes=64)
    for prompt, starts, answer in visits:
        positions = at(kept)
        resume = player.serve(prompt, starts)
        kept.check()
        # Never past the common prefix, and always something to evaluate.
        assert 0 <= resume.n_past <= min(player.common, len(prompt) - 1)
        if resume.checkpoint is not None:
            assert resume.checkpoint.n_tokens in positions
        if restore != "upstream":
            assert not player.wrong
            for item in kept:
                assert np.array_equal(item.data.data, state_of(prompt[: item.n_tokens], 64).data)
            # Whoever splits a batch takes a checkpoint there.
            for _, end in player.batches[:-1]:
                full = any(end - start == n_batch for start, e in player.batches if e == end)
                assert full or end in player.taken or limit_bytes == 63
        player.answer(answer)


@given(visits=visits(), min_step=st.integers(0, 20))
def test_prefix_restores_the_deepest_there_is(
    visits: list[tuple[list[int], list[int], list[int]]], min_step: int
) -> None:
    kept = made(64, min_step, "prefix")
    player = SlotPlayer(kept)
    for prompt, starts, answer in visits:
        live = list(map(int, player.live))
        fits = [
            item.n_tokens
            for item in kept
            if item.n_tokens <= len(prompt) - 2 and live[: item.n_tokens] == prompt[: item.n_tokens]
        ]
        resume = player.serve(prompt, starts)
        if live == prompt[: len(live)] and len(live) <= len(prompt) - 2:
            assert (resume.n_past, resume.checkpoint) == (len(live), None)
        else:
            assert resume.n_past == max(fits, default=0)
        player.answer(answer)


# -- kinds of faults: what the proven modes make impossible ----------------------------------------


@proven
def test_fault_2_a_window_covers_only_its_window(restore: Any) -> None:
    """Save [1..20], grow, resend: nothing past the common prefix, no window with a hole."""
    kept = made(8, 8192, restore)
    for n_tokens in (18, 38, 58):
        put(kept, run(n_tokens), pos_min=n_tokens - 7)
    resume = kept.resume(20, as_tokens(run(20)), live_pos_min=60, n_swa=8, n_live=80)
    assert resume.n_past == 18
    assert at(kept) == [18]
    # The same with a window whose first rows were gone when it was saved.
    kept = made(8, 8192, restore)
    put(kept, run(18), pos_min=12)
    resume = kept.resume(20, as_tokens(run(20)), live_pos_min=60, n_swa=8, n_live=80)
    assert (resume.n_past, resume.checkpoint, resume.full_reprocess) == (0, None, True)
    # Nor is a live window cut back further than its rows reach.
    for live_pos_min, n_past in ((11, 18), (12, 0)):
        resume = made(8, 8192, restore).resume(
            20, as_tokens(run(20)), live_pos_min=live_pos_min, n_swa=8, n_live=80
        )
        assert resume.n_past == n_past


@proven
def test_fault_3_what_lies_past_a_rewind_is_gone(restore: Any) -> None:
    kept = filled([10, 20, 30], restore=restore)
    kept.invalidate(15)
    assert at(kept) == [10]
    kept = filled([10, 20, 30], restore=restore)
    kept.resume(15, as_tokens([*run(15), *run(20, 100)]), live_pos_min=39, n_live=40)
    assert at(kept) == [10]
    # One that has seen a single token of the old text is gone, too.
    kept = filled([10, 16], restore=restore)
    kept.invalidate(15)
    assert at(kept) == [10]


@proven
def test_fault_21_many_short_turns_leave_an_early_checkpoint(restore: Any) -> None:
    player = SlotPlayer(made(8, 8, restore))
    player.serve(run(32), [8])
    prompt = run(80)
    player.serve(prompt, [8, 40])
    for turn in range(10):
        prompt = prompt + run(1 + turn % 2, 1000 + 2 * turn)
        player.serve(prompt, [8, 40, len(prompt) - 1])
    assert len(player.kept) == 8
    assert min(at(player.kept)) <= 30
    assert player.serve([*run(30), *run(20, 5000)]).n_past == 30


@proven
def test_fault_22_a_short_prompt_keeps_its_end(restore: Any) -> None:
    player = SlotPlayer(made(4, 8192, restore))
    prompt: list[int] = []
    for turn in range(6):
        prompt = prompt + run(100, 1000 * turn)
        before = at(player.kept)
        player.serve(prompt, [len(prompt) - 100])
        assert len(prompt) - 2 in at(player.kept)
        thinned = set(before) - set(at(player.kept))
        assert not thinned or len(before) + len(player.taken) > 4
    put(player.kept, prompt[:598])
    assert at(player.kept).count(598) == 1


@proven
def test_fault_23_what_is_kept_covers_all_of_the_prompt(restore: Any) -> None:
    player = SlotPlayer(made(4, 5, restore))
    player.serve(run(90), list(range(10, 90, 10)))
    positions = sorted(at(player.kept))
    assert len(positions) == 4
    assert (positions[0], positions[-1]) == (10, 88)
    assert max(b - a for a, b in zip([0, *positions], positions, strict=False)) <= 40
    resume = player.serve([*run(25), *run(30, 900)])
    # Mode exact has nothing for 25 itself; what was kept below stays for the next one.
    assert resume.n_past == (10 if restore == "prefix" else 0)
    assert 10 in at(player.kept)


@pytest.mark.parametrize("policy", ["neighbor-distance", "neighbor-gap"])
@proven
def test_fault_24_the_end_of_the_prompt_is_protected(restore: Any, policy: str) -> None:
    kept = made(8, 8192, restore, policy=policy)
    kept.resume(0, as_tokens(run(500)), live_pos_min=-1)
    put(kept, run(300), task=1)
    put(kept, run(498), task=1)
    for position in range(510, 1500, 12):  # all through a long answer
        put(kept, run(position), task=1)
    assert len(kept) == 8
    resume = kept.resume(500, as_tokens(run(500)), live_pos_min=1499, n_live=1500)
    assert resume.n_past == 498


@proven
def test_fault_49_restored_when_its_end_is_within_the_prefix(restore: Any) -> None:
    kept = filled([20], restore=restore)
    prompt = as_tokens([*run(20), 90, 91, 92])
    resume = kept.resume(20, prompt, live_pos_min=39, n_live=40)
    assert (resume.n_past, resume.full_reprocess) == (20, False)


@proven
def test_fault_50_a_short_prompt_has_a_checkpoint(restore: Any) -> None:
    player = SlotPlayer(made(8, 8192, restore))
    player.serve(run(10))
    assert at(player.kept) == [8]
    assert player.serve([*run(8), 90, 91, 92]).n_past == 8


@proven
def test_fault_50_a_failed_cut_does_not_wipe_the_rest(restore: Any) -> None:
    kept = filled([20], restore=restore)
    resume = kept.resume(20, as_tokens(run(20)), live_pos_min=39, n_live=40)
    assert (resume.n_past, resume.full_reprocess) == (0, True)
    assert at(kept) == [20]


@proven
def test_fault_51_the_same_prompt_twice(restore: Any) -> None:
    player = SlotPlayer(made(8, 8192, restore))
    for n_tokens in (1, 2, 3, 10, 300):
        prompt = run(n_tokens, 1000 * n_tokens)
        player.serve(prompt)
        assert player.serve(prompt).n_past == max(0, n_tokens - 2)
    assert not player.wrong


@proven
@pytest.mark.parametrize(
    ("live_pos_min", "n_swa"),
    [
        pytest.param(19, 0, id="recurrent"),
        pytest.param(0, 0, id="attention"),
        pytest.param(12, 8, id="a window as a load leaves it"),
        pytest.param(19, 8, id="a window and a recurrent part"),
    ],
)
def test_fault_52_nothing_is_restored_for_a_prompt_that_goes_on(
    restore: Any, live_pos_min: int, n_swa: int
) -> None:
    kept = filled([10, 18], restore=restore)
    resume = kept.resume(20, as_tokens(run(25)), live_pos_min=live_pos_min, n_swa=n_swa, n_live=20)
    assert (resume.n_past, resume.checkpoint, resume.full_reprocess) == (20, None, False)
    assert at(kept) == [10, 18]


@proven
def test_fault_53_a_window_that_starts_at_0_is_whole(restore: Any) -> None:
    kept = made(8, 8192, restore)
    put(kept, run(6), pos_min=0)
    resume = kept.resume(6, as_tokens([*run(6), 90, 91]), live_pos_min=30, n_swa=512, n_live=40)
    assert resume.n_past == 6


@proven
def test_fault_54_a_prompt_is_split_only_where_a_checkpoint_is_made(restore: Any) -> None:
    player = SlotPlayer(made(32, 256, restore), n_batch=512)
    starts = list(range(10, 210, 10))
    player.serve(run(212), starts)
    assert len(player.batches) == 3
    assert player.taken == [200, 210]
    # A message close behind where llama-server splits near the end.
    player = SlotPlayer(made(32, 256, restore), n_batch=512)
    player.serve(run(200), [10, 134])
    assert [end for _, end in player.batches[:-1]] == player.taken == [134, 198]


@proven
@pytest.mark.parametrize("starts", [[], [100]])
def test_fault_55_a_fixed_prefix_keeps_a_checkpoint_at_its_end(
    restore: Any, starts: list[int]
) -> None:
    """Without message starts, the place where the second prompt diverged is learnt."""
    player = SlotPlayer(made(4, 8192, restore))
    reused = [
        player.serve([*run(100), *run(80 + turn, 1000 * (turn + 1))], starts).n_past
        for turn in range(8)
    ]
    assert reused[2:] == [100] * 6
    assert reused[1] == (100 if starts else 0)


@everywhere
def test_fault_56_a_state_past_the_known_tokens_is_refused(restore: Any) -> None:
    """Accepted [5, end, 7, 8]: the tokens end at the end token, so must the state."""
    kept = made(8, 8192, restore)
    accepted = [*run(10), 5, 2, 7, 8]
    how: Any = {"id_task": 1, "pos_min": 13, "pos_max": 13}
    with pytest.raises(InvalidValue):
        kept.create(state_of(accepted), n_tokens=14, tokens=as_tokens(accepted[:12]), **how)
    with pytest.raises(InvalidValue):
        kept.create(state_of(accepted), n_tokens=12, tokens=as_tokens(accepted[:12]), **how)
    assert put(kept, accepted[:12])


def on_device(tokens: list[int], generation: int, seq_id: int = 0, context: int = 1) -> Any:
    data = frozen(np.zeros(16, np.uint8))
    return DeviceCheckpoint(len(tokens), data, seq_id, context, generation, 4096)


@everywhere
def test_fault_57_a_device_checkpoint_ends_the_one_before(restore: Any) -> None:
    kept = made(8, 8192, restore)
    for generation, n_tokens in enumerate((10, 20)):
        tokens = as_tokens(run(n_tokens))
        how: Any = {"id_task": 1, "pos_min": n_tokens - 1, "pos_max": n_tokens - 1}
        kept.create(on_device(run(n_tokens), generation), n_tokens=n_tokens, tokens=tokens, **how)
        other = on_device(run(n_tokens), generation, seq_id=1)
    assert at(kept) == [20]
    prompt = as_tokens([*run(12), *run(9, 50)])
    assert kept.copy().resume(12, prompt, live_pos_min=30).checkpoint is None
    assert kept.resume(12, prompt, live_pos_min=30).n_past == 0
    # Another sequence's lives on.
    kept.create(other, id_task=1, pos_min=19, pos_max=19, n_tokens=20, tokens=as_tokens(run(20)))
    put(kept, run(25))
    tokens = as_tokens(run(30))
    kept.create(
        on_device(run(30), 2), id_task=1, pos_min=29, pos_max=29, n_tokens=30, tokens=tokens
    )
    assert at(kept) == [20, 25, 30]


@everywhere
def test_fault_57_after_a_reset_nothing_is_found(restore: Any) -> None:
    kept = filled([10, 20], restore=restore)
    kept.clear()
    resume = kept.resume(25, as_tokens(run(30)), live_pos_min=40)
    assert (resume.n_past, resume.checkpoint) == (0, None)
    assert kept.n_bytes == 0


def test_prefix_takes_what_another_slot_made() -> None:
    """A recurrent model has no rows that would have to be there as well."""
    theirs = filled([40, 90], restore="prefix")
    prompt = as_tokens(run(100))
    assert theirs.copy().resume(0, prompt, live_pos_min=-1, n_rows=100).n_past == 90
    assert theirs.copy().resume(0, prompt, live_pos_min=-1, n_rows=60).n_past == 40
    mine = theirs.copy()
    assert mine.resume(0, prompt, live_pos_min=-1).n_past == 0
    assert at(mine) == [40, 90]


@pytest.mark.parametrize(
    ("restore", "positions", "limit", "expected"),
    [
        ("prefix", [10, 30, 20], 25, 20),
        ("prefix", [10, 30, 20], 30, 30),
        ("prefix", [10, 30, 20], 9, None),
        ("exact", [10, 30, 20], 25, None),
        ("exact", [10, 30, 20], 20, 20),
        ("upstream", [10, 30, 20], 25, 20),
        ("upstream", [20, 10], 25, 10),  # the newest
    ],
)
def test_deepest_obeys_the_mode(
    restore: Any, positions: list[int], limit: int, expected: int | None
) -> None:
    kept = filled(positions, run(40), restore=restore)
    found = kept.deepest(as_tokens(run(40)), limit)
    assert (found.n_tokens if found else None) == expected
    other = as_tokens([*run(8), *run(32, 500)])
    assert kept.deepest(other, limit) is None  # not of these tokens


@everywhere
def test_a_window_that_is_not_whole_is_not_promised(restore: Any) -> None:
    kept = made(restore=restore)
    put(kept, run(20), pos_min=18)
    assert kept.deepest(as_tokens(run(30)), 20, n_swa=8) is None
    assert kept.deepest(as_tokens(run(30)), 20, n_swa=0) is not None


@everywhere
@given(data=st.data())
def test_find_says_what_resume_does_and_changes_nothing(restore: Any, data: st.DataObject) -> None:
    recorder = Recorder()
    kept = made(restore=restore, emit=recorder, clock=lambda: 0.0)
    for position in data.draw(st.lists(st.integers(1, 30), unique=True, max_size=5)):
        tokens = [*run(position - 1), data.draw(st.integers(position - 1, position))]
        put(kept, tokens, pos_min=data.draw(st.integers(0, position - 1)))
    recorder.clear()
    n_prompt = data.draw(st.integers(1, 30))
    common = data.draw(st.integers(0, n_prompt))
    asked: dict[str, Any] = {
        "live_pos_min": data.draw(st.integers(0, 30)),
        "n_swa": data.draw(st.sampled_from([0, 4])),
        "n_live": data.draw(st.sampled_from([None, common])),
        "n_rows": data.draw(st.sampled_from([None, n_prompt])),
    }
    before = [(item, item.hits) for item in kept]
    found = kept.resume(common, as_tokens(run(n_prompt)), **asked, commit=False)
    assert [(item, item.hits) for item in kept] == before
    assert not recorder
    resumed = kept.resume(common, as_tokens(run(n_prompt)), **asked)
    assert found == resumed
    hits = [event for event in recorder if event["event"] == "checkpoint_restored"]
    assert len(hits) == (found.checkpoint is not None)


def test_prefix_goes_deeper_than_what_is_live() -> None:
    kept = filled([40, 90], restore="prefix")
    how: Any = {"live_pos_min": 49, "n_live": 50}
    assert kept.copy().resume(50, as_tokens(run(100)), n_rows=100, **how).n_past == 90
    resume = kept.resume(50, as_tokens(run(100)), **how)
    assert (resume.n_past, resume.checkpoint) == (50, None)


@proven
def test_one_of_other_tokens_goes_wherever_it_is(restore: Any) -> None:
    kept = filled([20], restore=restore)
    put(kept, run(5, 900))
    put(kept, run(80, 900))
    put(kept, [*run(18), 7, 7])
    put(kept, run(23))
    resume = kept.resume(23, as_tokens(run(60)), live_pos_min=39, n_live=40)
    assert resume.n_past == 23
    assert at(kept) == [23]  # of the two at 20, the later one had replaced the prompt's own


@proven
def test_what_is_live_is_not_cut_by_the_tokens_that_must_be_left(restore: Any) -> None:
    """The same prompt again: a recurrent memory at its end cannot give two tokens back."""
    kept = filled([10], restore=restore)
    resume = kept.resume(20, as_tokens(run(20)), live_pos_min=19, n_live=20)
    assert resume.n_past == (10 if restore == "prefix" else 0)


@proven
def test_one_token_left_is_enough_if_asked_for(restore: Any) -> None:
    kept = filled([20], restore=restore, min_evaluated=1)
    assert kept.resume(20, as_tokens(run(21)), live_pos_min=30, n_live=31).n_past == 20
    kept = filled([20], restore=restore)
    assert kept.resume(20, as_tokens(run(21)), live_pos_min=30, n_live=31).n_past == 0


# -- kinds of faults: what llama-server's rules bring about, and this mode with them ---------------


def test_upstream_has_fault_2_a_window_is_taken_for_whole() -> None:
    kept = made()
    put(kept, run(20), pos_min=15)  # the token at 19 looks back to 12
    resume = kept.resume(30, as_tokens(run(60)), live_pos_min=50, n_swa=8)
    assert resume.n_past == 19


def test_upstream_has_fault_2_a_window_ends_past_the_common_prefix() -> None:
    kept = made()
    put(kept, run(21), pos_min=5)
    resume = kept.resume(20, as_tokens([*run(20), *run(20, 90)]), live_pos_min=50, n_swa=8)
    assert resume.n_past == 20
    assert resume.checkpoint.n_tokens == 21


def test_upstream_has_fault_3_a_checkpoint_of_one_other_token_stays_and_is_restored() -> None:
    """Dropped is what has pos_max > pos_next, and pos_max is one less than the tokens seen."""
    player = SlotPlayer(made(8, 0))
    player.serve(run(15), [10])
    assert at(player.kept) == [10, 11]
    second = [*run(10), *run(200, 50)]
    player.serve(second, [10, 150])
    assert at(player.kept)[:2] == [10, 11]  # the second one has another token there
    third = [*second[:13], *run(40, 600)]
    assert player.serve(third).n_past == 11
    assert player.wrong == [11]


def test_upstream_has_fault_3_a_checkpoint_of_one_token_outlives_every_prompt() -> None:
    player = SlotPlayer(made(8, 8192))
    player.serve(run(5))
    player.serve(run(9, 90))
    assert at(player.kept) == [1, 5]
    assert player.serve([90, *run(10, 50)]).n_past == 1
    assert player.wrong == [1]


def test_upstream_has_fault_21_a_long_chat_pushes_the_early_ones_out() -> None:
    """Turns longer than the least step; the recording's return to an early turn is such a case."""
    player = SlotPlayer(made(8, 8))
    prompt = run(40)
    player.serve(prompt, [8])
    for turn in range(10):
        prompt = prompt + run(20, 1000 * (turn + 1))
        player.serve(prompt, [8, len(prompt) - 20])
    assert player.serve([*run(30), *run(20, 5000)]).n_past == 0


def test_upstream_keeps_an_early_one_through_turns_shorter_than_the_step() -> None:
    """Fault 21 as it was reported: since the step thins the list out, it is not there."""
    player = SlotPlayer(made(8, 8))
    player.serve(run(32), [8])
    prompt = run(80)
    player.serve(prompt, [8, 40])
    for turn in range(10):
        prompt = prompt + run(1 + turn % 2, 1000 + 2 * turn)
        player.serve(prompt, [8, 40, len(prompt) - 1])
    assert min(at(player.kept)) <= 30


def test_upstream_keeps_the_end_of_a_short_prompt() -> None:
    """Fault 22 is not there."""
    player = SlotPlayer(made(4, 8192))
    prompt: list[int] = []
    for turn in range(6):
        prompt = prompt + run(100, 1000 * turn)
        player.serve(prompt, [len(prompt) - 100])
        assert len(prompt) - 4 in at(player.kept)


def test_upstream_has_fault_23_only_the_newest_are_kept() -> None:
    player = SlotPlayer(made(4, 5))
    player.serve(run(90), list(range(10, 90, 10)))
    assert at(player.kept) == [60, 70, 80, 86]
    resume = player.serve([*run(25), *run(30, 900)])
    assert (resume.n_past, resume.full_reprocess) == (0, True)


def test_upstream_keeps_the_end_of_a_prompt_through_its_answer() -> None:
    """Fault 24 is not there: an answer takes no checkpoints."""
    player = SlotPlayer(made(8, 100))
    player.serve(run(500), [0, 200, 400])
    player.answer(run(600, 10_000))
    assert player.serve(run(500), [0, 200, 400]).n_past == 496


def test_upstream_restores_at_the_end_of_the_prefix() -> None:
    """Fault 49 is not there."""
    kept = filled([20])
    assert kept.resume(20, as_tokens([*run(20), 90, 91, 92]), live_pos_min=39).n_past == 20


def test_upstream_has_fault_50_a_failed_search_wipes_the_rest() -> None:
    kept = filled([20])
    resume = kept.resume(20, as_tokens(run(20)), live_pos_min=39)
    assert (resume.n_past, resume.full_reprocess) == (0, True)
    assert at(kept) == []  # though its tokens are the prompt's own


def test_upstream_takes_one_in_a_prompt_of_ten_tokens() -> None:
    """The other half of fault 50 is not there."""
    player = SlotPlayer(made())
    player.serve(run(10))
    assert at(player.kept) == [6]
    assert player.serve([*run(8), 90, 91, 92]).n_past == 6


def test_upstream_serves_the_same_prompt_twice() -> None:
    """Fault 51 is not there."""
    player = SlotPlayer(made())
    for n_tokens in (1, 2, 3, 10, 300):
        prompt = run(n_tokens, 1000 * n_tokens)
        player.serve(prompt)
        assert player.serve(prompt).n_past == max(0, n_tokens - 4)


@pytest.mark.parametrize(
    ("live_pos_min", "n_swa", "restored"),
    [
        pytest.param(19, 0, False, id="not a recurrent one"),
        pytest.param(12, 8, True, id="a window as a load leaves it"),
        pytest.param(19, 8, True, id="a window and a recurrent part"),
    ],
)
def test_upstream_has_fault_52_a_prompt_that_goes_on_is_restored(
    live_pos_min: int, n_swa: int, restored: bool
) -> None:
    kept = made()
    put(kept, run(10), pos_min=2)
    resume = kept.resume(20, as_tokens(run(25)), live_pos_min=live_pos_min, n_swa=n_swa)
    assert resume.n_past == (9 if restored else 20)
    assert (resume.checkpoint is not None) == restored


def test_upstream_accepts_a_window_that_starts_at_0() -> None:
    """Fault 53 is not there, but one more token is evaluated."""
    kept = made()
    put(kept, run(6), pos_min=0)
    resume = kept.resume(6, as_tokens([*run(6), 90, 91]), live_pos_min=30, n_swa=512)
    assert resume.n_past == 5


def test_upstream_has_fault_54_a_split_without_a_checkpoint() -> None:
    player = SlotPlayer(made(32, 256), n_batch=512)
    player.serve(run(200), [10, 134])
    assert player.batches[:3] == [(0, 10), (10, 132), (132, 134)]
    assert 132 not in player.taken
    # Of twenty short messages, the second one: the first one's is not in the list in time.
    player = SlotPlayer(made(32, 256), n_batch=512)
    player.serve(run(212), list(range(10, 210, 10)))
    assert [end for _, end in player.batches[:-1]] == [10, 20, 144, 200, 208]
    assert player.taken == [10, 144, 200, 208]


def test_upstream_has_fault_55_a_changing_tail_leaves_nothing_at_the_prefix() -> None:
    for starts, reused in (([], 0), ([100], 100)):
        player = SlotPlayer(made(4, 8192))
        for turn in range(4):
            prompt = [*run(100), *run(80 + turn, 1000 * (turn + 1))]
            resume = player.serve(prompt, starts)
        assert resume.n_past == reused


def test_a_listed_checkpoint_says_nothing_of_its_bytes() -> None:
    kept = filled([10])
    (item,) = kept
    assert isinstance(item, ListedCheckpoint)
    assert item.n_bytes == STATE_BYTES
    assert "array" not in repr(item)
