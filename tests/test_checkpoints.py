"""Where checkpoints are taken, which one is restored, which one is dropped."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.checkpoints import (
    MIN_EVALUATED,
    best_to_restore,
    deepest_resume,
    least_missed,
    positions_to_take,
)
from llamakeep.errors import InvalidValue
from llamakeep.tokens import align_down

aligns = st.sampled_from([1, 2, 7, 8, 64])
positions = st.lists(st.integers(1, 400), unique=True).map(sorted)


@pytest.mark.parametrize(
    ("n_tokens", "align", "expected"),
    [
        (100, 1, 98),
        (100, 8, 96),
        (98, 8, 96),
        (97, 8, 88),
        (10, 8, 8),
        (9, 8, 0),
        (3, 1, 1),
        (2, 1, 0),
        (1, 1, 0),
        (1, 8, 0),
        (0, 8, 0),
    ],
)
def test_deepest_resume_leaves_two_tokens_and_is_aligned(
    n_tokens: int, align: int, expected: int
) -> None:
    assert deepest_resume(n_tokens, align) == expected


@given(n_tokens=st.integers(0, 1000), align=aligns)
def test_deepest_resume_is_the_deepest(n_tokens: int, align: int) -> None:
    brute = [p for p in range(n_tokens + 1) if p % align == 0 and n_tokens - p >= MIN_EVALUATED]
    assert deepest_resume(n_tokens, align) == max(brute, default=0)


@given(n_tokens=st.integers(0, 100), align=aligns, min_evaluated=st.integers(1, 120))
def test_the_checkpoint_near_the_end_is_where_a_repeat_resumes(
    n_tokens: int, align: int, min_evaluated: int
) -> None:
    deepest = deepest_resume(n_tokens, align, min_evaluated)
    assert deepest == max(0, (n_tokens - min_evaluated) // align * align)
    taken = positions_to_take(n_tokens, 0, align=align, min_step=8, min_evaluated=min_evaluated)
    assert taken == ([deepest] if deepest else [])


# -- where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "resume", "options", "expected"),
    [
        pytest.param(100, 0, {}, [98], id="near the end"),
        pytest.param(100, 0, {"align": 8}, [96], id="near the end, aligned"),
        pytest.param(100, 96, {"align": 8}, [], id="resumed there already"),
        pytest.param(100, 0, {"present": [98]}, [], id="there is one already"),
        pytest.param(1, 0, {}, [], id="one token has no place for one"),
        pytest.param(3, 0, {}, [1], id="three tokens have"),
        pytest.param(100, 10, {"branch": 40}, [40, 98], id="where it left what was known"),
        pytest.param(100, 10, {"branch": 45, "align": 8}, [40, 96], id="the same, aligned"),
        pytest.param(100, 40, {"branch": 40}, [98], id="resumed at the branch"),
        pytest.param(100, 0, {"branch": 100}, [98], id="known to its end"),
        pytest.param(100, 0, {"user_starts": [7]}, [7, 98], id="the only user message"),
        pytest.param(
            100, 0, {"user_starts": [5, 30, 60]}, [30, 60, 98], id="thirty apart, the last always"
        ),
        pytest.param(
            100, 0, {"user_starts": [30, 59, 61, 90]}, [30, 61, 90, 98], id="least step is exact"
        ),
        pytest.param(
            100,
            0,
            {"user_starts": [30, 60, 90], "present": [20]},
            [60, 90, 98],
            id="counted from those there are",
        ),
        pytest.param(
            100, 0, {"user_starts": [30, 40], "branch": 25}, [25, 40, 98], id="and from the branch"
        ),
        pytest.param(
            100, 0, {"user_starts": [30, 60, 99]}, [30, 60, 98], id="the last one past the end"
        ),
        pytest.param(
            100, 50, {"user_starts": [10, 40, 70, 90]}, [70, 90, 98], id="only what is evaluated"
        ),
        pytest.param(
            100,
            45,
            {"user_starts": [44, 50, 90]},
            [50, 90, 98],
            id="what is not taken does not count as a step",
        ),
        pytest.param(
            100,
            21,
            {"user_starts": [35, 90], "branch": 21, "align": 8, "min_step": 20},
            [32, 88, 96],
            id="nor does a branch that is not taken",
        ),
        pytest.param(64, 0, {"user_starts": [8, 16], "align": 8, "min_step": 0}, [8, 16, 56]),
    ],
)
def test_positions_by_hand(
    n_tokens: int, resume: int, options: dict[str, Any], expected: list[int]
) -> None:
    options = {"align": 1, "min_step": 30} | options
    assert positions_to_take(n_tokens, resume, **options) == expected


def test_fault_22_a_short_prompt_keeps_its_end_whatever_the_step() -> None:
    assert positions_to_take(100, 0, align=1, min_step=8192) == [98]


def test_fault_54_short_messages_cause_no_splits() -> None:
    starts = list(range(10, 210, 10))
    assert positions_to_take(212, 0, align=1, min_step=256, user_starts=starts) == [200, 210]


def test_positions_present_may_come_from_a_generator() -> None:
    present = (p for p in (50, 98))
    taken = positions_to_take(100, 0, align=1, min_step=10, user_starts=[50, 80], present=present)
    assert taken == [80]


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    n_tokens = draw(st.integers(1, 400))
    return {
        "n_tokens": n_tokens,
        "resume": draw(st.integers(0, n_tokens)),
        "align": draw(aligns),
        "min_step": draw(st.integers(1, 100)),
        "user_starts": draw(positions.map(lambda all_: [p for p in all_ if p < n_tokens])),
        "branch": draw(st.integers(0, n_tokens)),
        "present": draw(positions),
    }


@given(prompt=prompts())
def test_positions_hold_what_is_promised(prompt: dict[str, Any]) -> None:
    taken = positions_to_take(**prompt)
    n_tokens, resume, align = prompt["n_tokens"], prompt["resume"], prompt["align"]
    min_step, present = prompt["min_step"], prompt["present"]
    deepest = deepest_resume(n_tokens, align)
    starts = [align_down(start, align) for start in prompt["user_starts"] if start <= deepest]

    assert taken == sorted(set(taken))
    for position in taken:
        assert position % align == 0
        assert resume < position <= n_tokens - MIN_EVALUATED
        assert position not in present
    # A repeat can resume as deep as any prompt may.
    assert deepest <= resume or deepest in {*taken, *present}
    # The last user message, and where the prompt left what was known.
    for must in (*starts[-1:], align_down(min(prompt["branch"], deepest), align)):
        assert must <= resume or must in {*taken, *present}
    # Between them, one per step and not fewer.
    wanted = {deepest, *starts[-1:], align_down(min(prompt["branch"], deepest), align)}
    there = sorted({0, *present, *taken})
    for before, position in pairwise(there):
        if position in taken and position not in wanted:
            assert position in starts
            assert position - before >= min_step
    for start in starts:
        if start > resume and start not in there:
            assert start - max(p for p in there if p < start) < min_step


# -- which -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "limit", "align", "expected"),
    [
        ([10, 20, 30], 25, 1, 20),
        ([10, 20, 30], 30, 1, 30),
        ([10, 20, 30], 9, 1, 0),
        ([10, 16, 30], 30, 8, 16),
        ([], 30, 1, 0),
    ],
)
def test_the_deepest_that_fits_is_restored(
    found: list[int], limit: int, align: int, expected: int
) -> None:
    assert best_to_restore(found, limit, align) == expected


@given(found=positions, limit=st.integers(0, 400), align=aligns)
def test_best_to_restore_is_the_best(found: list[int], limit: int, align: int) -> None:
    best = best_to_restore(iter(found), limit, align)
    assert best in (0, *found)
    assert best <= limit
    assert best % align == 0
    assert not [p for p in found if best < p <= limit and p % align == 0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([10, 20], 10),
        ([10, 12, 40], 12),
        ([2, 12, 40], 2),
        ([10, 20, 30], 10),  # of equals, the first
        ([10, 50, 51], 10),  # never the deepest, however near to the one before
    ],
)
def test_the_least_missed_by_hand(found: list[int], expected: int) -> None:
    assert least_missed(found) == expected


@given(found=st.lists(st.integers(1, 50), unique=True, min_size=2, max_size=8).map(sorted))
def test_the_least_missed_costs_least(found: list[int]) -> None:
    """Brute force: the most that any prompt evaluates more without it."""

    def lost(position: int) -> int:
        kept = [p for p in found if p != position]
        ends = range(found[-1])
        return max(best_to_restore(found, n, 1) - best_to_restore(kept, n, 1) for n in ends)

    dropped = least_missed(found)
    assert dropped != found[-1]
    assert lost(dropped) == min(map(lost, found[:-1]))


@pytest.mark.parametrize("found", [[], [7]])
def test_there_must_be_two_to_drop_one(found: list[int]) -> None:
    with pytest.raises(InvalidValue, match=f"of {len(found)} checkpoints"):
        least_missed(found)


def test_fault_23_thinning_out_keeps_coverage() -> None:
    """Capacity 4, checkpoints at 10..80: not just the newest four."""
    kept: list[int] = []
    for position in range(10, 90, 10):
        kept.append(position)
        while len(kept) > 4:
            kept.remove(least_missed(kept))
    assert len(kept) == 4
    assert kept[-1] == 80
    assert max(after - before for before, after in pairwise([0, *kept])) <= 40
    assert best_to_restore(kept, 45, 1) >= 20


def test_fault_21_many_short_turns_do_not_push_the_early_ones_out() -> None:
    kept = [10, 24]
    for position in range(80, 100, 2):
        kept.append(position)
        while len(kept) > 8:
            kept.remove(least_missed(kept))
    assert best_to_restore(kept, 30, 1) == 24
